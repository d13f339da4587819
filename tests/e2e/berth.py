"""Everything that this test knows of Berth: its settings file, its command line, its API. Nothing else here reads those."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path

import disk
import machine
import process
from gpus import FakeGpus
from kubelet import NODE_NAME, healthy
from places import CDI_SPECS, CONTAINERD_CONFIG, GUARD_SOCKET, KUBELET, LIB, NRI_SOCKET, OTHER_KUBELET_ROOT, RUN
from say import TestError, until

WHOLE = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"

ADMIN = f"127.0.0.1:{machine.ADMIN_PORT}"
#: Where docs/changeover.md has the configuration file.
CONFIG_FOR_READERS = "/etc/berth/config.yaml"
_STATE = LIB / "berth"
_TOKEN = _STATE / "token"
_CLIENT = {"BERTH_SERVER": f"http://{ADMIN}", "BERTH_TOKEN_FILE": str(_TOKEN)}
_CONFIG = RUN / "berth.yaml"
#: Where a pod would have the ConfigMap of `config.map`.
_CONFIGS = RUN / "configs"

#: For a busy machine: it compiles the policies before it registers.
_START_SECONDS = 120

#: The stand-in for an installed driver.
DRIVER_ROOT = RUN / "driver"

#: What the library case mounts into every container that holds a whole GPU.
LIBRARY_ON_HOST = RUN / "library"
LIBRARY_IN_POD = "/opt/berth-e2e/library"


def slice_of(mib: int) -> str:
    """The resource of slices of that size."""
    return f"nvidia.com/gpu-{mib}mib"


class Setup:
    """What one run of Berth is to manage: how many GPUs, and how they are shared.

    `shares`: so many of each GPU, under `shares_as`. `mixed`: `both` or `latched`, four shares a GPU beside the
    whole. `quiet_seconds`: after which an unhealthy GPU may come back. `api_server`: it may ask the API server.
    `cdi`: by the names of a specification that is there; `auto`: by what Berth finds on the node, and `own_spec` whether it
    may write a specification there.
    `other_root`: the kubelet has another `--root-dir` than the one in which its device plugins are.
    `slow_disk`: a write of its store is slow when the test says so (`disk.py`). `slow_status`: the kubelet writes its status
    as seldom as by default.
    `slices`: GPU n is offered in slices of `slices[n]` MiB, as a resource of its own, and the driver limits memory.
    `labels`: it labels the node with its GPUs, for which it must ask. `configs`: a label of the node chooses its stack
    among the files of `Berth.mount_configs`. `dra`: its DRA driver is enabled, and a GPU is moved in seconds.
    `claims`: the same, and all GPUs are granted through DRA from the start. `fleet`: the node takes part in the fleet.
    `more_policies`: policies that are appended to the stack. `more_settings`: returns further settings of the configuration file.
    """

    def __init__(
        self,
        gpus: int,
        shares: int = 0,
        shares_as: str = SHARED,
        mixed: str = "",
        quiet_seconds: int | None = None,
        library: bool = False,
        cdi: bool = False,
        auto: bool = False,
        own_spec: bool = True,
        api_server: bool = False,
        other_root: bool = False,
        slow_disk: bool = False,
        slow_status: bool = False,
        labels: bool = False,
        configs: bool = False,
        slices: tuple[int, ...] = (),
        dra: bool = False,
        claims: bool = False,
        fleet: bool = False,
        more_policies: tuple[str, ...] = (),
        more_settings=None,
    ) -> None:
        self.gpus = gpus
        self.shares = shares
        self.shares_as = shares_as
        self.mixed = mixed
        self.quiet_seconds = quiet_seconds
        self.library = library
        self.cdi = cdi
        self.auto = auto
        self.own_spec = own_spec
        self.api_server = api_server
        self.other_root = other_root
        self.slow_disk = slow_disk
        self.slow_status = slow_status
        self.labels = labels
        self.configs = configs
        self.slices = slices
        self.dra = dra or claims
        self.claims = claims
        self.fleet = fleet
        self.more_policies = more_policies
        self.more_settings = more_settings or dict

    @property
    def resource(self) -> str:
        """The one that most pods of the setup ask for."""
        return slice_of(self.slices[0]) if self.slices else self.shares_as if self.shares else WHOLE

    @property
    def resources(self) -> list[str]:
        """The devices that the kubelet lists."""
        if self.claims:
            return []
        if self.slices:
            return [slice_of(mib) for mib in self.slices]
        return [WHOLE, SHARED] if self.mixed else [self.resource]


class Allocation:
    """One allocation as the API shows it. `holder` is (namespace, pod, container, pod UID), or None while unknown."""

    def __init__(self, shown: dict) -> None:
        self.id = shown["id"]
        self.resource = shown["resource"]
        self.devices = frozenset(shown["devices"])
        #: Seconds since 1970.
        self.granted = datetime.fromisoformat(shown["grantedAt"].replace("Z", "+00:00")).timestamp()
        self.gpus = frozenset(shown["gpus"])
        holder = shown.get("holder") or {}
        names = ("namespace", "pod", "container", "podUid")
        self.holder = tuple(holder.get(n) for n in names) if holder else None

    def same(self) -> tuple:
        """What must not change over a restart."""
        return self.id, self.resource, self.devices, self.holder


class Berth:
    """One `berth serve`, with a state folder of its own that outlives its restarts."""

    def __init__(self, logs: Path, binary: Path, fake: FakeGpus, setup: Setup, kubeconfig: Path | None = None) -> None:
        self.setup = setup
        self.fake = fake
        self._binary = binary
        #: The program that runs as the guard.
        self.guard_binary = binary
        shutil.rmtree(_STATE, ignore_errors=True)
        # A Berth without a store would adopt the claims of the setup before from these records.
        for grants in (KUBELET / "plugins").glob("*/grants"):
            shutil.rmtree(grants, ignore_errors=True)
        LIBRARY_ON_HOST.mkdir(exist_ok=True)
        self.settings = _settings(setup, fake.library)
        self.configure(self.settings)
        args = [binary, "serve", "--config", _CONFIG]
        if setup.api_server and kubeconfig is not None:
            args += ["--kubeconfig", kubeconfig]
        if setup.configs:
            args += ["--config-dir", _CONFIGS]
        environment = {**fake.environment, **(disk.slow() if setup.slow_disk else {})}
        self._process = process.Process("berth", args, logs / "berth.log", environment)

    def start(self) -> None:
        """Starts it and waits until it is ready and the kubelet knows its resources."""
        self._process.start()

        def ready() -> bool:
            self._process.check()
            return _ask("GET", "/readyz") is not None

        until("berth is ready (/readyz)", _START_SECONDS, ready, every=0.02)
        for resource in self.setup.resources:
            self.registered(resource)

    def start_unready(self) -> None:
        """Starts it and waits until it answers, ready or not."""
        self._process.start()

        def answers() -> bool:
            self._process.check()
            return bool(self.node())

        until("berth answers", _START_SECONDS, answers)

    def configure(self, settings: dict) -> None:
        """Writes the configuration file of its next start."""
        # JSON is YAML, so no YAML writer is needed.
        _CONFIG.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    @property
    def pid(self) -> int:
        return self._process.pid

    def mount_configs(self, files: dict[str, str]) -> None:
        """Puts a ConfigMap's data where it reads them, as the kubelet does: links to a folder beside them."""
        shutil.rmtree(_CONFIGS, ignore_errors=True)
        data = _CONFIGS / "..2026_01_01"
        data.mkdir(parents=True)
        (_CONFIGS / "..data").symlink_to(data.name)
        for name, text in files.items():
            (data / name).write_text(text, encoding="utf-8")
            (_CONFIGS / name).symlink_to(f"..data/{name}")

    def cli(self, *args: str, seconds: float = 60) -> str:
        """Runs `berth ARGS` against the running daemon, as an operator would; returns what it printed. It sees the node's
        GPUs, which `config check` reads."""
        args = tuple(str(_CONFIG) if a == CONFIG_FOR_READERS else a for a in args)
        environment = {**_CLIENT, **self.fake.environment}
        return process.run([self._binary, *args], f"berth {' '.join(args)}", environment, seconds)

    def fails(self, *args: str, user: int = 0) -> str:
        """Runs a command that must fail, as that user; returns what it printed. `CONFIG_FOR_READERS` is its file, as above."""
        args = tuple(str(_CONFIG) if a == CONFIG_FOR_READERS else a for a in args)
        command = f"berth {' '.join(args)}"
        code, said = process.ended([*_as(user), self._binary, *args], command, {**_CLIENT, **self.fake.environment})
        if code != 1:
            raise TestError(f"{command}: exit {code}, and 1 was expected: {said.strip()[-800:]}")
        return said

    def guard(self, log: Path, drivers: Path | None = None) -> process.Process:
        """`berth guard` with the settings of this daemon. `drivers`: what it sees as the kernel's list, /proc/devices."""
        args = [self.guard_binary, "guard", "--config", _CONFIG]
        if drivers is not None:
            script = f'mount --bind {drivers} /proc/devices && exec "$@"'
            args = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh", *args]
        return process.Process("berth guard", args, log, self.fake.environment)

    def container_bypasses(self) -> dict[tuple[str, str], dict]:
        """What the guard did, by pod and container."""
        return {(one["pod"], one["container"]): one for one in self._get("/api/v1/bypass").get("containers", [])}

    def limits(self, allocation: str) -> dict:
        """The limits of an allocation, and who enforces them, as the API shows it."""
        return self._get(f"/api/v1/allocations/{allocation}")["limits"]

    def metrics(self) -> list[str]:
        """The lines of /metrics."""
        return _ask("GET", "/metrics", _token()).splitlines()

    def guard_status(self) -> dict:
        """The guard as the API shows it."""
        return self.node()["guard"]

    def cli_process(self, log: Path, *args: str) -> process.Process:
        """The same as a process that goes on beside the test."""
        return process.Process(f"berth {args[0]} {args[1]}", [self._binary, *args], log, _CLIENT)

    def registered(self, resource: str) -> None:
        """Waits until the kubelet watches the device list of `resource`, by Berth's word and by the kubelet's own."""

        def look() -> bool:
            self._process.check()
            for shown in self._get("/api/v1/node")["resources"]:
                if shown["resource"] == resource:
                    if not shown["registration"]["done"]:
                        raise TestError(shown["registration"].get("waiting", "registration is not done"))
                    return bool(healthy(resource))
            return False

        until(f"the kubelet knows {resource}", 30, look, every=0.02)

    def start_as(self, user: int) -> None:
        """Starts it as that user, without root's rights, and waits until it answers. Its state is that user's."""
        shutil.rmtree(_STATE, ignore_errors=True)
        _STATE.mkdir()
        shutil.chown(_STATE, user)
        args = self._process.args
        try:
            self._process.args = [*_as(user), *args]
            self.start_unready()
        finally:
            self._process.args = args

    def registration(self, resource: str) -> dict:
        """How far the registration of a resource is, as the API shows it."""
        shown = [r for r in self.node()["resources"] if r["resource"] == resource]
        return shown[0]["registration"] if shown else {}

    def crash(self) -> None:
        """kill -9."""
        self._process.kill()

    def stop(self) -> tuple[int, float]:
        """SIGTERM. Returns the exit status and the seconds that it took."""
        return self._process.stop()

    def forget(self) -> None:
        """Removes what a stopped Berth has stored, as if it were installed on a node with running pods."""
        shutil.rmtree(_STATE)

    def log(self) -> str:
        """What it has logged, in the setups before this one, too."""
        return self._process.log.read_text(encoding="utf-8", errors="replace")

    def node(self) -> dict:
        """The node as the API shows it."""
        return self._get("/api/v1/node")

    def check(self, name: str) -> tuple[bool, str]:
        """Whether a check of /readyz is passed, and what it says."""
        self._process.check()
        _, text = _exchange("GET", "/readyz", _token())
        for check in json.loads(text)["checks"]:
            if check["name"] == name:
                return check["ok"], check.get("detail", "")
        raise TestError(f"/readyz has no check {name}: {text[:300]}")

    def events(self, kind: str) -> list[dict]:
        """The past events of that kind, newest first."""
        return [event for event in self._get("/api/v1/events/history")["items"] if event["kind"] == kind]

    def claims(self) -> dict[str, dict]:
        """The live allocations of claims as the API shows them, by the claims' names."""
        shown = self._get("/api/v1/allocations")["items"]
        return {one["claim"]["name"]: one for one in shown if "claim" in one}

    def via(self, gpu: str) -> dict:
        """Through which API of the kubelet a GPU is granted."""
        return self._get(f"/api/v1/gpus/{gpu}/via")

    def gpus(self) -> set[str]:
        """The UUIDs of all GPUs that it manages."""
        return {gpu["uuid"] for gpu in self._get("/api/v1/gpus")["items"]}

    def allocations(self) -> list[Allocation]:
        """The live allocations."""
        self._process.check()
        return [Allocation(shown) for shown in self._get("/api/v1/allocations")["items"]]

    def granted_on(self, gpu: str) -> list[Allocation]:
        """All allocations of a GPU, ended ones among them, newest first; no more than one page."""
        return [Allocation(a) for a in self._get(f"/api/v1/allocations?state=all&limit=1000&gpu={gpu}")["items"]]

    def cordon(self, gpu: str) -> None:
        self._ask("PUT", f"/api/v1/gpus/{gpu}/cordon", {"reason": "e2e"})

    def uncordon(self, gpu: str) -> None:
        self._ask("DELETE", f"/api/v1/gpus/{gpu}/cordon")

    def drain(self, gpu: str) -> str:
        """The state of a GPU's drain."""
        return self._get(f"/api/v1/gpus/{gpu}")["drain"]["state"]

    def drains(self, state: str) -> list[str]:
        """The GPUs whose drain is in that state."""
        return [gpu["uuid"] for gpu in self._get("/api/v1/gpus")["items"] if gpu["drain"]["state"] == state]

    def share(self, shares: int) -> None:
        """Changes the policy of the running daemon: from now on every GPU is offered in so many shares."""
        self._ask("PUT", "/api/v1/stack", {"entries": [_timeslice(shares, SHARED)]})

    def stack(self) -> tuple:
        """The revision, the source and the entries of the active stack."""
        shown = self._get("/api/v1/stack")
        return shown["revision"], shown["source"], [entry["policy"] for entry in shown["entries"]]

    def _get(self, path: str) -> dict:
        return json.loads(self._ask("GET", path))

    def _ask(self, method: str, path: str, body: dict | None = None) -> str:
        return _ask(method, path, _token(), body)


def _token() -> str:
    try:
        return _TOKEN.read_text(encoding="ascii").strip()
    except OSError as error:
        raise TestError(f"berth has made no token yet: {error}") from error


def _as(user: int) -> list[str]:
    """What runs a program as that user, without root's rights."""
    return ["setpriv", f"--reuid={user}", "--clear-groups", "--"] if user else []


def _stack(setup: Setup) -> list[dict]:
    return _offers(setup) + [{"policy": name} for name in setup.more_policies]


def _offers(setup: Setup) -> list[dict]:
    if setup.slices:
        return [_slices(gpu, mib) for gpu, mib in enumerate(setup.slices)]
    if setup.mixed:
        return [{"policy": "mixed", "parameters": {"advertise": setup.mixed, "replicas": 4, "settleSeconds": 5}}]
    return [_timeslice(setup.shares, setup.shares_as) if setup.shares else {"policy": "exclusive"}]


def _slices(gpu: int, mib: int) -> dict:
    size = {"resource": slice_of(mib), "memoryMiB": mib}
    parameters = {"sizes": [size], "only": [{"index": gpu}]}
    return {"policy": "memory", "parameters": parameters, "permissions": {"resources": [slice_of(mib)]}}


def _timeslice(shares: int, resource: str) -> dict:
    return {"policy": "timeslice", "parameters": {"replicas": shares, "resource": resource}}


def _settings(setup: Setup, nvml_library: Path) -> dict:
    settings = {
        "nodeName": NODE_NAME,
        "kubeletDir": str(KUBELET),
        "stateDir": str(_STATE),
        "gpus": "nvml",
        "nvmlLibrary": str(nvml_library),
        "adminListen": ADMIN,
        "guard": {"socket": str(GUARD_SOCKET), "nriSocket": str(NRI_SOCKET), "cgroupRoot": str(machine.CGROUP2)},
    }
    if setup.other_root:
        settings["kubeletRootDir"] = str(OTHER_KUBELET_ROOT)
    if not setup.configs:
        settings["stack"] = _stack(setup)
    if setup.quiet_seconds is not None:
        settings["health"] = {"quietSeconds": setup.quiet_seconds}
    if setup.dra:
        settings["dra"] = {"enabled": True, "via": "dra" if setup.claims else "devicePlugin"}
        settings["timing"] = {"viaMs": 2000}
    if setup.fleet:
        settings["fleet"] = {"enabled": True}
    if setup.labels:
        settings["labels"] = {"node": True}
    edits = {}
    if setup.library:
        mount = {"hostPath": str(LIBRARY_ON_HOST), "containerPath": LIBRARY_IN_POD, "readOnly": True}
        edits["resources"] = {WHOLE: {"mounts": [mount]}}
    # The node has no NVIDIA runtime; the other cases read the variable that it would.
    edits["deviceListStrategy"] = ["auto"] if setup.auto else ["cdi-cri"] if setup.cdi else ["envvar"]
    if setup.auto:
        edits["nvidiaDriverRoot"] = str(DRIVER_ROOT)
        settings["containerRuntime"] = {"configFiles": [str(CONTAINERD_CONFIG)]}
    settings["cdi"] = {"folders": [str(CDI_SPECS)], "generate": "auto" if setup.own_spec else "never"}
    settings["containerEdits"] = edits
    return {**settings, **setup.more_settings()}


def write_cdi_spec(uuids: list[str]) -> None:
    """A CDI spec such as nvidia-ctk writes, whose only edit is a variable that names the device."""
    devices = [{"name": u, "containerEdits": {"env": [f"{cdi_variable(u)}=injected"]}} for u in uuids]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    (CDI_SPECS / "berth-e2e.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")


def gpu_of(device: str) -> str:
    """The GPU of a device id: a share is `<uuid>::<n>`."""
    return device.split("::")[0]


def cdi_variable(uuid: str) -> str:
    return "E2E_CDI_" + uuid.replace("-", "_").upper()


def _ask(method: str, path: str, token: str = "", body: dict | None = None) -> str:
    status, text = _exchange(method, path, token, body)
    if status >= 400:
        raise TestError(f"{method} {path}: {status}: {text[:300]}")
    return text


def _exchange(method: str, path: str, token: str = "", body: dict | None = None) -> tuple[int, str]:
    """The status and the body of an answer, whatever they are."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{ADMIN}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (urllib.error.URLError, OSError) as error:
        raise TestError(f"{method} {path}: {error}") from error
