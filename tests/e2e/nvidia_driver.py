"""A stand-in for NVIDIA's driver whose GPUs can be split into MIG instances while Berth runs.

The GPUs are those of tests/fake-nvml, the files and device nodes those of driver_root.py, with the nodes of MIG
capabilities and an nvidia-smi for containers, which shows the GPUs and instances whose device nodes the container has.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from berth import DRIVER_ROOT
from driver_root import VERSION, DriverRoot
from gpus import FakeGpus
from places import RUN

#: What Berth sees as /proc/driver, where the driver lists the minor numbers of MIG capabilities.
PROC_DRIVER = RUN / "proc-driver"
#: GPU instances of one GPU have ids below this number.
_GPU_INSTANCES = 15
_CONTAINER_SMI = """#!/bin/sh
case "$*" in
*memory.total*) echo 'memory.total [MiB]' && echo '{memory} MiB' && exit 0 ;;
'') echo '| NVIDIA-SMI {version}   Driver Version: {version} |' && exit 0 ;;
esac
found=
{lines}
[ -n "$found" ] && exit 0
echo 'No devices were found'
exit 6
"""


@dataclass(frozen=True)
class Model:
    """A model of GPU. `profiles`: slices and memory, MiB, of its MIG profiles."""

    name: str
    memory_mib: int
    architecture: int
    compute_capability: tuple[int, int]
    profiles: dict[str, tuple[int, int]]


H200 = Model("NVIDIA H200", 143_771, 9, (9, 0), {"1g.18gb": (1, 16_384), "2g.35gb": (2, 33_280)})
A100 = Model(
    "NVIDIA A100-SXM4-40GB", 40_960, 7, (8, 0), {"1g.5gb": (1, 4_864), "2g.10gb": (2, 9_856), "3g.20gb": (3, 19_968)}
)
_MODELS = {model.name: model for model in (H200, A100)}


def install(model: Model, count: int, library: Path) -> tuple[FakeGpus, NvidiaDriver]:
    """So many GPUs of that model, none of them in MIG mode. `library` is libfake_nvml.so."""
    fake = FakeGpus(count, library)
    shutil.rmtree(DRIVER_ROOT, ignore_errors=True)
    DriverRoot(DRIVER_ROOT, count, library)
    (DRIVER_ROOT / "dev" / "nvidia-caps").mkdir()
    table = PROC_DRIVER / "nvidia-caps" / "mig-minors"
    table.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for gpu in range(count):
        for instance in range(_GPU_INSTANCES):
            first, second = _capabilities(gpu, instance)
            lines += [f"gpu{gpu}/gi{instance}/access {first}", f"gpu{gpu}/gi{instance}/ci0/access {second}"]
    table.write_text("\n".join(lines) + "\n", encoding="ascii")
    driver = NvidiaDriver(Path(fake.environment["FAKE_NVML_CONFIG"]))
    state = driver.state()
    for gpu in state["gpus"]:
        gpu["name"], gpu["memory_total_mib"] = model.name, model.memory_mib
        gpu["architecture"], gpu["compute_capability"] = model.architecture, model.compute_capability
        gpu["mig"] = {"enabled": False, "instances": []}
    driver.write(state)
    return fake, driver


class NvidiaDriver:
    """`file` is the state file of tests/fake-nvml."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def state(self) -> dict:
        return json.loads(self._file.read_text(encoding="utf-8"))

    def write(self, state: dict) -> None:
        """Device nodes first, as a driver makes them before NVML shows an instance."""
        for index, instance in _instances(state):
            for number in _capabilities(index, instance["gpu_instance"]):
                _node(DRIVER_ROOT / "dev" / "nvidia-caps" / f"nvidia-cap{number}")
        program = DRIVER_ROOT / "usr" / "bin" / "nvidia-smi"
        program.write_text(_container_smi(state), encoding="ascii")
        draft = self._file.with_suffix(".changed")
        draft.write_text(json.dumps(state, indent=1), encoding="utf-8")
        draft.rename(self._file)

    def set_mig(self, enabled: bool, only: int | None = None) -> None:
        """Sets the MIG mode of all GPUs, or of one."""
        state = self.state()
        for index, gpu in enumerate(state["gpus"]):
            if only in (None, index):
                gpu["mig"]["enabled"] = enabled
        self.write(state)

    def create(self, *profiles: str) -> None:
        """Creates an instance of each profile on each GPU in MIG mode."""
        state = self.state()
        for index, gpu in enumerate(state["gpus"]):
            if not gpu["mig"]["enabled"]:
                continue
            instances = gpu["mig"]["instances"]
            for profile in profiles:
                slices, memory = _MODELS[gpu["name"]].profiles[profile]
                # As on real GPUs, where the ids of small instances begin at 7.
                at = 7 + len(instances)
                uuid = f"MIG-{index:08x}-{at:04x}-5e2e-8e2e-000000000e2e"
                named = {"uuid": uuid, "gpu_instance": at, "profile": profile, "slices": slices, "memory_mib": memory}
                instances.append({**named, "multiprocessors": 14 * slices})
        self.write(state)

    def destroy(self) -> None:
        """Destroys all instances."""
        state = self.state()
        for gpu in state["gpus"]:
            gpu["mig"]["instances"] = []
        self.write(state)

    def profiles(self, gpu: int) -> list[str]:
        return list(_MODELS[self.state()["gpus"][gpu]["name"]].profiles)

    def uuids(self) -> set[str]:
        """What can be given to pods: GPUs that are not in MIG mode, and instances."""
        state = self.state()
        gpus = {gpu["uuid"] for gpu in state["gpus"] if not gpu["mig"]["enabled"]}
        return gpus | {instance["uuid"] for _, instance in _instances(state)}


def _instances(state: dict) -> list[tuple[int, dict]]:
    return [(index, one) for index, gpu in enumerate(state["gpus"]) for one in gpu["mig"]["instances"]]


def _capabilities(gpu: int, instance: int) -> tuple[int, int]:
    """The minor numbers of a GPU instance and of its compute instance."""
    first = 3 + 2 * (gpu * _GPU_INSTANCES + instance)
    return first, first + 1


def _container_smi(state: dict) -> str:
    lines = []

    def show(node: str, text: str) -> None:
        lines.append(f"[ -e {node} ] && found=1 && echo '{text}'")

    for index, gpu in enumerate(state["gpus"]):
        show(f"/dev/nvidia{index}", f"GPU {index}: {gpu['name']} (UUID: {gpu['uuid']})")
        for at, one in enumerate(gpu["mig"]["instances"]):
            node = f"/dev/nvidia-caps/nvidia-cap{_capabilities(index, one['gpu_instance'])[0]}"
            show(node, f"  MIG {one['profile']:11} Device {at:2}: (UUID: {one['uuid']})")
    memory = state["gpus"][0]["memory_total_mib"]
    return _CONTAINER_SMI.format(version=VERSION, memory=memory, lines="\n".join(lines))


def _node(path: Path) -> None:
    """With the numbers of /dev/null, as in driver_root.py."""
    if not path.exists():
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.chmod(0o666)
