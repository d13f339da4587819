"""Containers that can use GPUs that were not allocated to them, at a real containerd and kubelet: the guard restricts or refuses
them, and leaves all others alone.

The machine has no GPU: devices of the kernel's misc drivers stand in for the nodes of NVIDIA's driver. Their major number
is that driver's in the guard's list of drivers, and two of their minor numbers are those of the GPUs.
"""

from __future__ import annotations

import images
import machine
from bench import Bench
from berth import SHARED, WHOLE, Setup
from guard import connected, start_guard, start_other_plugin
from gpus import uuids
from nvidia import NvidiaPlugin
from places import RUN
from pods import Container, Pod
from process import Process
from say import TestError, until
from scenario import Scenario

#: Every 30 s the guard denies access to devices again, plus a margin for a slow machine.
CHECK_SECONDS = 45
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
ALL = {VARIABLE: "all"}
EXEMPT = "kube-system"
#: Where NVIDIA's runtime reads the names of GPUs.
MOUNT = "/var/run/nvidia-container-devices/all"

#: `misc` in /proc/devices, and the minor numbers of the first two nodes.
_MAJOR, _FUSE, _LOOP = 10, 229, 237
_NODES = ("fuse", "loop-control", "autofs")
_DRIVERS = RUN / "devices"
#: Which of the nodes the container can open, again and again.
_TRIES = """
tries() {
  for node in fuse loop-control autofs; do
    (exec 3< /dev/$node) 2> /dev/null && echo $node
  done > /e2e/opened.new
  mv /e2e/opened.new /e2e/opened
}
tries
while sleep 1; do tries; done &
"""


def variables(bench: Bench) -> None:
    """A pod that names all GPUs itself sees none. One that was granted a GPU has the variable twice, which no plugin of the
    runtime can change, so that it is denied the device nodes of the other GPUs."""
    _set_action(bench, "strip")
    takes = Pod("takes", [Container("main", {}, env=ALL)])
    old = Pod("old", [Container("main", {}, env={"CUDA_VERSION": "9.0"})])
    image = Pod("image", [Container("main", {}, image=images.NAMES_GPUS)])
    granted = Pod("granted", [Container("main", {bench.resource: 1}, env=ALL)])
    plain = Pod("plain", [Container("main", {})])
    exempt = Pod("exempt", [Container("main", {}, env=ALL)], namespace=EXEMPT)
    bench.node.run(exempt, static=True)
    for pod in (takes, old, image, granted, plain):
        bench.node.run(pod)
    for pod in (takes, old, image):
        _expect_variable(pod, "void")
    _expect_variable(granted, "all")
    _expect_variable(plain, None)
    _expect_variable(exempt, "all")
    bypasses = bench.berth.container_bypasses()
    done = {pod: bypass["outcome"] for (pod, _), bypass in bypasses.items()}
    if done != {pod.name: "stripped" for pod in (takes, old, image, granted)}:
        raise TestError(f"the API shows {bypasses}")
    if 'berth_bypass_containers{outcome="stripped"} 4' not in bench.berth.metrics():
        raise TestError("/metrics does not count the four containers")
    _delete(bench, takes, old, image, granted, plain, exempt)
    until("the bypasses are gone with their pods", 30, lambda: not bench.berth.container_bypasses())


def same_variable(bench: Bench) -> None:
    """Another plugin of the runtime sets the variable before the guard does: the container starts, with the guard's value."""
    other = start_other_plugin(bench)
    pod = Pod("both", [Container("main", {}, env=ALL)])
    bench.node.run(pod)
    environment = pod.environment("main", 60)
    if (environment.get("BESIDE"), environment[VARIABLE]) != ("yes", "void"):
        raise TestError(f"the container has {environment}")
    _delete(bench, pod)
    other.stop()


def mounts(bench: Bench) -> None:
    """A mount that names GPUs is removed."""
    pod = Pod("mounts", [Container("main", {}, mount=MOUNT, extra=f"ls -d {MOUNT} > /e2e/found 2> /dev/null; true")])
    bench.node.run(pod)
    if pod.wrote("found", 60):
        raise TestError("the container has the mount")
    _delete(bench, pod)


def privileged(bench: Bench) -> str:
    """A privileged pod opens the GPU that it was granted, or none, also if it names all GPUs."""
    takes = Pod("privileged", [Container("main", {}, extra=_TRIES, privileged=True)])
    granted = Pod("partly", [Container("main", {bench.resource: 1}, extra=_TRIES, privileged=True, env=ALL)])
    exempt = Pod("system", [Container("main", {}, extra=_TRIES, privileged=True)], namespace=EXEMPT)
    bench.node.run(exempt, static=True)
    bench.node.run(takes)
    bench.node.run(granted)
    _expect_opened(exempt, set(_NODES))
    _expect_opened(takes, set())
    (gpu,) = bench.allocation(granted, "main").gpus
    _expect_opened(granted, {_NODES[uuids(2).index(gpu)]})
    _delete(bench, takes, granted, exempt)
    return "by=bpf"


def privileged_before(bench: Bench) -> None:
    """One that was started without the guard is denied devices when the guard is there again."""
    guard: Process = bench.shared
    guard.kill()
    takes = Pod("earlier", [Container("main", {}, extra=_TRIES, privileged=True)])
    bench.node.run(takes)
    _expect_opened(takes, set(_NODES))
    guard.start()
    connected(bench)
    until("the devices are denied", CHECK_SECONDS, lambda: _opened(takes) == set())
    bypass = bench.berth.container_bypasses()[takes.name, "main"]
    if bypass["outcome"] != "stripped" or "ran before" not in bypass.get("why", ""):
        raise TestError(f"the API shows {bypass}")
    # Once more, the program is there already.
    guard.kill()
    guard.start()
    connected(bench)
    if _opened(takes):
        raise TestError("the devices are open without the guard")
    _delete(bench, takes)


def privileged_v1(bench: Bench) -> str:
    """The same with cgroup v1."""
    if not (machine.CGROUP1 / "devices").is_dir():
        return "skipped=no-cgroup-v1"
    _restart_guard(bench, {"cgroupRoot": str(machine.CGROUP1)})
    privileged(bench)
    _restart_guard(bench, {})
    return "by=devices.deny"


def denied(bench: Bench) -> str:
    """With `deny` pods that name GPUs or are privileged are refused with what to request, and others run."""
    _set_action(bench, "deny")
    names = Pod("names", [Container("main", {}, env=ALL)])
    admin = Pod("admin", [Container("main", {}, privileged=True)])
    image = Pod("image-too", [Container("main", {}, image=images.NAMES_GPUS)])
    granted = Pod("granted-too", [Container("main", {bench.resource: 1})])
    exempt = Pod("exempt-too", [Container("main", {}, env=ALL, privileged=True)], namespace=EXEMPT)
    bench.node.run(exempt, static=True)
    for pod in (names, admin, image, granted):
        bench.node.run(pod)
    for pod in (names, admin):
        until(f"{pod.name} is refused", 60, lambda pod=pod: bench.resource in _waiting(bench, pod))
    _expect_variable(image, "void")
    bench.gpus_seen(granted, "main")
    _expect_variable(exempt, "all")
    for pod in (names, admin):
        if (pod.folder / "main.env").exists():
            raise TestError(f"{pod.name} ran")
        bypass = bench.berth.container_bypasses()[pod.name, "main"]
        if bypass["outcome"] != "denied":
            raise TestError(f"the API shows {bypass}")

    def reported() -> bool:
        shown = bench.node.cluster.get("/apis/events.k8s.io/v1/namespaces/e2e/events")["items"]
        return {e["regarding"]["name"] for e in shown if e["reason"] == "GPUBypassDenied"} == {names.name, admin.name}

    until("Kubernetes has an event of each refusal", 30, reported)
    refusal = _waiting(bench, names)
    _delete(bench, names, admin, image, granted, exempt)
    return f"refusal={refusal[:60].replace(' ', '_')}"


def beside_nvidia(bench: Bench) -> str:
    """What NVIDIA's device plugin gave is left alone, and what its pods take beyond is not."""
    plugin = NvidiaPlugin(bench.logs, bench.berth.fake, WHOLE)
    plugin.start(2)
    bench.at_end.append(plugin.stop)
    _list_drivers()
    bench.berth.configure({**bench.berth.settings, "bypass": {"action": "strip"}})
    bench.berth.start()
    start_guard(bench, _DRIVERS)
    theirs = Pod("theirs", [Container("main", {WHOLE: 1}, image=images.NAMES_GPUS)])
    admin = Pod("theirs-privileged", [Container("main", {WHOLE: 1}, extra=_TRIES, privileged=True)])
    ours = Pod("ours", [Container("main", {SHARED: 1})])
    for pod in (theirs, admin, ours):
        bench.node.run(pod)
    seen = [pod.environment("main", 60)[VARIABLE] for pod in (theirs, admin, ours)]
    if not set(seen) <= set(uuids(2)) or seen[0] == seen[1]:
        raise TestError(f"the pods see {seen}")
    _expect_opened(admin, set(_NODES))
    if bench.berth.container_bypasses():
        raise TestError(f"the API shows {bench.berth.container_bypasses()}")
    _delete(bench, theirs, admin, ours)
    return f"nvidia={seen[0]},{seen[1]}"


def _list_drivers() -> None:
    _DRIVERS.write_text(f"Character devices:\n  1 mem\n {_MAJOR} nvidia\n\nBlock devices:\n", encoding="ascii")


def _set_action(bench: Bench, action: str) -> None:
    """Has the guard bypass so, by a reload of the daemon's configuration; the first time it starts the guard."""
    if bench.shared is None:
        _list_drivers()
        start_guard(bench, _DRIVERS)
        for index, minor in enumerate((_FUSE, _LOOP)):
            bench.berth.fake.minor(index, minor)
        # The numbers are read at its start.
        bench.berth.stop()
        bench.berth.start()
        connected(bench)
    bench.berth.settings["bypass"] = {"action": action}
    bench.berth.configure(bench.berth.settings)
    until(f"the guard says `{action}`", 30, lambda: bench.berth.guard_status().get("bypassAction") == action)


def _restart_guard(bench: Bench, paths: dict) -> None:
    """Starts the guard with these settings of its paths."""
    guard: Process = bench.shared
    guard.stop()
    usual = bench.berth.settings
    bench.berth.configure({**usual, "guard": {**usual["guard"], **paths}})
    guard.start()
    connected(bench)


def _delete(bench: Bench, *pods: Pod) -> None:
    for pod in pods:
        bench.node.delete(pod)


def _expect_variable(pod: Pod, value: str | None) -> None:
    seen = pod.environment("main", 60).get(VARIABLE)
    if seen != value:
        raise TestError(f"the container of {pod.name} has {VARIABLE}={seen}, and {value} was expected")


def _opened(pod: Pod) -> set[str]:
    """The nodes that it could open at its last try."""
    return set(pod.wrote("opened", 60).split())


def _expect_opened(pod: Pod, nodes: set[str]) -> None:
    """At its first try, too, which is before its environment is written."""
    pod.environment("main", 60)
    if _opened(pod) != nodes:
        raise TestError(f"the container of {pod.name} can open {_opened(pod)}, and {nodes} was expected")


def _waiting(bench: Bench, pod: Pod) -> str:
    """Why the first container of a pod does not run, by the kubelet."""
    statuses = bench.node.status(pod)["status"].get("containerStatuses", [])
    return statuses[0].get("state", {}).get("waiting", {}).get("message", "") if statuses else ""


SCENARIOS = [
    Scenario(
        "bypass beside NVIDIA's plugin",
        Setup(gpus=2, shares=2),
        {"bypass: what NVIDIA's device plugin gave is left alone": beside_nvidia},
        berth_first=False,
    ),
    Scenario(
        "bypass",
        Setup(gpus=2, api_server=True),
        {
            "bypass: a pod that names all GPUs sees none, and kube-system is exempt": variables,
            "bypass: another plugin of the runtime sets the same variable, and the pod runs": same_variable,
            "bypass: a mount that names GPUs is removed": mounts,
            "bypass: a privileged pod opens the GPU that it was granted, or none": privileged,
            "bypass: a privileged pod that ran before the guard is denied devices": privileged_before,
            "bypass: with cgroup v1 devices are denied as well": privileged_v1,
            "bypass: with deny such pods are refused with what to request, and others run": denied,
        },
        cluster=True,
    ),
]
