"""One small Kubernetes node: a containerd, a kubelet, and its pods; standalone, or of an API server."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import leftovers
from containerd import Containerd
from controlplane import ControlPlane
from kubelet import NODE_NAME, Kubelet
from places import MANIFESTS, PODS
from pods import Pod, manifest_path
from say import Hopeless, TestError, until


class Node:
    """`with Node(logs) as node:`; leaving it stops everything and cleans the machine, however it is left."""

    #: What `join` starts.
    control_plane = ControlPlane

    def __init__(self, logs: Path, containerd_folder: str = "") -> None:
        self.containerd = Containerd(logs, containerd_folder)
        self.kubelet = Kubelet(logs)
        self._logs = logs
        self._cluster: ControlPlane | None = None

    @property
    def is_standalone(self) -> bool:
        return self._cluster is None

    @property
    def cluster(self) -> ControlPlane:
        """The control plane that it has joined."""
        if self._cluster is None:
            raise TestError("this node is standalone")
        return self._cluster

    def join(self, service_accounts: bool = False) -> None:
        """Starts a control plane; the kubelet's next start, by `renew`, is that of a node of it."""
        if self._cluster is None:
            starting = self.control_plane(self._logs, service_accounts)
            try:
                starting.start()
            except BaseException:
                starting.stop()
                raise
            self._cluster = starting
            self.kubelet.join(starting.kubeconfig)

    def __enter__(self) -> Node:
        leftovers.clean()
        leftovers.remember_machine()
        try:
            for folder in (MANIFESTS, PODS):
                folder.mkdir(parents=True)
            self.containerd.start()
            self.kubelet.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    def _stop(self) -> None:
        # A second Ctrl-C must not cut the clean-up short.
        for sort in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sort, signal.SIG_IGN)
        # The kubelet first: it would start killed containers again.
        self.kubelet.stop()
        self.containerd.stop()
        if self._cluster is not None:
            self._cluster.stop()
        leftovers.clean()

    def run(self, pod: Pod, static: bool = False) -> Pod:
        """Hands the pod over: by kubectl where there is an API server and unless it is `static`, else as a file."""
        pod.folder.mkdir(parents=True, exist_ok=True)
        if self._cluster is not None and not static:
            pod.uid = self._cluster.create(pod.manifest())["metadata"]["uid"]
            return pod
        # The kubelet appends the node's name. The file is moved into place, so that it is never read half written.
        pod.name = f"{pod.short_name}-{NODE_NAME}"
        draft = PODS / f"{pod.name}.json"
        draft.write_text(pod.manifest(), encoding="utf-8")
        draft.rename(manifest_path(pod))
        return pod

    def delete(self, pod: Pod) -> None:
        """Takes the pod from the kubelet, and returns when the kubelet no longer shows it."""
        if self._cluster is not None and not manifest_path(pod).exists():
            self._cluster.kubectl("delete", "pod", pod.name, "--wait=false")
        manifest_path(pod).unlink(missing_ok=True)
        self.gone(pod)

    def gone(self, pod: Pod) -> None:
        """Waits until the kubelet no longer shows the pod."""
        until(f"pod {pod.name} is gone", 60, lambda: self._status(pod) is None)

    def ended(self, pod: Pod, phase: str) -> None:
        """Waits until all of the pod's containers have ended and it has that phase."""

        def look() -> bool:
            seen = self.status(pod)["status"].get("phase")
            if seen != phase:
                raise TestError(f"phase {seen}")
            return True

        until(f"pod {pod.name} is {phase}", 60, look)

    def status(self, pod: Pod) -> dict:
        """The pod as the kubelet shows it."""
        found = self._status(pod)
        if found is None:
            raise TestError(f"the kubelet does not show pod {pod.name}")
        return found

    def running(self, pod: Pod, seconds: float = 60) -> dict:
        """Waits until every container of the pod runs, and returns the pod."""

        def look():
            self.kubelet.check()
            seen = self.status(pod)
            state = seen.get("status", {})
            if state.get("phase") == "Failed":
                raise Hopeless(f"pod {pod.name} was refused: {state.get('reason')}: {state.get('message')}")
            statuses = state.get("containerStatuses", [])
            if len(statuses) == len(pod.containers) and all("running" in s.get("state", {}) for s in statuses):
                return seen
            raise TestError(f"phase {state.get('phase')}, {[s.get('state') for s in statuses]}")

        return until(f"pod {pod.name} runs", seconds, look)

    def failed(self, pod: Pod, seconds: float = 60) -> dict:
        """Waits until the pod has phase Failed, and returns its status."""

        def look():
            self.kubelet.check()
            state = self.status(pod).get("status", {})
            if state.get("phase") == "Failed":
                return state
            raise TestError(f"phase {state.get('phase')}")

        return until(f"pod {pod.name} is refused", seconds, look)

    def renew(self) -> None:
        """Ends all pods and starts a kubelet that has never seen a device, as on a new node."""
        for path in MANIFESTS.iterdir():
            path.unlink()
        if self._cluster is not None:
            self._cluster.empty()
        until("all pods are gone", 60, lambda: not self.kubelet.pods() and not leftovers.container_pids())
        self.kubelet.stop()
        self.kubelet.forget()
        shutil.rmtree(PODS)
        PODS.mkdir()
        self.kubelet.start()
        if self._cluster is not None:
            self._cluster.ready()

    def _status(self, pod: Pod) -> dict | None:
        for item in self.kubelet.pods():
            if item["metadata"]["uid"] == pod.uid:
                return item
        return None
