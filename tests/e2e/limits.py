"""Memory limits at a real containerd and runc, with a fake NVML that keeps them: they are set before a container runs, they
are read back, and no other pod is delayed."""

from __future__ import annotations

import time
from pathlib import Path

import machine
from bench import Bench
from berth import Setup, slice_of
from guard import connected, seconds_to_run, start_guard, start_other_plugin
from gpus import uuids
from kubelet import healthy
from nvidia import TOOLKIT, apply_memory_limit
from places import GUARD_SOCKET
from pods import Container, Pod
from process import Process
from say import TestError, until
from scenario import Scenario

MIB = 1 << 20
#: The interval at which the guard reads all limits, plus a margin for a slow machine.
READ_SECONDS = 45
#: How long NVML takes in the case of a slow driver.
SLOW_MS = 1500
#: What a pod may take longer beside one that waits for a slow driver.
DELAY_SECONDS = 1
#: How long a container that may not run without limits is suspended, plus a margin.
KILLED_SECONDS = 40

_SLICES = (4096, 8192)


def in_force_at_first(bench: Bench) -> str:
    """Two GPUs, two values."""
    bench.berth.fake.limits_memory("dmem")
    start_guard(bench)
    supported = [one["supported"] for one in bench.berth.guard_status()["memoryLimits"]]
    if supported != [True, True]:
        raise TestError(f"the guard limits memory on {supported}: {bench.berth.guard_status()}")
    # An annotation of the pod is none of its container's, and gives it no other limit.
    key = "berth.dev/grant." + slice_of(_SLICES[0]).replace("/", "_")
    forged = {key: f"0000002a-7 {uuids(1)[0]}={4 * _SLICES[0]}"}
    pod = Pod("limited", [Container("main", {slice_of(mib): 1 for mib in _SLICES})], annotations=forged)
    bench.start(pod)
    earliest = written(pod)
    for gpu, mib in zip(uuids(2), _SLICES):
        file = limit_file(bench, pod, gpu)
        if hard_mib(file) != mib:
            raise TestError(f"the driver holds {hard_mib(file)} MiB on {gpu}, {mib} were granted")
        if file.stat().st_mtime_ns > earliest:
            raise TestError("the container wrote before its limit was set")
    for allocation in _of(bench, pod):
        limits = bench.berth.limits(allocation)
        states = [(one["state"], one.get("limitMiB")) for one in limits["perGpu"]]
        if limits["enforcedBy"] != "memoryLimits" or sorted(states) != [("set", mib) for mib in _SLICES]:
            raise TestError(f"the API shows {limits}")
    for line in ("berth_guard_connected 1", 'berth_memory_limits{state="set"} 2'):
        if line not in bench.berth.metrics():
            raise TestError(f"/metrics has no line {line}")
    return f"gpus=2 values_mib={','.join(map(str, _SLICES))}"


def restarts_without_berth(bench: Bench) -> None:
    """A container that starts again while Berth is down has its limit, of its new cgroup."""
    pod = bench.running[0]
    bench.berth.stop()
    before = cgroup_of(pod)
    bench.crash(pod, "main")
    if cgroup_of(pod) == before:
        raise TestError("the container has the same cgroup as before")
    for gpu, mib in zip(uuids(2), _SLICES):
        if hard_mib(limit_file(bench, pod, gpu)) != mib:
            raise TestError(f"the driver holds no limit of {mib} MiB on {gpu}")
    bench.berth.start()
    connected(bench)
    enforced(bench, pod, "memoryLimits")


def slow_driver(bench: Bench) -> str:
    """A pod beside one that is suspended while NVML answers is not delayed, and that one runs nothing before its limit is
    set."""
    usual = seconds_to_run(bench, Pod("usual", [Container("main", {})]))
    bench.berth.fake.faults({"call": "nvmlDeviceSetMemoryLimits_v1", "delay_ms": SLOW_MS})
    waits = Pod("waits", [Container("main", {slice_of(_SLICES[0]): 1})])
    bench.node.run(waits)
    until("the container is suspended", READ_SECONDS, _is_one_suspended, 0.05)
    beside = seconds_to_run(bench, Pod("beside", [Container("main", {})]))
    bench.start_known(waits)
    file = limit_file(bench, waits, uuids(1)[0])
    if file.stat().st_mtime_ns > written(waits):
        raise TestError("the container wrote before its limit was set")
    bench.berth.fake.faults()
    enforced(bench, waits, "memoryLimits")
    if beside > usual + DELAY_SECONDS:
        raise TestError(f"a pod took {beside:.1f} s beside the one that was held, and {usual:.1f} s before")
    return f"usual_s={usual:.1f} beside_s={beside:.1f}"


def beside_another_plugin(bench: Bench) -> None:
    """A plugin of the runtime, by containerd's own library, changes the same container."""
    other = start_other_plugin(bench)
    pod = Pod("beside", [Container("main", {slice_of(_SLICES[1]): 1})])
    bench.start(pod)
    if pod.environment("main").get("BESIDE") != "yes":
        raise TestError("the container was not changed by the other plugin")
    if enforced(bench, pod, "memoryLimits")["perGpu"][0]["state"] != "set":
        raise TestError("the limit was not set before the start")
    bench.node.delete(pod)
    bench.running.remove(pod)
    other.stop()


def hanging_driver(bench: Bench) -> str:
    """With `auto` a container runs after two seconds although NVML hangs, and the API says that nothing is enforced."""
    bench.berth.fake.faults({"call": "nvmlDeviceSetMemoryLimits_v1", "hang": True})
    pod = Pod("unlimited", [Container("main", {slice_of(_SLICES[0]): 1})])
    took = seconds_to_run(bench, pod)
    shown = enforced(bench, pod, "none")["perGpu"][0]
    if shown["state"] != "failed" or "not answered" not in shown["why"]:
        raise TestError(f"the API shows {shown}")
    bench.berth.fake.faults()
    limits = enforced(bench, pod, "memoryLimits")
    if limits["perGpu"][0]["state"] != "late":
        raise TestError(f"the API shows {limits}")
    return f"ran_after_s={took:.1f}"


def drifts(bench: Bench) -> None:
    """A limit that NVIDIA's hook changes is set again, and the third time the API says that none is enforced."""
    pod = bench.running[0]
    gpu = uuids(1)[0]
    file = limit_file(bench, pod, gpu)
    granted = hard_mib(file)

    def change() -> None:
        apply_memory_limit(bench.berth.fake, gpu, int(process_of(pod).name), 2 * granted)
        if hard_mib(file) != 2 * granted:
            raise TestError(f"the hook set a limit of {hard_mib(file)} MiB instead of {2 * granted} MiB")

    for times in (1, 2):
        change()
        until("the limit is set again", READ_SECONDS, lambda: hard_mib(file) == granted)

        def shows() -> bool:
            shown = [one for one in bench.berth.limits(_of(bench, pod)[0])["perGpu"] if one["gpu"] == gpu][0]
            return shown["timesChanged"] == times and shown["state"] == "set"

        until(f"the API shows {times} changes", READ_SECONDS, shows)
    change()
    first = next(a for a in _of(bench, pod) if gpu in _gpus(bench, a))
    until("the limit is given up", READ_SECONDS, lambda: bench.berth.limits(first)["enforcedBy"] == "none")
    time.sleep(1)
    if hard_mib(file) != 2 * granted:
        raise TestError("the limit was set again")


def started_without_guard(bench: Bench) -> None:
    """A pod that was started without the guard gets its limit late."""
    guard: Process = bench.shared
    guard.kill()
    until("the API shows that the guard is away", 10, lambda: not bench.berth.guard_status()["connected"])
    pod = Pod("late", [Container("main", {slice_of(_SLICES[1]): 1})])
    bench.start(pod)
    guard.start()
    connected(bench)
    limits = enforced(bench, pod, "memoryLimits")
    if limits["perGpu"][0]["state"] != "late":
        raise TestError(f"the API shows {limits}")


def older_driver(bench: Bench) -> None:
    """With a driver that sets no limits the guard says so, and pods run."""
    guard: Process = bench.shared
    bench.berth.fake.limits_memory("")
    guard.kill()
    guard.start()
    connected(bench)

    def shows() -> bool:
        status = bench.berth.guard_status()
        return all("615" in one.get("why", "") for one in status.get("memoryLimits", [{}]))

    until("the guard says that the driver is too old", 10, shows)
    pod = Pod("older", [Container("main", {slice_of(_SLICES[1]): 1})])
    bench.start(pod)
    enforced(bench, pod, "none")


def required(bench: Bench) -> str:
    """Under `require` nothing is offered that cannot be limited, and a container is killed if NVML does not answer."""
    guard: Process = bench.shared
    guard.stop()
    bench.berth.stop()
    settings = {**bench.berth.settings, "enforce": {"memory": "require"}}
    bench.berth.configure(settings)
    bench.berth.start()
    resource = slice_of(_SLICES[1])
    until("the kubelet has no device that cannot be limited", 30, lambda: not _free(bench, healthy(resource)))
    bench.berth.fake.limits_memory("misc")
    guard.start()
    connected(bench)
    until("the devices can be allocated again", 30, lambda: _free(bench, healthy(resource)))
    bench.berth.fake.faults({"call": "nvmlDeviceSetMemoryLimits_v1", "hang": True})
    pod = Pod("never", [Container("main", {resource: 1})])
    bench.node.run(pod)

    def killed() -> bool:
        statuses = bench.node.status(pod)["status"].get("containerStatuses", [])
        return any(s.get("restartCount", 0) > 0 or "terminated" in s.get("lastState", {}) for s in statuses)

    until("the container is killed", KILLED_SECONDS, killed)
    if (pod.folder / "main.env").exists():
        raise TestError("the container ran without its limit")
    bench.berth.fake.faults()
    pod.started("main")
    bench.start_known(pod)
    enforced(bench, pod, "memoryLimits")
    return "killed=yes"


def _free(bench: Bench, devices) -> set:
    held = {device for allocation in bench.berth.allocations() for device in allocation.devices}
    return set(devices) - held


def _of(bench: Bench, pod: Pod) -> list[str]:
    """The ids of a pod's allocations."""
    return sorted(a.id for a in bench.berth.allocations() if a.holder and a.holder[1] == pod.name)


def _gpus(bench: Bench, allocation: str) -> frozenset:
    return next(a.gpus for a in bench.berth.allocations() if a.id == allocation)


def enforced(bench: Bench, pod: Pod, by: str) -> dict:
    """Waits until the API says what enforces the limits of a pod's first allocation, and returns them."""
    limits: dict = {}

    def shows() -> bool:
        limits.clear()
        limits.update(bench.berth.limits(_of(bench, pod)[0]))
        if limits["enforcedBy"] != by:
            raise TestError(f"the API shows {limits}")
        return True

    until(f"the limit of {pod.name} is enforced by {by}", READ_SECONDS, shows)
    return limits


def process_of(pod: Pod) -> Path:
    """The folder in /proc of the pod's first process; its processes have the pod's UID in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if f"E2E_POD_UID={pod.uid}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder)
        except OSError:
            continue
    if not found:
        raise TestError(f"no process of {pod.name} runs")
    return min(found, key=lambda folder: int(folder.name))


def cgroup_of(pod: Pod) -> Path:
    """The folder of cgroup v2 of the pod's container."""
    lines = (process_of(pod) / "cgroup").read_text(encoding="ascii").splitlines()
    return machine.CGROUP2 / next(line for line in lines if line.startswith("0::")).removeprefix("0::/")


def _is_one_suspended() -> bool:
    """Whether the guard has suspended a process. Its name follows in the same line, which may have any characters."""
    for file in Path(f"{GUARD_SOCKET}.suspended").glob("*"):
        stat = Path("/proc", file.name, "stat")
        if stat.exists() and stat.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].startswith("T"):
            return True
    return False


def limit_file(bench: Bench, pod: Pod, gpu: str) -> Path:
    return bench.berth.fake.limit_file(gpu, cgroup_of(pod))


def hard_mib(file: Path) -> int:
    return int(file.read_text(encoding="ascii").split()[1]) // MIB if file.exists() else 0


def written(pod: Pod) -> int:
    """When the container wrote for the first time, nanoseconds."""
    return (pod.folder / "main.env").stat().st_mtime_ns


SCENARIOS = [
    Scenario(
        "memory limits",
        Setup(gpus=2, slices=_SLICES),
        {
            "limits: two limits are in force and read back before the container's first write": in_force_at_first,
            "limits: a container that starts again while Berth is down has them": restarts_without_berth,
            "limits: a slow driver holds one container and delays no other pod": slow_driver,
            "limits: another plugin of the runtime changes the container that the guard limits": beside_another_plugin,
            "limits: with a driver that hangs, a container runs without limits, and the API says so": hanging_driver,
            "limits: a limit that NVIDIA's hook changes is set again, but not after the third change": drifts,
            "limits: a pod that was started without the guard gets its limit late": started_without_guard,
            "limits: with an older driver the guard says so, and pods run": older_driver,
            "limits: required limits withdraw devices, and no container runs without its limits": required,
        },
        modules=(TOOLKIT,),
    ),
]
