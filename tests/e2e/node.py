"""One small Kubernetes node: a containerd, a kubelet, and a folder of static pods."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import leftovers
from containerd import Containerd
from kubelet import Kubelet
from places import MANIFESTS, PODS
from pods import Pod, manifest_path
from say import Trouble, until


class Node:
    """`with Node(logs) as node:`; leaving it stops everything and cleans the machine, however it is left."""

    def __init__(self, logs: Path, containerd_folder: str = "") -> None:
        self.containerd = Containerd(logs, containerd_folder)
        self.kubelet = Kubelet(logs)

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
        leftovers.clean()

    def run(self, pod: Pod) -> Pod:
        """Hands the pod to the kubelet. The file is moved into place, so that it is never read half written."""
        pod.folder.mkdir(parents=True, exist_ok=True)
        draft = PODS / f"{pod.name}.json"
        draft.write_text(pod.manifest(), encoding="utf-8")
        draft.rename(manifest_path(pod))
        return pod

    def delete(self, pod: Pod) -> None:
        """Takes the pod from the kubelet, and returns when the kubelet no longer shows it."""
        manifest_path(pod).unlink(missing_ok=True)
        until(f"pod {pod.name} is gone", 60, lambda: self._status(pod) is None)

    def status(self, pod: Pod) -> dict:
        """The pod as the kubelet shows it."""
        found = self._status(pod)
        if found is None:
            raise Trouble(f"the kubelet does not show pod {pod.name}")
        return found

    def running(self, pod: Pod, seconds: float = 60) -> dict:
        """Waits until every container of the pod runs, and returns the pod."""

        def look():
            self.kubelet.check()
            seen = self.status(pod)
            state = seen.get("status", {})
            if state.get("phase") == "Failed":
                # Not a Trouble, which `until` would swallow: a refused pod never runs later.
                raise Refused(f"pod {pod.name} was refused: {state.get('reason')}: {state.get('message')}")
            statuses = state.get("containerStatuses", [])
            if len(statuses) == len(pod.containers) and all("running" in s.get("state", {}) for s in statuses):
                return seen
            raise Trouble(f"phase {state.get('phase')}, {[s.get('state') for s in statuses]}")

        return until(f"pod {pod.name} runs", seconds, look)

    def failed(self, pod: Pod, seconds: float = 60) -> dict:
        """Waits until the pod has phase Failed, and returns its status."""

        def look():
            self.kubelet.check()
            state = self.status(pod).get("status", {})
            if state.get("phase") == "Failed":
                return state
            raise Trouble(f"phase {state.get('phase')}")

        return until(f"pod {pod.name} is refused", seconds, look)

    def renew(self) -> None:
        """Ends all pods and starts a kubelet that has never seen a device, as on a new node."""
        for path in MANIFESTS.iterdir():
            path.unlink()
        until("all pods are gone", 60, lambda: not self.kubelet.pods() and not leftovers.container_pids())
        self.kubelet.stop()
        self.kubelet.forget()
        shutil.rmtree(PODS)
        PODS.mkdir()
        self.kubelet.start()

    def _status(self, pod: Pod) -> dict | None:
        for item in self.kubelet.pods():
            if item["metadata"]["uid"] == pod.uid:
                return item
        return None


class Refused(Exception):
    """The kubelet will not run a pod that the case expected to run."""
