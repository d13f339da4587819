"""Runs a comparison in a mount namespace of its own, which covers the folders of `rig.COVERED`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable

import nvidia
import rig
from say import TestError

REPO = Path(__file__).resolve().parents[2]
#: Set in the process that runs inside the mount namespace: the folder of the comparison. What is mounted from it there can be
#: removed only once the namespace has ended.
_INSIDE = "BERTH_COMPAT_INSIDE"


def add_programs(parser: argparse.ArgumentParser) -> None:
    target = REPO / "target" / "debug"
    parser.add_argument("--berth", type=Path, default=target / "berth", help="the program; default: that of `cargo build`")
    parser.add_argument("--nvml-library", type=Path, default=target / "libfake_nvml.so")
    parser.add_argument("--kubelet", type=Path, default=target / "examples" / "node", help="the stand-in kubelet")


def run(name: str, args: argparse.Namespace, compare: Callable[[rig.Rig], int]) -> int:
    """The exit status of `compare`, or 2 if it could not run."""

    def on_a_node(folder: Path) -> int:
        node = rig.Rig(folder, args.nvml_library, args.kubelet)
        node.warm(args.berth)
        return compare(node)

    return inside(name, [args.berth, args.nvml_library, args.kubelet], on_a_node)


def inside(name: str, programs: list[Path], act: Callable[[Path], int]) -> int:
    """The exit status of `act`, which gets an empty folder, or 2 if it could not run. The script runs twice: outside, then inside."""
    folder = os.environ.get(_INSIDE)
    if not folder:
        return _enter(name)
    for program in programs:
        if not program.is_file():
            print(f"{name}: {program} is not there: `just {name}` builds it", file=sys.stderr)
            return 2
    try:
        return act(Path(folder))
    except TestError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def _enter(name: str) -> int:
    if os.geteuid() != 0:
        print(f"{name}: it mounts folders over /dev and /var/lib in a namespace of its own: run it as root", file=sys.stderr)
        return 2
    try:
        nvidia.MODULE.build()
    except TestError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    made = [folder for folder in rig.COVERED if not os.path.isdir(folder)]
    for folder in made:
        os.makedirs(folder)
    try:
        with tempfile.TemporaryDirectory(prefix="berth-compat-") as folder:
            command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
            return subprocess.run(command, env={**os.environ, _INSIDE: folder}, check=False).returncode
    finally:
        for folder in made:
            os.rmdir(folder)
