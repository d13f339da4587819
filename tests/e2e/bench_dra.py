#!/usr/bin/env python3
"""Berth's DRA driver measured at a real API server, and NVIDIA's in turn: `just bench-dra`, or `python3 tests/e2e/bench_dra.py`.

Starts etcd and an API server, and runs `harness bench-dra` (tests/harness) beside them, in a mount namespace whose /run lies in
memory, as on a node, and whose /var/lib is a folder of the disk that is measured: `BERTH_BENCH_DIR`, or beside the harness.
`--nvidia PLUGIN` measures NVIDIA's DRA driver, too; README.md says how it is built. Other arguments are passed on: `--rounds N`,
`--glance`, `--berth PATH`, `--help`. It needs root (for the mount namespace and for device nodes) and Go.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True

import machine
import process
from controlplane import ETCD, MODULE, ControlPlane
from places import LIB, REPO, RUN, cache
from say import TestError, note, problem

#: Set in the process that runs inside the mount namespace: the folder on the disk. It can be removed only once the namespace
#: has ended.
_INSIDE = "BERTH_BENCH_DRA_INSIDE"


class _Absent:
    """A part of the control plane that does not run."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def check(self) -> None:
        pass


class Server(ControlPlane):
    """etcd and the API server alone: a controller would release claims whose pods do not exist."""

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self._controllers = self._scheduler = _Absent()


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    target = REPO / "target" / "release"
    parser.add_argument("--harness", type=Path, default=target / "harness", help="the program; default: that of `just bench-dra`")
    parser.add_argument("--nvidia", type=Path, help="gpu-kubelet-plugin of NVIDIA's DRA driver")
    args, passed_on = parser.parse_known_args()
    args.harness = args.harness.resolve()
    try:
        disk = os.environ.get(_INSIDE)
        return _inside(Path(disk), args, passed_on) if disk else _outside(args, passed_on)
    except TestError as error:
        problem(str(error))
        return 2
    except KeyboardInterrupt:
        problem("interrupted")
        return 2


def _outside(args: argparse.Namespace, passed_on: list[str]) -> int:
    """Checks what is needed, and runs this script again in a mount namespace of its own."""
    for program in (args.harness, args.nvidia):
        if program and not program.is_file():
            raise TestError(f"{program} is not there: `just bench-dra` builds the harness, and README.md says how NVIDIA's driver is built")
    if {"--help", "-h"} & set(passed_on):
        return subprocess.run([args.harness, "bench-dra", "--help"], check=False).returncode
    held = machine.lock()
    if not Path(machine.PACKAGES["openssl"]).exists():
        raise TestError("install the package openssl: the API server's certificate is made by it")
    for module in (ETCD, MODULE):
        module.build()
    disk = Path(os.environ.get("BERTH_BENCH_DIR") or args.harness.with_name("tmp"))
    disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-dra-", dir=disk) as folder:
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        status = subprocess.run(command, env={**os.environ, _INSIDE: folder}, check=False).returncode
    held.close()
    return status


def _inside(disk: Path, args: argparse.Namespace, passed_on: list[str]) -> int:
    logs = cache() / "logs-bench-dra"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    nvidia = ["--nvidia", args.nvidia.resolve()] if args.nvidia else []
    process.run(["mount", "--bind", disk, "/var/lib"], "mount /var/lib")
    process.run(["mount", "-t", "tmpfs", "none", "/run"], "mount /run")
    folders = {"--disk": LIB / "bench", "--memory": RUN / "bench"}
    for folder in folders.values():
        folder.mkdir(parents=True)
    server = Server(logs)
    try:
        server.start()
        command = [args.harness, "bench-dra", "--kubeconfig", server.kubeconfig, "--berth-kubeconfig", server.berth_kubeconfig]
        command += ["--logs", logs, *nvidia, *passed_on]
        for flag, folder in folders.items():
            command += [flag, folder]
        note(f"Kubernetes {MODULE.version}, etcd {ETCD.version}; logs in {logs}")
        return subprocess.run(command, check=False).returncode
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
