"""The guard's connection against containerd's own NRI library, in the versions of containerd 1.7 and of today.

    python3 tests/nri/run.py        needs Go and `cargo build --release -p berth-guard --example observe`

The library plays the runtime (main.go): it synchronizes 250 containers, takes 1,000 through their lives, and has one
refused. Ends with `nri: ok versions=2` or with the first difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OBSERVE = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target")) / "release/examples/observe"
CONTAINERS = 250
LIVES = 1000
#: Of each container's environment: with the longer one the synchronization needs several messages of 4 MiB.
ENVIRONMENT_BYTES = (100, 40_000)
VERSIONS = {"0.8": ["-modfile=nri08.mod", "-tags=nri08"], "0.12": []}
SECONDS = 120


def build(folder: Path, flags: list[str]) -> Path:
    program = folder / "runtime"
    subprocess.run(["go", "build", "-C", HERE, *flags, "-o", program, "."], check=True)
    return program


def session(program: Path, size: int) -> tuple[dict, list[str]]:
    """What the runtime measured, and the lines that the plugin printed."""
    with tempfile.TemporaryDirectory(prefix="berth-nri-") as name:
        socket = Path(name) / "nri.sock"
        with subprocess.Popen(
            [program, name, str(CONTAINERS), str(size)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as runtime:
            end = time.monotonic() + SECONDS
            while not socket.exists() and time.monotonic() < end:
                time.sleep(0.05)
            plugin = subprocess.run([OBSERVE, socket], capture_output=True, text=True, timeout=SECONDS)
            printed, log = runtime.communicate(timeout=SECONDS)
        if runtime.returncode or plugin.returncode:
            raise SystemExit(f"the runtime ended with {runtime.returncode}: {log}\nthe plugin: {plugin.stderr}")
        return json.loads(printed), plugin.stdout.splitlines()


def check(version: str, size: int, result: dict, lines: list[str]) -> None:
    counts = {word: sum(line.startswith(word) for line in lines) for word in ("create ", "start ", "StopContainer ", "RemoveContainer ", "StopPodSandbox ", "RemovePodSandbox ")}
    wanted = {word: LIVES + (word == "create ") for word in counts}
    problems = []
    if f"synchronized pods={CONTAINERS} containers={CONTAINERS}" not in lines:
        problems.append(f"synchronized: {lines[:3]}")
    if counts != wanted:
        problems.append(f"calls: {counts}, not {wanted}")
    if result["adjusted"] != LIVES:
        problems.append(f"{result['adjusted']} of {LIVES} containers have the variable")
    if "refuses containers of this name" not in result["refusalError"]:
        problems.append(f"the refusal's error is {result['refusalError']!r}")
    if problems:
        raise SystemExit(f"nri: NRI {version}, {size} bytes: {'; '.join(problems)}")
    print(f"ok    NRI {version}, {size} bytes of environment: sync {result['syncMs']} ms, CreateContainer p50 {result['createP50Us']} us, p99 {result['createP99Us']} us")


def main() -> None:
    if not OBSERVE.exists():
        raise SystemExit(f"{OBSERVE} is not there: run `cargo build --release -p berth-guard --example observe`")
    with tempfile.TemporaryDirectory(prefix="berth-nri-build-") as folder:
        for version, flags in VERSIONS.items():
            program = build(Path(folder), flags)
            for size in ENVIRONMENT_BYTES:
                check(version, size, *session(program, size))
    print(f"nri: ok versions={len(VERSIONS)}")


if __name__ == "__main__":
    sys.exit(main())
