"""What makes pods by itself on a full node: a deployment, a StatefulSet, jobs of short pods."""

from __future__ import annotations

import json

from bench import Bench
from places import PODS
from pods import NAMESPACE, Pod
from say import until

#: A pod that the kubelet refuses is followed by another one, after a pause of the controller.
_RUNS_SECONDS = 120

# A pod that notes which GPU it got and ends soon.
_SHORT = """
echo "$E2E_POD_UID $NVIDIA_VISIBLE_DEVICES" >> /e2e/seen
sleep 2
"""


class Worker:
    """A deployment or a StatefulSet of one pod with one GPU, whose pod may be another one each time."""

    def __init__(self, bench: Bench, name: str, kind: str = "Deployment") -> None:
        self.bench = bench
        self.name = name
        self.kind = kind
        self.template = bench.pod(name, {"main": 1}, labels={"app": name})
        self.template.folder.mkdir(parents=True)
        pod = json.loads(self.template.manifest())
        template = {"metadata": {"labels": {"app": name}}, "spec": pod["spec"]}
        spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
        if kind == "StatefulSet":
            spec["serviceName"] = name
        metadata = {"name": name, "namespace": NAMESPACE}
        bench.node.cluster.create(
            json.dumps({"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": spec})
        )

    def runs(self, other_than: Pod | None = None) -> Pod:
        """Waits until its pod runs; not the one given, which has gone by then."""
        old = other_than.uid if other_than else ""

        def look() -> Pod | None:
            for shown in self.bench.node.cluster.pods():
                metadata = shown["metadata"]
                if metadata.get("labels", {}).get("app") != self.name:
                    continue
                if metadata["uid"] != old and shown["status"].get("phase") == "Running":
                    pod = self.bench.pod(self.name, {"main": 1}, restart="Always")
                    pod.name, pod.uid, pod.folder = metadata["name"], metadata["uid"], self.template.folder
                    return pod
            return None

        pod = until(f"a pod of {self.kind} {self.name} runs", _RUNS_SECONDS, look)
        self.bench.node.running(pod)
        pod.started("main")
        if other_than is not None:
            self.bench.running.remove(other_than)
        self.bench.running.append(pod)
        return pod

    def give_back_gpu(self) -> None:
        """From now on its pod asks for no GPU; the controller replaces the one that runs."""
        change = [{"op": "remove", "path": "/spec/template/spec/containers/0/resources"}]
        self._patch(change)

    def _patch(self, change: list[dict]) -> None:
        self.bench.node.cluster.kubectl("patch", self.kind, self.name, "--type=json", "-p", json.dumps(change))


class ShortPods:
    """Jobs that make pods with one GPU, one after another without an end."""

    def __init__(self, bench: Bench, jobs: int) -> None:
        self.bench = bench
        self._folder = PODS / "short"
        self._folder.mkdir(parents=True)
        for n in range(jobs):
            self._create(f"short-{n}")

    def _create(self, name: str) -> None:
        pod = self.bench.pod("short", {"main": 1}, restart="Never")
        pod.folder = self._folder
        spec = json.loads(pod.manifest())["spec"]
        spec["containers"][0]["command"] = ["/bin/sh", "-c", _SHORT]
        template = {"metadata": {"labels": {"e2e": "short"}}, "spec": spec}
        # A pod that is refused or evicted counts as a failure.
        job = {"completions": 100_000, "parallelism": 1, "backoffLimit": 100_000, "template": template}
        metadata = {"name": name, "namespace": NAMESPACE}
        self.bench.node.cluster.create(
            json.dumps({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job})
        )

    def seen(self) -> list[tuple[str, str]]:
        """The UID of each pod that has run, and the GPU that it saw, the newest last."""
        path = self._folder / "seen"
        text = path.read_text(encoding="ascii") if path.exists() else ""
        return [(uid, gpu) for uid, gpu in (line.split() for line in text.splitlines())]

    def refused(self) -> int:
        """How many pods the kubelet has refused since Berth did not grant their devices."""
        shown = [pod["status"] for pod in self.bench.node.cluster.pods()]
        return sum(status.get("reason") == "UnexpectedAdmissionError" for status in shown)

    def stop(self) -> None:
        """Deletes the jobs and their pods, and waits until the pods have gone."""
        cluster = self.bench.node.cluster
        cluster.kubectl("delete", "jobs", "--all", "--cascade=foreground", "--wait=false")

        def gone() -> bool:
            return not [p for p in cluster.pods() if p["metadata"].get("labels", {}).get("e2e") == "short"]

        until("all short pods have gone", 120, gone)
