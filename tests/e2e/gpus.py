"""The node's GPUs: tests/fake-nvml and the state file that it shows. Berth and NVIDIA's device plugin see the same ones."""

from __future__ import annotations

import json
from pathlib import Path

from places import RUN

_FILE = RUN / "gpus.json"
#: In the place of /dev/nvidia0: open while a program uses the driver.
DEVICE_NODE = RUN / "nvidia0"
#: A folder for LD_LIBRARY_PATH, in which the look-alike has the name that programs ask the loader for.
_LIBRARY = RUN / "nvml"


def uuids(count: int) -> list[str]:
    return [f"GPU-{n:08x}-e2e0-4e2e-8e2e-000000000e2e" for n in range(count)]


def instance_uuids(gpu: int, count: int) -> list[str]:
    """The UUIDs of the MIG instances of a GPU."""
    return [f"MIG-{gpu:08x}-{n:04x}-4e2e-8e2e-000000000e2e" for n in range(count)]


class FakeGpus:
    """Plain GPUs without NVLink and MIG, unless a setup changes them."""

    def __init__(self, count: int, library: Path) -> None:
        """`library` is libfake_nvml.so."""
        self.library = library
        DEVICE_NODE.touch()
        gpus = []
        for n, uuid in enumerate(uuids(count)):
            gpus.append(
                {
                    "uuid": uuid,
                    "name": "NVIDIA H100 80GB HBM3",
                    "memory_total_mib": 81559,
                    "pci_bus_id": f"00000000:{n + 1:02x}:00.0",
                    "held_file": str(DEVICE_NODE),
                }
            )
        self._state: dict = {"gpus": gpus}
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs in its environment to see these GPUs; one that loads libnvidia-ml.so.1 by name needs more."""
        return {"FAKE_NVML_CONFIG": str(_FILE)}

    def environment_by_name(self) -> dict[str, str]:
        """The same for a program that asks the loader for libnvidia-ml.so.1."""
        _LIBRARY.mkdir(exist_ok=True)
        link = _LIBRARY / "libnvidia-ml.so.1"
        link.unlink(missing_ok=True)
        link.symlink_to(self.library)
        return {**self.environment, "LD_LIBRARY_PATH": str(_LIBRARY)}

    def connect(self, *pairs: tuple[int, int]) -> None:
        """Connects each of these pairs of GPUs by four NVLinks."""
        for pair in pairs:
            for gpu, other in (pair, pair[::-1]):
                link = {"remote": {"gpu": self._state["gpus"][other]["uuid"]}}
                self._state["gpus"][gpu]["nvlinks"] = [link] * 4
        self._write()

    def split(self, index: int, count: int) -> None:
        """Puts a GPU into MIG mode, with so many instances of the smallest profile."""
        named = {"profile": "1g.10gb", "slices": 1, "memory_mib": 9_728, "multiprocessors": 14}
        # As on real GPUs, where the ids of small instances begin at 7.
        instances = [{"uuid": u, "gpu_instance": 7 + n, **named} for n, u in enumerate(instance_uuids(index, count))]
        self._state["gpus"][index]["mig"] = {"enabled": True, "instances": instances}
        self._write()

    def report(self, driver_version: str, model: str) -> None:
        """Lets the driver report this version of itself, and this model for each GPU."""
        self._state["driver_version"] = driver_version
        for gpu in self._state["gpus"]:
            gpu["name"] = model
        self._write()

    def limits_memory(self, controller: str) -> None:
        """Lets the driver limit the memory of cgroups by that controller of the Linux kernel; empty: the driver cannot."""
        self._state.pop("memory_limits", None)
        if controller:
            self._state["memory_limits"] = controller
        self._write()

    def minor(self, index: int, minor: int) -> None:
        """Gives a GPU's device node that minor number."""
        self._state["gpus"][index]["minor"] = minor
        self._write()

    def faults(self, *faults: dict) -> None:
        """Lets calls of the driver be slow, hang or fail."""
        self._state["faults"] = list(faults)
        self._write()

    def limit_file(self, gpu: str, cgroup: Path) -> Path:
        """Where the driver keeps a cgroup's limit on a GPU: soft and hard limit, bytes."""
        folder = cgroup.stat()
        return _FILE.with_suffix(".limits") / f"{gpu}-{folder.st_dev}-{folder.st_ino}"

    def xid(self, gpu: str, number: int) -> None:
        """Lets the driver report an XID on a GPU."""
        events = self._state.setdefault("events", [])
        events.append({"seq": len(events) + 1, "gpu": gpu, "kind": "xid", "data": number})
        self._write()

    def _write(self) -> None:
        """The file is moved into place, so that no call of NVML reads half of it."""
        draft = _FILE.with_suffix(".new")
        draft.write_text(json.dumps(self._state, indent=1), encoding="utf-8")
        draft.rename(_FILE)
