"""One setup under test: a node, a Berth, and the checks that every case makes on a pod."""

from __future__ import annotations

from berth import Allocation, Berth
from node import Node
from pods import Container, Pod, container_ids
from say import Trouble, until

#: Berth polls the kubelet every 2 s for holders; the rest is for a slow machine.
HOLDER_SECONDS = 20


class Bench:
    def __init__(self, node: Node, berth: Berth) -> None:
        self.node = node
        self.berth = berth
        self.resource = berth.setup.resource
        self.running: list[Pod] = []

    def pod(self, name: str, containers: dict[str, int], extra: str = "", resource: str = "") -> Pod:
        """A pod whose containers ask for so many devices each; of the setup's resource, if no other is given."""
        return Pod(name, [Container(c, {resource or self.resource: n}, extra) for c, n in containers.items()])

    def start(self, *pods: Pod) -> None:
        """Hands all pods to the kubelet at once and waits until they run."""
        for pod in pods:
            self.node.run(pod)
        for pod in pods:
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
                raise Trouble(f"{len(mine)} allocations say that they are held by {wanted}")
            if not mine:
                raise Trouble(f"the API shows these holders: {[a.holder for a in seen]}")
            return mine[0]

        return until(f"the API names {'/'.join(wanted[:3])} as a holder", HOLDER_SECONDS, look)

    def gpus_seen(self, pod: Pod, container: str) -> list[str]:
        """The GPUs that the container itself sees in NVIDIA_VISIBLE_DEVICES, which the API must hold for it."""
        value = pod.environment(container).get("NVIDIA_VISIBLE_DEVICES")
        if not value:
            raise Trouble(f"container {container} of {pod.name} has no NVIDIA_VISIBLE_DEVICES")
        seen = value.split(",")
        if len(set(seen)) != len(seen):
            raise Trouble(f"container {container} of {pod.name} sees a GPU twice: {value}")
        unknown = set(seen) - self.berth.gpus()
        if unknown:
            raise Trouble(f"container {container} of {pod.name} sees {unknown}, which the API does not list")
        held = self.allocation(pod, container)
        if held.gpus != set(seen):
            raise Trouble(
                f"container {container} of {pod.name} sees {value}, but the API holds {set(held.gpus)} for it"
            )
        return seen

    def refused(self, pod: Pod) -> dict:
        """Hands over a pod that must be refused with words that name the resource. Returns its status."""
        self.node.run(pod)
        status = self.node.failed(pod)
        for resource in pod.containers[0].resources:
            if resource not in status.get("message", ""):
                raise Trouble(f"the refusal does not name {resource}: {status.get('reason')}: {status.get('message')}")
        return status

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
                raise Trouble(f"pod {pod.name} was started again: {containers[pod.name]} became {now}")
            for container in pod.containers:
                pod.beats(container.name)

        def same() -> bool:
            now = {a.id: a.same() for a in self.berth.allocations()}
            if now != allocations:
                raise Trouble(f"{difference(allocations, now)}")
            return True

        until("the allocations are those of before", HOLDER_SECONDS, same)


def difference(before: dict, now: dict) -> str:
    """Which allocations are lost, new or changed."""
    lost = [before[i] for i in before if i not in now]
    new = [now[i] for i in now if i not in before]
    changed = [(before[i], now[i]) for i in before if i in now and before[i] != now[i]]
    return f"lost {lost}, new {new}, changed {changed}"
