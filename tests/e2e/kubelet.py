"""The real kubelet: built from Go modules once, run standalone or as a node of an API server.

The status of its pods is read at `/pods` of its read-only port, which listens on loopback here.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path

import machine
import process
from gomodule import GoModule
from places import CONTAINERD_SOCKET, KUBELET, MANIFESTS, RUN
from say import TestError, until

MODULE = GoModule("kubelet", "k8s.io/kubernetes", ["cmd/kubelet"], with_version=True)
NODE_NAME = "berth-e2e"
PLUGINS = KUBELET / "device-plugins"
SOCKET = PLUGINS / "kubelet.sock"
#: `CLOCK_REALTIME_COARSE` of Linux, which Python does not name.
_CLOCK_REALTIME_COARSE = 5
CHECKPOINT = PLUGINS / "kubelet_internal_checkpoint"


def clock_ns() -> int:
    """Now, by the clock that stamps files; it ticks in steps of up to 10 ms."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def healthy(resource: str, since_ns: int = 0) -> set[str]:
    """The ids of `resource` that the kubelet holds for healthy.

    It writes them into its checkpoint with each device list that it takes, though not when a plugin leaves;
    what was written before its newest start, or before `since_ns` by `clock_ns`, counts for nothing.
    """
    try:
        if CHECKPOINT.stat().st_mtime_ns < max(since_ns, SOCKET.stat().st_ctime_ns):
            return set()
        return set((_checkpoint().get("RegisteredDevices") or {}).get(resource) or [])
    except (OSError, ValueError):
        return set()


def granted(pod_uid: str, container: str) -> frozenset[str]:
    """The device ids that the kubelet has noted for a container, of all resources."""
    ids = set()
    for entry in _checkpoint().get("PodDeviceEntries") or []:
        if entry["PodUID"] == pod_uid and entry["ContainerName"] == container:
            ids.update(id for of_node in entry["DeviceIDs"].values() for id in of_node)
    return frozenset(ids)


def granted_on(gpu: str) -> set[str]:
    """The UIDs of the pods for which the kubelet has noted a device of a GPU; some may have ended."""
    found = set()
    for entry in _checkpoint().get("PodDeviceEntries") or []:
        if any(id.split("::")[0] == gpu for of_node in entry["DeviceIDs"].values() for id in of_node):
            found.add(entry["PodUID"])
    return found


def _checkpoint() -> dict:
    return json.loads(CHECKPOINT.read_text(encoding="utf-8"))["Data"]


class Kubelet:
    def __init__(self, logs: Path) -> None:
        self._logs = logs
        config = RUN / "kubelet.json"
        self._args = [str(MODULE.build() / "kubelet"), "--config", str(config), "--hostname-override", NODE_NAME, "--v=2"]
        self._process = process.Process("kubelet", self._args, logs / "kubelet.log")
        self._config = config
        #: Its `--root-dir`, from its next start on. Its folder of device plugins is always the same.
        self.root = KUBELET
        #: How often it writes its status for the API server, from its next start on. A kubelet's default is ten
        #: seconds, in which the scheduler assigns devices that are gone.
        self.status_seconds = 1
        #: Feature gates of the kubelet, from its next start on.
        self.feature_gates: dict[str, bool] = {}

    def join(self, kubeconfig: Path) -> None:
        """From its next start on it is a node of that API server."""
        self._args += ["--kubeconfig", str(kubeconfig)]

    def start(self) -> None:
        """Starts it and waits for its device plugin socket."""
        MANIFESTS.mkdir(exist_ok=True)
        self._config.write_text(json.dumps(self._settings(), indent=1), encoding="utf-8")
        SOCKET.unlink(missing_ok=True)
        self._process.args = [*self._args, "--root-dir", str(self.root)]
        self._process.start()

        def serves() -> bool:
            self._process.check()
            return SOCKET.exists() and self.pods() is not None

        until("the kubelet serves kubelet.sock and /pods", 60, serves, every=0.02)

    def stop(self) -> None:
        """Stops it. Its containers run on, as on a node."""
        self._process.stop()

    def forget(self) -> None:
        """Removes what a stopped kubelet knows of devices, so that the next start is that of a new node."""
        for entry in PLUGINS.iterdir() if PLUGINS.is_dir() else ():
            entry.unlink()

    def check(self) -> None:
        self._process.check()

    @property
    def pod_resources(self) -> Path:
        """The socket on which it shows its pods' devices."""
        return self.root / "pod-resources" / "kubelet.sock"

    def pods(self) -> list[dict]:
        """Every pod that the kubelet knows, with its status."""
        url = f"http://127.0.0.1:{machine.KUBELET_READ_ONLY_PORT}/pods"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.load(reply).get("items") or []
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise TestError(f"{url}: {error}") from error

    def registrations_ms(self, resource: str) -> list[float]:
        """Milliseconds from the newest kubelet.sock to each registration of `resource` that the kubelet logged since."""
        made = SOCKET.stat().st_ctime
        year = datetime.now().year
        found = []
        for line in (self._logs / "kubelet.log").read_text(errors="replace").splitlines():
            # klog: I0102 15:04:05.000000 pid file:line] "message" resourceName="..."
            if "Got registration request from device plugin" not in line or f'resourceName="{resource}"' not in line:
                continue
            stamp = datetime.strptime(f"{year}{line[1:21]}", "%Y%m%d %H:%M:%S.%f").timestamp()
            # The inode's time comes from a clock that ticks in steps of up to 10 ms.
            if stamp >= made - 0.010:
                found.append(max(0.0, (stamp - made) * 1000))
        return found

    def _settings(self) -> dict:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": machine.KUBELET_PORT,
            "readOnlyPort": machine.KUBELET_READ_ONLY_PORT,
            "healthzPort": machine.KUBELET_HEALTH_PORT,
            # No API server can review callers, so the port that permits changes refuses all.
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "staticPodPath": str(MANIFESTS),
            "featureGates": self.feature_gates,
            "fileCheckFrequency": "1s",
            "syncFrequency": "2s",
            "nodeStatusUpdateFrequency": f"{self.status_seconds}s",
            "podLogsDir": str(self._logs / "pods"),
            "volumePluginDir": str(RUN / "volume-plugins"),
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            # A full disk of the machine must not evict pods, nor an image be collected that no registry has.
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
        }
