#!/usr/bin/env python3
"""Rollouts at a real API server: `just fleet`, or `sudo -E python3 tests/fleet/run.py`. See README.md beside this file.

Exit status: 0 all passed, 1 a case failed, 2 the test could not be run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import CASES, REGISTRY  # noqa: E402
from cluster import Fleet, controlplane, machine, places  # noqa: E402
import registry  # noqa: E402
from say import Score, TestError, note, problem  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Rollouts at a real API server. Needs root and Go; see tests/fleet/README.md.")
    default = places.REPO / "target" / "release"
    parser.add_argument("--programs", type=Path, default=default, help="the folder of berth and simulated-nodes; default: target/release")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--kubernetes", help="the version of the API server")
    parser.add_argument("--only", action="append", help="the beginning of a case's name; may be repeated")
    args = parser.parse_args()
    if args.kubernetes:
        controlplane.MODULE.choose(f"v{args.kubernetes.removeprefix('v')}")
    try:
        held = machine.lock()
        for name in ("berth", "simulated-nodes"):
            if not (args.programs / name).is_file():
                raise TestError(f"{args.programs / name} is missing: run `cargo build --release -p berth -p demo` first")
        for module in (controlplane.ETCD, controlplane.MODULE, registry.MODULE, registry.ORAS):
            module.build()
        score = play(args)
    except TestError as reason:
        problem(str(reason))
        return 2
    except KeyboardInterrupt:
        problem("interrupted; everything is stopped and removed")
        return 2
    held.close()
    print(score.last_line().replace("e2e", "fleet"), flush=True)
    return 0 if score.failed == 0 and score.passed > 0 else 1


def play(args: argparse.Namespace) -> Score:
    score, logs = Score(), places.cache() / "logs" / time.strftime("fleet-%Y%m%d-%H%M%S")
    logs.mkdir(parents=True)
    fleet = Fleet(args.programs, logs, args.nodes, repository=f"http://{REGISTRY}/gpu")
    try:
        begin = time.monotonic()
        fleet.start()
        note(f"API server {controlplane.MODULE.version}, {args.nodes} nodes after {time.monotonic() - begin:.0f} s; logs in {logs}")
        for name, case in CASES.items():
            if args.only and not any(name.startswith(one) for one in args.only):
                continue
            try:
                score.ok(name, case(fleet) or "")
            except Exception as why:  # noqa: BLE001 - whatever a case meets is its failure
                score.fail(name, why if str(why) else repr(why))
    finally:
        fleet.stop()
    return score


if __name__ == "__main__":
    sys.exit(main())
