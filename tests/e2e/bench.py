"""One setup under test: a node, a Berth, and the checks that every case makes on a pod."""

from __future__ import annotations

import time
from pathlib import Path

from berth import Allocation, Berth
from kubelet import granted
from node import Node
from pods import NAMESPACE, Container, Pod, container_ids
from say import Hopeless, TestError, until

#: Berth polls the kubelet every 2 s for holders; the rest is for a slow machine.
HOLDER_SECONDS = 20


#: How long an allocation may live on after its pod: two rounds 5 s apart, both 30 s after the grant, and the rest for a slow
#: machine, on which the kubelet is late, too.
RELEASE_SECONDS = 90
#: The same if Berth uses the API server, which takes some seconds.
RELEASE_SECONDS_WITH_API_SERVER = 30


class Bench:
    """`at_end` is called when the last case is over, whatever became of it."""

    def __init__(self, node: Node, berth: Berth, logs: Path) -> None:
        self.node = node
        self.berth = berth
        self.logs = logs
        self.resource = berth.setup.resource
        self.running: list[Pod] = []
        self.at_end: list = []
        #: What the cases of a setup hand on to each other.
        self.shared = None

    def pod(self, name: str, containers: dict[str, int], extra: str = "", resource: str = "", **rest) -> Pod:
        """A pod whose containers ask for so many devices each; of the setup's resource, if no other is given."""
        return Pod(name, [Container(c, {resource or self.resource: n}, extra) for c, n in containers.items()], **rest)

    def start(self, *pods: Pod) -> None:
        """Hands all pods to the kubelet at once and waits until they run."""
        for pod in pods:
            self.node.run(pod)
        for pod in pods:
            self.node.running(pod)
            self.running.append(pod)

    def start_known(self, pod: Pod) -> None:
        """Waits until a pod that was already created runs."""
        self.node.running(pod)
        self.running.append(pod)

    def allocation(self, pod: Pod, container: str) -> Allocation:
        """The one live allocation whose holder is that container, by names and UID."""
        wanted = tuple(self.node.status(pod)["metadata"][key] for key in ("namespace", "name"))
        wanted += (container, pod.uid)

        def look():
            seen = self.berth.allocations()
            mine = [a for a in seen if a.holder == wanted]
            if len(mine) > 1:
                raise TestError(f"{len(mine)} allocations say that they are held by {wanted}")
            if not mine:
                raise TestError(f"the API shows these holders: {[a.holder for a in seen]}")
            return mine[0]

        return until(f"the API names {'/'.join(wanted[:3])} as a holder", HOLDER_SECONDS, look)

    def gpus_seen(self, pod: Pod, container: str) -> list[str]:
        """The GPUs that the container itself sees in NVIDIA_VISIBLE_DEVICES, which the API must hold for it."""
        value = pod.environment(container).get("NVIDIA_VISIBLE_DEVICES")
        if not value:
            raise TestError(f"container {container} of {pod.name} has no NVIDIA_VISIBLE_DEVICES")
        seen = value.split(",")
        if len(set(seen)) != len(seen):
            raise TestError(f"container {container} of {pod.name} sees a GPU twice: {value}")
        unknown = set(seen) - self.berth.gpus()
        if unknown:
            raise TestError(f"container {container} of {pod.name} sees {unknown}, which the API does not list")
        held = self.allocation(pod, container)
        if held.gpus != set(seen):
            raise TestError(
                f"container {container} of {pod.name} sees {value}, but the API holds {set(held.gpus)} for it"
            )
        return seen

    def refused(self, pod: Pod) -> dict:
        """Hands over a pod that must be refused with words that name the resource. Returns its status."""
        self.node.run(pod)
        status = self.node.failed(pod)
        for resource in pod.containers[0].resources:
            if resource not in status.get("message", ""):
                raise TestError(f"the refusal does not name {resource}: {status.get('reason')}: {status.get('message')}")
        return status

    def waits(self, pod: Pod) -> None:
        """Hands over a pod that the scheduler must leave waiting, with words that name the resource."""
        self.node.run(pod)
        resource = next(iter(pod.containers[0].resources))

        def unschedulable() -> bool:
            shown = self.node.cluster.pod(pod.name)["status"]
            if shown.get("phase") != "Pending":
                raise Hopeless(f"{pod.name} was to wait, and is {shown.get('phase')}: {shown.get('message')}")
            said = [c.get("message", "") for c in shown.get("conditions", []) if c.get("reason") == "Unschedulable"]
            return any(f"Insufficient {resource}" in text for text in said)

        until(f"the scheduler says that {pod.name} must wait", 30, unschedulable)

    def allocatable(self, wanted: dict[str, int], seconds: float = 30) -> None:
        """Waits until the scheduler sees exactly so many devices of each resource on the node."""

        def seen() -> bool:
            now = {resource: self.node.cluster.allocatable(resource) for resource in wanted}
            if now != wanted:
                raise TestError(f"it sees {now}")
            return True

        until(f"the API server sees {wanted} as allocatable", seconds, seen)

    def no_pod_failed(self) -> None:
        """No pod was refused by the kubelet, which the scheduler thought it could run. One that ran and failed has no reason."""
        for shown in self.node.cluster.pods():
            status = shown["status"]
            if status.get("phase") == "Failed" and status.get("reason"):
                raise TestError(f"{shown['metadata']['name']}: {status['reason']}: {status.get('message')}")

    def ends(self, pod: Pod) -> str:
        """After a pod's last container has ended: waits until the API's list is the truth; returns how long it took."""
        if pod in self.running:
            self.running.remove(pod)
        allowed = RELEASE_SECONDS_WITH_API_SERVER if self.berth.setup.api_server else RELEASE_SECONDS
        took = self.equals_truth(allowed)
        return f"release_seen_within_s={took:.1f}"

    def equals_truth(self, seconds: float) -> float:
        """Waits until the live allocations are exactly what the running containers hold. Returns the seconds it took.

        What a container holds is what it sees itself, and the ids that the kubelet has noted for it.
        """
        begin = time.monotonic()
        truth = set()
        for pod in self.running:
            for container in pod.containers:
                seen = pod.environment(container.name)["NVIDIA_VISIBLE_DEVICES"].split(",")
                devices = granted(pod.uid, container.name)
                truth.add((NAMESPACE, pod.name, container.name, pod.uid, frozenset(seen), devices))

        def equal() -> bool:
            shown = self.berth.allocations()
            listed = {((a.holder or (None,) * 4) + (a.gpus, a.devices)) for a in shown}
            if listed != truth or len(shown) != len(listed):
                raise TestError(
                    f"not true: {sorted(map(str, listed - truth))}, missing: {sorted(map(str, truth - listed))}"
                )
            return True

        until("the API's list equals the truth", seconds, equal, every=0.1)
        return time.monotonic() - begin

    def crash(self, pod: Pod, container: str) -> None:
        """Lets a container of a running pod end with an error; returns when the kubelet has started it again."""
        pod.end(container, 3)

        def restarted() -> bool:
            statuses = {s["name"]: s for s in self.node.status(pod)["status"]["containerStatuses"]}
            return statuses[container]["restartCount"] == 1 and "running" in statuses[container]["state"]

        until(f"container {container} of {pod.name} is started again", 60, restarted)
        pod.beats(container)

    def picture(self) -> tuple[dict, dict]:
        """What a restart of anything must leave alone: containers as the kubelet knows them, and live allocations."""
        for pod in self.running:
            for container in pod.containers:
                self.allocation(pod, container.name)
        containers = {pod.name: container_ids(self.node.running(pod)) for pod in self.running}
        return containers, {a.id: a.same() for a in self.berth.allocations()}

    def unchanged(self, before: tuple[dict, dict]) -> None:
        """Every container is the same one and alive, and every allocation is there as before."""
        containers, allocations = before
        for pod in self.running:
            now = container_ids(self.node.running(pod))
            if now != containers[pod.name]:
                raise TestError(f"pod {pod.name} was started again: {containers[pod.name]} became {now}")
            for container in pod.containers:
                pod.beats(container.name)

        def same() -> bool:
            now = {a.id: a.same() for a in self.berth.allocations()}
            if now != allocations:
                raise TestError(f"{difference(allocations, now)}")
            return True

        until("the allocations are those of before", HOLDER_SECONDS, same)


def difference(before: dict, now: dict) -> str:
    """Which allocations are lost, new or changed."""
    lost = [before[i] for i in before if i not in now]
    new = [now[i] for i in now if i not in before]
    changed = [(before[i], now[i]) for i in before if i in now and before[i] != now[i]]
    return f"lost {lost}, new {new}, changed {changed}"
