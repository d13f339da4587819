"""From NVIDIA's device plugin to Berth, and back, under running pods: the steps of docs/changeover.md."""

from __future__ import annotations

from bench import Bench
from berth import SHARED, WHOLE, Setup, gpu_of
from kubelet import granted, healthy
from nvidia import NvidiaPlugin
from pods import Pod, container_ids
from guide import follow
from say import TestError
from scenario import Scenario

#: Six GPUs: enough for all pods of the cases below, whole.
GPUS = 6
SHARES = 4
#: Names come with the first `List`; the rest is for a slow machine.
HOLDER_SECONDS = 20
#: What ended while Berth was away ends by two rounds 5 s apart, the first 30 s after the kubelet's start at the earliest.
AGAIN_SECONDS = 45


class Change:
    """What the cases of one setup share: NVIDIA's plugin, and the pods as they were when it was last looked."""

    def __init__(self, bench: Bench) -> None:
        setup = bench.berth.setup
        self.bench = bench
        self.devices = GPUS * (setup.shares or 1)
        renamed = setup.shares > 0 and setup.resource == SHARED
        self.plugin = NvidiaPlugin(bench.logs, bench.berth.fake, setup.resource, setup.shares, renamed)
        self.before: dict = {}
        self.waiting: Pod | None = None
        bench.at_end.append(self.plugin.stop)

    def look(self) -> dict:
        """Each container as the kubelet and the pod itself know it: none of it may change."""
        seen = {}
        for pod in self.bench.running:
            status = self.bench.node.running(pod)
            started = {s["name"]: s["state"]["running"]["startedAt"] for s in status["status"]["containerStatuses"]}
            for container in pod.containers:
                pod.beats(container.name)
                seen[pod.name, container.name] = (
                    container_ids(status)[container.name],
                    started[container.name],
                    pod.environment(container.name)["NVIDIA_VISIBLE_DEVICES"],
                    granted(pod.uid, container.name),
                )
        return seen

    def unharmed(self) -> None:
        now = self.look()
        changed = {key: (was, now.get(key)) for key, was in self.before.items() if now.get(key) != was}
        if changed:
            raise TestError(f"containers changed: {changed}")

    def newcomers(self, *names: str) -> None:
        """New pods run, on free devices."""
        held = self._held()
        for name in names:
            pod = self.bench.pod(name, {"main": 1})
            self.bench.start(pod)
            devices = granted(pod.uid, "main")
            seen = pod.environment("main")["NVIDIA_VISIBLE_DEVICES"]
            if len(devices) != 1 or devices & held or {gpu_of(d) for d in devices} != {seen}:
                raise TestError(f"{name} was given {set(devices)} and sees {seen}; held were {set(held)}")
            held |= devices

    def too_many(self, name: str) -> None:
        """A pod that wants one device more than are free does not run: the kubelet refuses it, a scheduler lets it wait."""
        free = self.devices - len(self._held())
        pod = self.bench.pod(name, {"main": free + 1})
        if self.bench.node.is_standalone:
            self.bench.refused(pod)
        else:
            self.bench.waits(pod)
            self.bench.node.delete(pod)

    def stop_nvidia(self) -> None:
        self.before = self.look()
        self.plugin.stop()
        self._between("to-berth")

    def stop_berth(self) -> None:
        self.before = self.look()
        code, _ = self.bench.berth.stop()
        if code != 0:
            raise TestError(f"berth ended with {code}")
        self._between("to-nvidia")

    def start_nvidia(self) -> None:
        self.plugin.start(self.devices)
        self._between_runs()
        self.unharmed()

    def _between(self, name: str) -> None:
        """A pod that comes while neither is there waits; without a scheduler it would be refused for good."""
        if not self.bench.node.is_standalone:
            self.bench.allocatable({self.bench.resource: 0})
            self.waiting = self.bench.pod(name, {"main": 1})
            self.bench.waits(self.waiting)

    def _between_runs(self) -> None:
        if self.waiting is not None:
            self.bench.node.running(self.waiting)
            self.bench.running.append(self.waiting)
            self.waiting = None

    def start_berth(self) -> None:
        self.bench.berth.start()
        if len(healthy(self.bench.resource)) != self.devices:
            raise TestError(f"{self.devices} devices are to be had, berth lists {sorted(healthy(self.bench.resource))}")
        self._between_runs()
        self.unharmed()

    def _held(self) -> frozenset[str]:
        pods = self.bench.running
        return frozenset().union(*(granted(pod.uid, c.name) for pod in pods for c in pod.containers))


def to_berth(bench: Bench) -> None:
    change = bench.shared = Change(bench)
    change.plugin.start(change.devices)
    change.newcomers("early")
    bench.start(bench.pod("pair", {"left": 1, "right": 2}))
    follow(
        "To Berth",
        {
            "Let Berth offer what NVIDIA's plugin offers.": lambda: None,
            "Stop NVIDIA's plugin on the node.": change.stop_nvidia,
            "Start Berth, the first time with an empty state folder.": change.start_berth,
            "Check the allocations that it took over.": lambda: bench.equals_truth(HOLDER_SECONDS),
            "Start new pods.": lambda: (change.newcomers("after"), change.too_many("too-many")),
        },
        bench.berth.cli,
    )
    change.unharmed()
    # A container of before that is started again later gets no new grant: it keeps its devices.
    (early, *_) = bench.running
    seen = bench.gpus_seen(early, "main")
    bench.crash(early, "main")
    if bench.gpus_seen(early, "main") != seen:
        raise TestError(f"started again, {early.name} sees {bench.gpus_seen(early, 'main')}, before it saw {seen}")
    bench.equals_truth(HOLDER_SECONDS)


def back_to_nvidia(bench: Bench) -> None:
    change = bench.shared
    follow(
        "Back",
        {
            "Stop Berth on the node.": change.stop_berth,
            "Start NVIDIA's plugin.": change.start_nvidia,
            "Start new pods.": lambda: change.newcomers("back"),
        },
        bench.berth.cli,
    )
    change.unharmed()


def to_berth_again(bench: Bench) -> str:
    """Berth's state folder is an old one now: a pod has gone and one has come while NVIDIA's plugin served."""
    change = bench.shared
    early = bench.running.pop(0)
    bench.node.delete(early)
    change.stop_nvidia()
    change.start_berth()
    took = bench.equals_truth(AGAIN_SECONDS)
    change.newcomers("again")
    bench.equals_truth(HOLDER_SECONDS)
    change.unharmed()
    return f"release_seen_within_s={took:.1f}"


_OVER = "from NVIDIA's plugin to berth: no pod restarts, all is taken over, new pods work"
_BACK = "and back to NVIDIA's plugin: no pod restarts, new pods work"
_AGAIN = "and to berth again, with its old state: what came and went meanwhile is true"


_CASES = {_OVER: to_berth, _BACK: back_to_nvidia, _AGAIN: to_berth_again}


def _cases(kind: str, *names: str) -> dict:
    return {f"{kind}: {name}": _CASES[name] for name in names}


SCENARIOS = [
    Scenario("change whole", Setup(gpus=GPUS), _cases("whole GPUs", _OVER, _BACK, _AGAIN), berth_first=False),
    Scenario(
        "change shares",
        Setup(gpus=GPUS, shares=SHARES, shares_as=WHOLE),
        _cases("time-slicing", _OVER, _BACK),
        berth_first=False,
    ),
    Scenario(
        "change renamed shares",
        Setup(gpus=GPUS, shares=SHARES),
        _cases("time-slicing, renamed", _OVER, _BACK),
        berth_first=False,
    ),
    Scenario(
        "change with a scheduler",
        Setup(gpus=GPUS, shares=SHARES, shares_as=WHOLE),
        _cases("time-slicing, full node", _OVER, _BACK),
        cluster=True,
        berth_first=False,
    ),
]
