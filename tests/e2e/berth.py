"""Everything that this test knows of Berth: its settings file, its fake GPUs, its API. Nothing else here reads those."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import process
from kubelet import NODE_NAME, healthy
from places import CDI_SPECS, KUBELET, LIB, RUN
from say import Trouble, until

WHOLE = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"

ADMIN = "127.0.0.1:9470"
_STATE = LIB / "berth"
_TOKEN = _STATE / "token"
_GPUS_FILE = RUN / "gpus.json"

#: What the library case mounts into every container that holds a whole GPU.
LIBRARY_ON_HOST = RUN / "library"
LIBRARY_IN_POD = "/opt/berth-e2e/library"


class Setup:
    """What one run of Berth is to manage: how many GPUs, and how they are shared."""

    def __init__(self, gpus: int, shares: int = 0, library: bool = False, cdi: bool = False) -> None:
        self.gpus = gpus
        self.shares = shares
        self.library = library
        self.cdi = cdi

    @property
    def resource(self) -> str:
        return SHARED if self.shares else WHOLE


class Allocation:
    """One allocation as the API shows it. `holder` is (namespace, pod, container, pod UID), or None while unknown."""

    def __init__(self, shown: dict) -> None:
        self.id = shown["id"]
        self.resource = shown["resource"]
        self.devices = frozenset(shown["devices"])
        self.gpus = frozenset(shown["gpus"])
        holder = shown.get("holder") or {}
        names = ("namespace", "pod", "container", "podUid")
        self.holder = tuple(holder.get(n) for n in names) if holder else None

    def same(self) -> tuple:
        """What must not change over a restart."""
        return self.id, self.resource, self.devices, self.holder


class Berth:
    """One `berth serve`, with a state folder of its own that outlives its restarts."""

    def __init__(self, logs: Path, binary: Path, nvml_library: Path, setup: Setup) -> None:
        self.setup = setup
        config = RUN / "berth.yaml"
        shutil.rmtree(_STATE, ignore_errors=True)
        LIBRARY_ON_HOST.mkdir(exist_ok=True)
        # JSON is YAML, so no YAML writer is needed.
        config.write_text(json.dumps(_settings(setup, nvml_library), indent=1), encoding="utf-8")
        self._fake = _fake_gpus(setup.gpus)
        self._write_gpus()
        env = {"FAKE_NVML_CONFIG": str(_GPUS_FILE)}
        args = [binary, "serve", "--config", config]
        self._process = process.Process("berth", args, logs / "berth.log", env)

    def start(self) -> None:
        """Starts it and waits until it is ready and the kubelet knows its resource."""
        self._process.start()

        def ready() -> bool:
            self._process.check()
            return _ask("GET", "/readyz") is not None

        until("berth is ready (/readyz)", 30, ready, every=0.02)
        self.registered(self.setup.resource)

    def registered(self, resource: str) -> None:
        """Waits until the kubelet watches the device list of `resource`, by Berth's word and by the kubelet's own."""

        def look() -> bool:
            self._process.check()
            for shown in self._get("/api/v1/node")["resources"]:
                if shown["resource"] == resource:
                    if not shown["registration"]["done"]:
                        raise Trouble(shown["registration"].get("waiting", "registration is not done"))
                    return bool(healthy(resource))
            return False

        until(f"the kubelet knows {resource}", 30, look, every=0.02)

    def crash(self) -> None:
        """kill -9."""
        self._process.kill()

    def stop(self) -> tuple[int, float]:
        """SIGTERM. Returns the exit status and the seconds that it took."""
        return self._process.stop()

    def forget(self) -> None:
        """Removes what a stopped Berth has stored, as if it were installed anew on a node with running pods."""
        shutil.rmtree(_STATE)

    def xid(self, gpu: str, number: int) -> None:
        """Lets the driver report an XID on a GPU."""
        events = self._fake.setdefault("events", [])
        events.append({"seq": len(events) + 1, "gpu": gpu, "kind": "xid", "data": number})
        self._write_gpus()

    def gpus(self) -> set[str]:
        """The UUIDs of all GPUs that it manages."""
        return {gpu["uuid"] for gpu in self._get("/api/v1/gpus")["items"]}

    def allocations(self) -> list[Allocation]:
        """The live allocations."""
        self._process.check()
        return [Allocation(shown) for shown in self._get("/api/v1/allocations")["items"]]

    def cordon(self, gpu: str) -> None:
        self._ask("PUT", f"/api/v1/gpus/{gpu}/cordon", {"reason": "e2e"})

    def uncordon(self, gpu: str) -> None:
        self._ask("DELETE", f"/api/v1/gpus/{gpu}/cordon")

    def share(self, shares: int) -> None:
        """Changes the policy of the running daemon: from now on every GPU is offered in so many shares."""
        self._ask("PUT", "/api/v1/stack", {"entries": [_timeslice(shares)]})

    def _write_gpus(self) -> None:
        """The file is moved into place, so that no call of NVML reads half of it."""
        draft = _GPUS_FILE.with_suffix(".new")
        draft.write_text(json.dumps(self._fake, indent=1), encoding="utf-8")
        draft.rename(_GPUS_FILE)

    def _get(self, path: str) -> dict:
        return json.loads(self._ask("GET", path))

    def _ask(self, method: str, path: str, body: dict | None = None) -> str:
        return _ask(method, path, _TOKEN.read_text(encoding="ascii").strip(), body)


def _timeslice(shares: int) -> dict:
    return {"policy": "timeslice", "parameters": {"replicas": shares}}


def _settings(setup: Setup, nvml_library: Path) -> dict:
    settings = {
        "nodeName": NODE_NAME,
        "kubeletDir": str(KUBELET),
        "stateDir": str(_STATE),
        "gpus": "nvml",
        "nvmlLibrary": str(nvml_library),
        "adminListen": ADMIN,
        "stack": [_timeslice(setup.shares) if setup.shares else {"policy": "exclusive"}],
    }
    edits = {}
    if setup.library:
        mount = {"hostPath": str(LIBRARY_ON_HOST), "containerPath": LIBRARY_IN_POD, "readOnly": True}
        edits["resources"] = {WHOLE: {"mounts": [mount]}}
    if setup.cdi:
        edits["deviceListStrategy"] = ["cdi-cri"]
    if edits:
        settings["containerEdits"] = edits
    return settings


def _fake_uuids(count: int) -> list[str]:
    return [f"GPU-{n:08x}-e2e0-4e2e-8e2e-000000000e2e" for n in range(count)]


def _fake_gpus(count: int) -> dict:
    """The state file of tests/fake-nvml: plain GPUs without NVLink."""
    gpus = []
    for n, uuid in enumerate(_fake_uuids(count)):
        gpus.append(
            {
                "uuid": uuid,
                "name": "NVIDIA H100 80GB HBM3",
                "memory_total_mib": 81559,
                "pci_bus_id": f"00000000:{n + 1:02x}:00.0",
            }
        )
    return {"gpus": gpus}


def write_cdi_spec(count: int) -> None:
    """A CDI spec such as nvidia-ctk writes, whose only edit is a variable that names the device."""
    devices = [{"name": u, "containerEdits": {"env": [f"{cdi_variable(u)}=injected"]}} for u in _fake_uuids(count)]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    (CDI_SPECS / "berth-e2e.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")


def gpu_of(device: str) -> str:
    """The GPU of a device id: a share is `<uuid>::<n>`."""
    return device.split("::")[0]


def cdi_variable(uuid: str) -> str:
    return "E2E_CDI_" + uuid.replace("-", "_").upper()


def _ask(method: str, path: str, token: str = "", body: dict | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{ADMIN}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:300]
        raise Trouble(f"{method} {path}: {error.code}: {detail}") from error
    except (urllib.error.URLError, OSError) as error:
        raise Trouble(f"{method} {path}: {error}") from error
