#!/usr/bin/env python3
"""What `berth guard` costs: `just bench-guard`, or `python3 tests/nri/bench.py`.

containerd's own NRI library acts as the runtime (main.go). It synchronizes 250 containers with grants, then creates
and starts 400 more, one each 20 ms, and ends each; the time of the two calls is what the guard adds to a container's
start. Every second one has no grant (`plain`): its time is what the guard adds to all other containers of a node. The
fake NVML keeps memory limits, and the guard sets and reads one for each container with a grant, where this program
can make cgroups of version 2 (root). Then the guard is idle for 30 s, with the 250 containers. `memory` is its
proportional share of resident memory; the anonymous part is what it allocated itself, and the rest is pages of the
program. Several rounds; each figure is the median. Goals that are missed are named. The last line of the output is
`bench-guard: start_p99=MS sync=MS memory=MIB idle_wakeups=PER_S`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from run import CONTAINERS, SECONDS, VERSIONS, build

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).resolve().parents[2] / "target")) / "release"
GPU = "GPU-00000000-0000-4000-8000-000000000001"
#: What a container is granted of it; `%d` is the container's number.
GRANT = f"0000002a-%d {GPU}=4096"
#: Bytes of each container's environment.
ENVIRONMENT_BYTES = 2000
IDLE_SECONDS = 30
#: Threads of tokio end after ten seconds without work.
SETTLE_SECONDS = 12
CGROUPS = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]


@contextmanager
def cgroup():
    """The folder of cgroup v2, and one below it for the containers' cgroups; None if it cannot be made."""
    root = next((root for root in CGROUPS if (root / "cgroup.controllers").exists()), CGROUPS[0])
    folder = root / f"berth-bench-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield root, None
        return
    try:
        yield root, folder
    finally:
        (folder / "cgroup.kill").write_text("1", encoding="ascii")
        end = time.monotonic() + SECONDS
        while "populated 1" in (folder / "cgroup.events").read_text(encoding="ascii") and time.monotonic() < end:
            time.sleep(0.02)
        for left in folder.glob("container-*"):
            left.rmdir()
        folder.rmdir()


def started(stack: ExitStack, args: list, log: Path, environment: dict) -> subprocess.Popen:
    with log.open("ab") as out:
        child = subprocess.Popen(args, stdout=out, stderr=out, env={**os.environ, **environment})

    def stop() -> None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    stack.callback(stop)
    return child


def wakeups(pid: int) -> dict[str, int]:
    """How often each thread of the process has run after a wait."""
    counts = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text(encoding="ascii").splitlines()
        counts[task.name] = next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return counts


def memory_mib(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def measured(runtime_program: Path) -> dict[str, float]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-bench-guard-")))
        root, containers = stack.enter_context(cgroup())
        gpu = {"uuid": GPU, "name": "NVIDIA H100", "memory_total_mib": 81559, "pci_bus_id": "00000000:01:00.0"}
        (folder / "gpus.json").write_text(json.dumps({"gpus": [gpu], "memory_limits": "dmem"}), encoding="utf-8")
        settings = {
            "nodeName": "bench",
            "kubeletDir": str(folder / "kubelet"),
            "stateDir": str(folder / "state"),
            "gpus": "nvml",
            "nvmlLibrary": str(TARGET / "libfake_nvml.so"),
            "adminListen": "127.0.0.1:0",
            "guard": {"socket": str(folder / "guard.sock"), "nriSocket": str(folder / "nri.sock"), "cgroupRoot": str(root)},
        }
        config = folder / "berth.yaml"
        config.write_text(json.dumps(settings), encoding="utf-8")
        environment = {"FAKE_NVML_CONFIG": str(folder / "gpus.json")}
        log = folder / "log"
        hold = {**os.environ, "NRI_HOLD": "1", "NRI_PACED": "1", "NRI_GRANT": GRANT, "NRI_CGROUP": str(containers or "")}
        command = [runtime_program, folder, str(CONTAINERS), str(ENVIRONMENT_BYTES)]
        runtime = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=hold)
        stack.callback(runtime.kill)
        until_exists(folder / "nri.sock")
        guard = started(stack, [TARGET / "berth", "guard", "--config", config], log, environment)
        until_exists(folder / "guard.sock")
        started(stack, [TARGET / "berth", "serve", "--config", config], log, environment)
        line = runtime.stdout.readline()
        if not line:
            raise SystemExit(f"bench-guard: the runtime failed: {runtime.stderr.read()}\n{log.read_text(errors='replace')[-2000:]}")
        result = json.loads(line)
        limits = folder / "gpus.limits"
        limited = limits.is_dir() and any(GPU in file.name for file in limits.iterdir())
        # What follows the last container has ended by then, and so have threads that wait for work.
        time.sleep(SETTLE_SECONDS)
        before = wakeups(guard.pid)
        time.sleep(IDLE_SECONDS)
        after = wakeups(guard.pid)
        rest = sum(count - before.get(thread, 0) for thread, count in after.items()) / IDLE_SECONDS
        figures = {
            "plain_p50": result["addedPlainP50Us"] / 1000,
            "plain_p99": result["addedPlainP99Us"] / 1000,
            "start_p50": result["addedP50Us"] / 1000,
            "start_p99": result["addedP99Us"] / 1000,
            "sync": result["syncMs"],
            "memory": memory_mib(guard.pid, "Pss"),
            "memory_anonymous": memory_mib(guard.pid, "Anonymous"),
            "idle_wakeups": rest,
        }
        runtime.stdin.close()
        runtime.wait(SECONDS)
        shown = "  ".join(f"{name}={value:.2f}" for name, value in figures.items())
        print(f"      {shown}  limits={'set' if limited else 'not tried'}", flush=True)
        return figures


def until_exists(path: Path) -> None:
    end = time.monotonic() + SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise SystemExit(f"bench-guard: {path} did not appear in {SECONDS} s")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description="What `berth guard` costs; needs Go, and root for memory limits.")
    parser.add_argument("--rounds", type=int, default=3, help="each figure is the median of so many; default: 3")
    args = parser.parse_args()
    for name in ("berth", "libfake_nvml.so"):
        if not (TARGET / name).exists():
            raise SystemExit(f"{TARGET / name} is not there: run `cargo build --release -p berth -p fake-nvml`")
    with tempfile.TemporaryDirectory(prefix="berth-nri-build-") as folder:
        program = build(Path(folder), VERSIONS["0.12"])
        rounds = [measured(program) for _ in range(args.rounds)]
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    goals = {"start_p99": 1.0, "sync": 200.0, "memory": 8.0, "idle_wakeups": 1.0}
    missed = [f"{name} is {middle[name]:.2f}, and the goal is {goal:g}" for name, goal in goals.items() if middle[name] > goal]
    print("\n".join(f"missed {text}" for text in missed) or "ok    all goals are met")
    print(
        f"bench-guard: start_p99={middle['start_p99']:.2f}ms sync={middle['sync']:.1f}ms "
        f"memory={middle['memory']:.1f}MiB idle_wakeups={middle['idle_wakeups']:.2f}/s"
    )


if __name__ == "__main__":
    main()
