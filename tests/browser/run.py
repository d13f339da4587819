#!/usr/bin/env python3
"""Swagger UI and the page `/` in a headless Chromium: `just browser`.

It needs Chromium (Debian: apt-get install chromium) and what requirements.txt names; neither root nor a GPU
nor a cluster. Screenshots go to --out, for people to look at. Exit status: 0 all passed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# No compiled files in the checkout.
sys.dont_write_bytecode = True

from say import Score, TestError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    args = _arguments()
    score = Score()
    try:
        import access, browser, churn, documents, many, page, past, restart, shares, sheets, sixteen, states, swagger  # noqa: E401
        from node import Node, SixteenGpuNode
        from playwright.sync_api import expect, sync_playwright

        chromium = browser.find(args.chromium)
        # On a busy machine the page loads the state less often: every five seconds.
        expect.set_options(timeout=20_000)
        for program in (args.berth, args.kubelet):
            if not program.is_file():
                raise TestError(f"{program} is not there: `just browser` builds it")
        browser.OUT, browser.PAGE = args.out, args.page
        documents.IMAGES = ROOT / "docs" / "images" if args.images else None
        groups = [
            (kind, [case for module in modules for case in module.CASES if any(word in case.__name__ for word in args.only.split(","))])
            for kind, modules in (
                (Node, (swagger, page, sheets, states, shares, access, many, restart)),
                (SixteenGpuNode, (sixteen, past, documents, churn)),
            )
        ]
        if not any(cases for _, cases in groups):
            raise TestError(f"no case has {args.only!r} in its name")
        for kind, cases in groups:
            if not cases:
                continue
            with kind(args.berth, args.kubelet) as node, sync_playwright() as playwright:
                node.pods()
                running = browser.launch(playwright, chromium)
                for case in cases:
                    _run(case, running, node, score, browser)
                running.close()
    except ModuleNotFoundError as error:
        score.fail("the start", f"{error}: pip install -r tests/browser/requirements.txt")
    except TestError as trouble:
        score.fail("the start", trouble)
    print(score.last_line(), flush=True)
    return 0 if score.failed == 0 else 1


def _run(case, running, node, score: Score, browser) -> None:
    name = case.__name__.replace("_", " ")
    try:
        with browser.opened(running, node.base) as watch:
            case(watch, node)
        score.ok(name)
    except Exception as error:  # noqa: BLE001: a case that broke off is a failed case, and the next one runs
        score.fail(name, error)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("berth", nargs="?", type=Path, default=ROOT / "target/release/berth", help="the daemon's program")
    parser.add_argument("--kubelet", type=Path, default=ROOT / "target/release/examples/node", help="the stand-in kubelet's program")
    parser.add_argument("--chromium", help="Chromium's program; default: the one of PATH")
    parser.add_argument("--out", type=Path, default=ROOT / "target/browser", help="folder for screenshots")
    parser.add_argument("--images", action="store_true", help="write the pictures of the documentation to docs/images")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="show the page's files of this folder, not those of the program")
    parser.add_argument("--only", default="", metavar="WORD", help="only cases with this in their name; several are separated by commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
