"""Cases of `deviceListStrategy: auto`: on a containerd that has CDI a pod gets its GPU by the specification that Berth wrote;
without a specification by NVIDIA's runtime, if that is what this containerd makes of its files.

The driver is a folder of stand-ins (driver_root.py). What a container gets is read inside of it: device nodes and libraries.
NVIDIA's runtime is runc by another name.
"""

from __future__ import annotations

import json
import re
import shutil
import time

from bench import Bench
from berth import DRIVER_ROOT, Setup, write_cdi_spec
from driver_root import CONTROL_NODES, VERSION, DriverRoot
from gpus import uuids
from kubelet import healthy
from places import CDI_SPECS, RUN
from pods import Pod
from say import TestError, until
from scenario import Scenario

#: How long Berth may take to notice that its file is gone or that the driver is another one.
_NOTICE_SECONDS = 15
#: Another version of the driver.
_LATER = "575.51.03"
_GPUS = 4
_FILE = CDI_SPECS / "berth-gpu.json"
_NVIDIA = RUN / "nvidia-container-runtime"
_USES = RUN / "nvidia-container-runtime-was-used"
#: As NVIDIA's toolkit wrote it for containerd 1.7.
_NVIDIA_DROP_IN = f"""version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "nvidia"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
  BinaryName = "{_NVIDIA}"
  SystemdCgroup = false
  Root = "{RUN}/runc"
"""
#: Writes what the container has got, each time it starts.
_LOOK = """
ls /dev | grep nvidia > /e2e/nodes.new && mv /e2e/nodes.new /e2e/nodes
for node in /dev/nvidia*; do : < $node || echo $node; done > /e2e/unreadable
ls /usr/lib/x86_64-linux-gnu | grep libcuda > /e2e/libraries
"""


def auto(bench: Bench) -> None:
    """The strategy is CDI by Berth's own specification, and the kubelet was given devices only with it."""
    shown = bench.berth.node()["deviceListStrategy"]
    if not shown["auto"] or shown["strategies"] != ["cdi-cri"] or shown.get("cdiKind") != "berth/gpu":
        raise TestError(f"the API shows {shown}")
    if "berth-gpu.json" not in shown["reason"]:
        raise TestError(f"the reason does not name the file: {shown['reason']}")


def generated(bench: Bench) -> None:
    names = {device["name"] for device in json.loads(_FILE.read_text(encoding="utf-8"))["devices"]}
    if names != {*uuids(_GPUS), *map(str, range(_GPUS))}:
        raise TestError(f"{_FILE} names {sorted(names)}")
    _gets_its_gpu(bench, "generated")


def restarted(bench: Bench) -> None:
    """Berth is killed and starts again: running pods keep what they have, their containers can restart, and new ones get theirs."""
    old = bench.running[0]
    bench.berth.crash()
    bench.berth.start()
    _restart_container(bench, old)
    _gets_its_gpu(bench, "after-restart")


def deleted(bench: Bench) -> str:
    """The file is deleted while pods run, as by a package of the toolkit: it is written again."""
    old = bench.running[0]
    _FILE.unlink()
    begin = time.monotonic()
    until("berth writes its specification again", _NOTICE_SECONDS, _FILE.exists, every=0.02)
    took = (time.monotonic() - begin) * 1000
    _restart_container(bench, old)
    _gets_its_gpu(bench, "after-deletion")
    return f"written_again_within_ms={took:.0f}"


def changed(bench: Bench) -> None:
    """Another version of the driver: the file names its libraries, and new pods get them."""
    DriverRoot.of(DRIVER_ROOT, bench.berth.fake.library).change_version(_LATER)
    until("the specification names the new driver", _NOTICE_SECONDS, lambda: _LATER in _FILE.read_text(encoding="utf-8"))
    # While there was no library of any version, nothing was offered; the list follows the file.
    time.sleep(1)
    until("the kubelet has all devices again", _NOTICE_SECONDS, lambda: len(healthy(bench.resource)) == _GPUS)
    pod = _gets_its_gpu(bench, "after-upgrade")
    libraries = pod.wrote("libraries").split()
    if f"libcuda.so.{_LATER}" not in libraries or f"libcuda.so.{VERSION}" in libraries:
        raise TestError(f"the container has {libraries}")


def drop_in_of_version_2(bench: Bench) -> str:
    """A root file of the newest version and a drop-in of version 2, as after an upgrade of containerd: with and without
    runtimes in the root file, which versions of containerd resolve differently."""
    containerd = bench.node.containerd
    bench.at_end.append(containerd.restart)
    containerd.restart()
    full = containerd.migrated()
    # It began with a specification, so that there were devices.
    for file in CDI_SPECS.iterdir():
        file.unlink()
    seen = []
    for root in (full, _without_runtimes(full)):
        containerd.restart(root, _NVIDIA_DROP_IN)
        name = containerd.default_runtime()
        seen.append(name)
        wanted = (["envvar"], "the default runtime is nvidia") if name == "nvidia" else ([], f"is {name}, not nvidia")

        def follows() -> bool:
            shown = bench.berth.node()["deviceListStrategy"]
            if shown["strategies"] != wanted[0] or wanted[1] not in shown["reason"]:
                raise TestError(f"{wanted} was expected, and the API shows {shown}")
            return True

        until(f"berth's answer is that of containerd, {name}", _NOTICE_SECONDS, follows)
        if name == "nvidia":
            until("the kubelet has the devices", _NOTICE_SECONDS, lambda: len(healthy(bench.resource)) == _GPUS)
            pod = bench.pod("by-default-runtime", {"main": 1})
            bench.start(pod)
            bench.gpus_seen(pod, "main")
            if not _USES.exists():
                raise TestError("the pod did not run by the default runtime of containerd")
    if "nvidia" not in seen:
        raise TestError(f"containerd {containerd.version} made {seen} the default runtime")
    return f"containerd={containerd.version} default_runtimes={','.join(seen)}"


def _without_runtimes(root: str) -> str:
    """A root file of containerd that leaves all runtimes to its drop-ins and their names to containerd."""
    tables = re.split(r"^(?=\s*\[)", root, flags=re.M)
    left = "".join(table for table in tables if ".containerd.runtimes" not in table.splitlines()[0])
    return re.sub(r"^\s*default_runtime_name = .*\n", "", left, flags=re.M)


def _gets_its_gpu(bench: Bench, name: str) -> Pod:
    pod = bench.pod(name, {"main": 1}, extra=_LOOK)
    bench.start(pod)
    _check(bench, pod)
    return pod


def _check(bench: Bench, pod: Pod) -> None:
    """The container has the node of the GPU that Berth holds for it, the control nodes, the library, and no other GPU."""
    pod.beats("main")
    (gpu,) = bench.allocation(pod, "main").gpus
    wanted = sorted([*CONTROL_NODES, f"nvidia{uuids(_GPUS).index(gpu)}"])
    nodes = sorted(pod.wrote("nodes").split())
    if nodes != wanted:
        raise TestError(f"the container of {pod.name} has {nodes}, and {wanted} was expected for {gpu}")
    if pod.wrote("unreadable").strip():
        raise TestError(f"the container of {pod.name} cannot open {pod.wrote('unreadable')}")
    if not {"libcuda.so", "libcuda.so.1"} <= set(pod.wrote("libraries").split()):
        raise TestError(f"the container of {pod.name} has {pod.wrote('libraries')}")


def _restart_container(bench: Bench, pod: Pod) -> None:
    """Ends the pod's container, which the kubelet then starts again with the devices that it was given before."""
    before = bench.node.status(pod)["status"]["containerStatuses"][0]["restartCount"]
    (pod.folder / "nodes").unlink()
    pod.end("main", 1)

    def again() -> bool:
        status = bench.node.status(pod)["status"]["containerStatuses"][0]
        return status["restartCount"] > before and "running" in status["state"]

    until(f"the container of {pod.name} runs again", 60, again)
    _check(bench, pod)


def _install_runtime(nvml) -> None:
    """NVIDIA's runtime: notes that it was used, and is runc."""
    _install(nvml)
    _USES.unlink(missing_ok=True)
    _NVIDIA.write_text(f'#!/bin/sh\ntouch {_USES}\nexec runc "$@"\n', encoding="ascii")
    _NVIDIA.chmod(0o755)
    write_cdi_spec(uuids(_GPUS))


def _install(nvml) -> None:
    shutil.rmtree(DRIVER_ROOT, ignore_errors=True)
    DriverRoot(DRIVER_ROOT, _GPUS, nvml)
    for file in CDI_SPECS.iterdir():
        file.unlink()


SCENARIOS = [
    Scenario(
        "auto",
        Setup(gpus=_GPUS, auto=True),
        {
            "auto: CDI is chosen and shown": auto,
            "generated: a pod sees its GPU's nodes and libraries by berth's own CDI specification": generated,
            "restarted: so does a new pod after kill -9, and a container that restarts": restarted,
            "deleted: the file is written again": deleted,
            "changed: a new driver's libraries arrive": changed,
        },
        install=_install,
    ),
    Scenario(
        "default runtime",
        Setup(gpus=_GPUS, auto=True, own_spec=False),
        {"a newer root file with a drop-in of version 2: berth resolves it as containerd does": drop_in_of_version_2},
        install=_install_runtime,
    ),
]
