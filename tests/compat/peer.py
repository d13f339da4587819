#!/usr/bin/env python3
"""NVIDIA's device plugin and Berth measured in turn: `just bench-peer`, or `python3 tests/compat/peer.py`.

Builds NVIDIA's plugin and runs `harness bench-peer` (tests/harness) in a mount namespace with the device nodes and
folders that both programs need, and with the folder of the kubelet in memory. Other arguments are passed on to it:
`--rounds N`, `--only SECTION`, `--glance`, `--berth PATH`, `--help`. It needs root (for the mount namespace) and Go.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests" / "e2e"))

import nvidia  # noqa: E402

import namespace  # noqa: E402
import rig  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    target = REPO / "target" / "release"
    parser.add_argument("--harness", type=Path, default=target / "harness", help="the program; default: that of `just bench-peer`")
    args, passed_on = parser.parse_known_args()
    command = [args.harness, "bench-peer", "--nvidia", nvidia.MODULE.folder / "nvidia-device-plugin", *passed_on]
    library = args.harness.with_name("libfake_nvml.so")

    def measure(folder: Path) -> int:
        rig.Rig(folder, library, None)
        rig.mount("-t", "tmpfs", "none", rig.KUBELET.parent)
        rig.KUBELET.mkdir()
        return subprocess.run(command, check=False).returncode

    return namespace.inside("bench-peer", [args.harness, library], measure)


if __name__ == "__main__":
    sys.exit(main())
