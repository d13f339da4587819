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
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests" / "e2e"))

import nvidia  # noqa: E402
from say import TestError  # noqa: E402

import configurations  # noqa: E402
import rig  # noqa: E402
from verdict import judge  # noqa: E402

#: Set in the process that runs inside the mount namespace.
INSIDE = "BERTH_COMPAT_INSIDE"
#: Folders whose paths are fixed in NVIDIA's plugin, and that of the container runtime's configuration. Each is covered by an
#: empty one; those that were not there go again.
COVERED = ["/var/lib/kubelet", "/var/run/cdi", "/driver-root", "/etc/containerd"]


def main() -> int:
    args = arguments()
    if os.environ.get(INSIDE):
        return run(args)
    if os.geteuid() != 0:
        print("compat: it mounts folders over /dev and /var/lib/kubelet in a namespace of its own: run it as root", file=sys.stderr)
        return 2
    try:
        nvidia.MODULE.build()
    except TestError as trouble:
        print(f"compat: {trouble}", file=sys.stderr)
        return 2
    made = [folder for folder in COVERED if not os.path.isdir(folder)]
    for folder in made:
        os.makedirs(folder)
    try:
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode
    finally:
        for folder in made:
            os.rmdir(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = REPO / "target" / "debug"
    parser.add_argument("--berth", type=Path, default=target / "berth", help="the program; default: that of `cargo build`")
    parser.add_argument("--nvml-library", type=Path, default=target / "libfake_nvml.so")
    parser.add_argument("--kubelet", type=Path, default=target / "examples" / "node", help="the stand-in kubelet")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    parser.add_argument("--verbose", action="store_true", help="show both outcomes of every case")
    return parser.parse_args()


def run(args: argparse.Namespace) -> int:
    for program in (args.berth, args.nvml_library, args.kubelet):
        if not program.is_file():
            print(f"compat: {program} is not there: `just compat` builds it", file=sys.stderr)
            return 2
    folder = Path(tempfile.mkdtemp(prefix="berth-compat-"))
    counts = {"same": 0, "named": 0, "different": 0, "silent": 0}
    try:
        node = rig.Rig(folder, args.nvml_library, args.kubelet, COVERED)
        theirs = [nvidia.MODULE.folder / "nvidia-device-plugin"]
        node.warm(args.berth)
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
    except TestError as trouble:
        print(f"compat: {trouble}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("compat: " + ", ".join(f"{count} {word}" for word, count in counts.items()), flush=True)
    return 1 if counts["different"] or counts["silent"] else 0


def indented(log: str) -> str:
    return "\n".join(f"          | {line[:300]}" for line in log.splitlines()[-12:])


if __name__ == "__main__":
    sys.exit(main())
