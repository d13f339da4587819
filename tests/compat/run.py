#!/usr/bin/env python3
"""NVIDIA's device plugin and Berth under the same configurations: `just compat`, or `python3 tests/compat/run.py`.

Both programs see one fake NVML and one stand-in kubelet, in mount namespaces of their own, and are given the same
file, variables and flags. The device lists and the answers to Allocate and GetPreferredAllocation are compared,
resource by resource.

  same       both serve the same, or both refuse
  named      Berth does something else, or does not use a setting, and its output names the setting and what to do
  different  the outcomes differ
  silent     a setting is not used and Berth's output does not name it

It needs root (for the mount namespaces) and Go. Exit status: 0 if every case is same or named, 1
otherwise, 2 if the comparison could not run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests" / "e2e"))

import nvidia  # noqa: E402

import configurations  # noqa: E402
import namespace  # noqa: E402
import rig  # noqa: E402
from verdict import judge  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    namespace.add_programs(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    parser.add_argument("--verbose", action="store_true", help="show both outcomes of every case")
    args = parser.parse_args()
    return namespace.run("compat", args, lambda node: compare(node, args))


def compare(node: rig.Rig, args: argparse.Namespace) -> int:
    counts = {"same": 0, "named": 0, "different": 0, "silent": 0}
    theirs = [nvidia.MODULE.folder / "nvidia-device-plugin"]
    for case in configurations.CASES:
        if args.only not in case.name:
            continue
        there = node.run(case, theirs, None) if case.judge else case.outcome()
        wanted = replace(there, **case.instead)
        found = node.run(case, rig.berth_command(args.berth, node), wanted)
        verdict, why = judge(case, wanted, found)
        counts[verdict] += 1
        print(f"{verdict:<9} {case.name}{': ' + why if why else ''}", flush=True)
        if args.verbose or verdict in ("different", "silent"):
            print(f"          there: {there}\n{indented(there.log)}\n          here:  {found}\n{indented(found.log)}", flush=True)
    print("compat: " + ", ".join(f"{count} {word}" for word, count in counts.items()), flush=True)
    return 1 if counts["different"] or counts["silent"] else 0


def indented(log: str) -> str:
    return "\n".join(f"          | {line[:300]}" for line in log.splitlines()[-12:])


if __name__ == "__main__":
    sys.exit(main())
