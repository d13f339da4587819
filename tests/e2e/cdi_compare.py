#!/usr/bin/env python3
"""Compares Berth's own CDI specification with that of NVIDIA's nvidia-ctk for the same driver.

    sudo -E python3 tests/e2e/cdi_compare.py            exit code 0 if they differ only where they may
    sudo -E python3 tests/e2e/cdi_compare.py --update   also writes the expectations of tests/it/gpus/cdi.rs again

Neither needs a GPU: the driver is a folder of stand-ins, NVML is tests/fake-nvml. nvidia-ctk is built from Go modules, once.
Root is needed for device nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from driver_root import DriverRoot  # noqa: E402
from gpus import uuids  # noqa: E402
from nvidia import TOOLKIT  # noqa: E402
from places import REPO  # noqa: E402
from say import TestError, until  # noqa: E402

GOLDEN = REPO / "tests" / "it" / "data" / "cdi"
_GPUS = 2
#: The subcommands of nvidia-cdi-hook 1.20; Berth looks for their names in the program.
_SUBCOMMANDS = "enable-cuda-compat disable-device-node-modification update-application-profile apply-cuda-memory-limits"


def main() -> int:
    args = _arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="berth-cdi-") as name:
            return _compare(args, Path(name))
    except TestError as reason:
        print(f"cdi-compare: {reason}", file=sys.stderr)
        return 2


def _compare(args: argparse.Namespace, folder: Path) -> int:
    root = folder / "driver"
    DriverRoot(root, _GPUS, args.nvml_library)
    hook = folder / "nvidia-cdi-hook"
    hook.write_text(_SUBCOMMANDS, encoding="ascii")
    gpus = [
        {"uuid": uuid, "name": "NVIDIA H100 80GB HBM3", "memory_total_mib": 81559, "pci_bus_id": f"00000000:{n + 1:02x}:00.0"}
        for n, uuid in enumerate(uuids(_GPUS))
    ]
    (folder / "gpus.json").write_text(json.dumps({"gpus": gpus}), encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "FAKE_NVML_CONFIG": str(folder / "gpus.json")}
    theirs = _theirs(folder, root, hook, environment)
    ours = _ours(args, folder, root, hook, environment)
    if args.update:
        text = theirs.read_text(encoding="utf-8").replace(str(root), "@ROOT@")
        golden = GOLDEN / f"nvidia-ctk-{TOOLKIT.version.removeprefix('v')}.json"
        golden.write_text(json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"wrote {golden}")
    # The program of a hook is not compared, and paths in the container need not exist on this machine.
    command = [args.berth, "cdi", "check", ours, "--against", theirs]
    done = subprocess.run(command, check=False, text=True, capture_output=True)
    print(done.stdout + done.stderr, end="")
    print(f"cdi-compare: {'equal' if done.returncode == 0 else 'different'}")
    return done.returncode


def _theirs(folder: Path, root: Path, hook: Path, environment: dict[str, str]) -> Path:
    out = folder / "nvidia.json"
    flags = ["--mode=nvml", "--format=json", f"--output={out}", f"--driver-root={root}", f"--dev-root={root}"]
    command = [TOOLKIT.build() / "nvidia-ctk", "cdi", "generate", *flags, f"--nvidia-cdi-hook-path={hook}"]
    done = subprocess.run(command, env=environment, check=False, text=True, capture_output=True)
    if done.returncode != 0:
        raise TestError(f"nvidia-ctk cdi generate: {done.stderr[-2000:]}")
    return out


def _ours(args: argparse.Namespace, folder: Path, root: Path, hook: Path, environment: dict[str, str]) -> Path:
    """Berth writes its specification at the start, without a kubelet."""
    plugin = '[plugins."io.containerd.cri.v1.runtime"]'
    runtime = f'version = 3\n{plugin}\ncdi_spec_dirs = ["{folder}/cdi"]\n'
    (folder / "runtime.toml").write_text(runtime, encoding="ascii")
    settings = {
        "gpus": "nvml",
        "nvmlLibrary": str(args.nvml_library),
        "stateDir": str(folder / "state"),
        "kubeletDir": str(folder / "kubelet"),
        "adminListen": "127.0.0.1:0",
        "skipAdoption": True,
        "containerEdits": {"nvidiaDriverRoot": str(root)},
        "containerRuntime": {"configFiles": [str(folder / "runtime.toml")]},
        "cdi": {"generate": "always", "folders": [str(folder / "cdi")]},
    }
    config = folder / "berth.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")
    (folder / "kubelet" / "device-plugins").mkdir(parents=True)
    out = folder / "cdi" / "berth-gpu.json"
    log = folder / "berth.log"
    with open(log, "wb") as errors:
        command = [args.berth, "serve", "--config", config]
        serving = subprocess.Popen(command, env={**environment, "NVIDIA_CDI_HOOK_PATH": str(hook)}, stdout=errors, stderr=errors)
        try:
            until("berth writes its specification", 120, lambda: out.exists() or serving.poll() is not None)
            time.sleep(0.1)
        finally:
            serving.terminate()
            serving.wait(30)
    if not out.exists():
        raise TestError(f"berth wrote no specification: {log.read_text(encoding='utf-8')[-2000:]}")
    return out


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = REPO / "target" / "debug"
    parser.add_argument("--berth", type=Path, default=target / "berth")
    parser.add_argument("--nvml-library", type=Path, default=target / "libfake_nvml.so")
    parser.add_argument("--update", action="store_true", help="write the expectations of tests/it/gpus/cdi.rs again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
