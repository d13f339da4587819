"""Cases of names and devices that are used again: the next pod of a StatefulSet, short pods one after another beside a GPU
that drains, and a GPU that the kubelet gives to two pods."""

from __future__ import annotations

import json
import time

import disk
from bench import Bench
from berth import WHOLE, Setup
from drains import DRAIN, no_eviction
from foreign import call
from kubelet import granted, granted_on
from pods import NAMESPACE, Pod, container_ids
from say import Hopeless, TestError, until
from scenario import Scenario
from workloads import ShortPods, Worker

#: Two scans ten seconds apart find no process, after the allocation has ended; the command itself waits longer.
DRAINED_SECONDS = 150
#: Without the API server an allocation ends by two rounds, both 30 s after the kubelet's start.
DRAIN_WITHOUT_API_SERVER = ("--deadline", "10m", "--wait")
DEADLINE_SECONDS = 5
DELETE = ("--evict", "--deadline", f"{DEADLINE_SECONDS}s", "--at-deadline", "delete", "--wait")
#: More jobs than GPUs, so that a pod waits for each device.
JOBS = 4
#: How many short pods run before a GPU is drained, and for how many seconds they continue beside the drained one.
SHORT_PODS = 4
BESIDE_SECONDS = 15
#: How often the kubelet is brought to lose a device; on a busy machine it may miss its moment.
TRIES = 8
#: The call of the kubelet that makes it forget the devices of pods that have ended.
LIST = "/v1.PodResourcesLister/List"


def moved(bench: Bench) -> str:
    """The first pod of the name leaves its GPU, which is cordoned; then the next one is elsewhere, and the drain must end."""
    return _moved(bench, DRAIN)


def moved_and_deleted(bench: Bench) -> str:
    """The same, and a drain that deletes pods at its deadline spares the next pod of the name."""
    gpu, _ = _move(bench)
    begin = time.monotonic()
    took = _drains(bench, gpu, *DELETE)
    _outlives_deadline(bench, begin)
    return took


def evicted(bench: Bench) -> str:
    """The drain itself evicts the pod, whose name is used again before the drain has ended."""
    old = bench.running[-1]
    (gpu,) = bench.gpus_seen(old, "main")
    begin = time.monotonic()
    bench.berth.cli("gpu", "drain", gpu, *DRAIN, seconds=DRAINED_SECONDS)
    took = time.monotonic() - begin
    new = _next(bench, old)
    _drained(bench, gpu)
    _elsewhere(bench, new, gpu)
    _back_in_use(bench, gpu)
    return f"drained_within_s={took:.0f}"


def deleted_at_deadline(bench: Bench) -> str:
    """The drain deletes the pod at its deadline, since a budget allows no eviction, and the next one of its name lives."""
    old = bench.running[-1]
    (gpu,) = bench.gpus_seen(old, "main")
    no_eviction(bench, bench.shared)
    begin = time.monotonic()
    bench.berth.cli("gpu", "drain", gpu, *DELETE, seconds=DRAINED_SECONDS)
    took = time.monotonic() - begin
    bench.node.cluster.kubectl("delete", "poddisruptionbudget", "keep")
    if took < DEADLINE_SECONDS:
        raise TestError(f"the drain ended after {took:.1f} s, before its deadline, although no eviction was allowed")
    new = _next(bench, old)
    _drained(bench, gpu)
    _elsewhere(bench, new, gpu)
    time.sleep(DEADLINE_SECONDS)
    _lives(bench, new)
    _back_in_use(bench, gpu)
    return f"drained_within_s={took:.0f}"


def without_gpu(bench: Bench) -> str:
    """The next pod of the name holds no GPU, and nothing keeps that of the last one."""
    return _without_gpu(bench, DELETE)


def without_gpu_or_api_server(bench: Bench) -> str:
    """The same for a Berth that learns of pods only from the kubelet."""
    return _without_gpu(bench, DRAIN_WITHOUT_API_SERVER)


def moved_without_api_server(bench: Bench) -> str:
    """The kubelet's `List` shows the name alone; its checkpoint must tell the two pods apart."""
    return _moved(bench, DRAIN_WITHOUT_API_SERVER)


def moved_over_restarts(bench: Bench) -> str:
    """Berth and the kubelet start again while the next pod of the name is the only one."""
    gpu, new = _move(bench)
    bench.berth.crash()
    bench.node.kubelet.stop()
    bench.node.kubelet.start()
    bench.berth.start()
    bench.node.cluster.ready()
    _lives(bench, new)
    return _drains(bench, gpu, *DRAIN_WITHOUT_API_SERVER)


def _moved(bench: Bench, order: tuple[str, ...]) -> str:
    """A StatefulSet whose pod leaves its GPU, and the drain of that one."""
    bench.shared = Worker(bench, "web", "StatefulSet")
    bench.shared.runs()
    gpu, _ = _move(bench)
    return _drains(bench, gpu, *order)


def _move(bench: Bench) -> tuple[str, Pod]:
    """The pod's GPU is cordoned and the pod deleted. Returns the GPU, and the next pod of the name, which has another one."""
    old = bench.running[-1]
    (gpu,) = bench.gpus_seen(old, "main")
    bench.berth.cli("gpu", "cordon", gpu, "--reason", "e2e")
    bench.node.cluster.kubectl("delete", "pod", old.name, "--wait=false")
    new = _next(bench, old)
    _elsewhere(bench, new, gpu)
    return gpu, new


def _next(bench: Bench, old: Pod) -> Pod:
    new = bench.shared.runs(other_than=old)
    if new.name != old.name or new.uid == old.uid:
        raise TestError(f"after {old.name} ({old.uid}) came {new.name} ({new.uid}), and not the next pod of the name")
    return new


def _elsewhere(bench: Bench, pod: Pod, gpu: str) -> None:
    if gpu in bench.gpus_seen(pod, "main"):
        raise TestError(f"{pod.name} ({pod.uid}) is on {gpu}, which grants nothing new")


def _drains(bench: Bench, gpu: str, *order: str) -> str:
    """Drains a GPU that the running pod does not hold: the command ends, and the pod notices nothing."""
    pod = bench.running[-1]
    before = container_ids(bench.node.running(pod))
    begin = time.monotonic()
    bench.berth.cli("gpu", "drain", gpu, *order, seconds=DRAINED_SECONDS)
    took = time.monotonic() - begin
    _drained(bench, gpu)
    if container_ids(bench.node.running(pod)) != before:
        raise TestError(f"{pod.name} was started again by the drain of a GPU that it does not hold")
    _lives(bench, pod)
    _back_in_use(bench, gpu)
    return f"drained_within_s={took:.0f}"


def _drained(bench: Bench, gpu: str) -> None:
    if bench.berth.drain(gpu) != "drained":
        raise TestError(f"`berth gpu drain --wait` ended, and {gpu} is {bench.berth.drain(gpu)}")


def _lives(bench: Bench, pod: Pod) -> None:
    """It is the pod of its name, alive, and no order deletes it."""
    shown = bench.node.cluster.pod(pod.name)["metadata"]
    if shown["uid"] != pod.uid or "deletionTimestamp" in shown:
        raise TestError(f"{pod.name} ({pod.uid}) is deleted: the API server shows {shown['uid']}")
    pod.beats("main", 30)


def _outlives_deadline(bench: Bench, begin: float) -> None:
    """Nothing happens to the running pod at the deadline of a drain that was ordered at `begin`, even if it ended before."""
    time.sleep(max(0.0, begin + 2 * DEADLINE_SECONDS - time.monotonic()))
    _lives(bench, bench.running[-1])


def _back_in_use(bench: Bench, gpu: str) -> None:
    bench.berth.cli("gpu", "uncordon", gpu)
    bench.allocatable({WHOLE: bench.berth.setup.gpus}, 30)


def _without_gpu(bench: Bench, order: tuple[str, ...]) -> str:
    old = bench.running[-1]
    (gpu,) = bench.gpus_seen(old, "main")
    bench.berth.cli("gpu", "cordon", gpu, "--reason", "e2e")
    bench.shared.give_back_gpu()
    new = _next(bench, old)
    if "NVIDIA_VISIBLE_DEVICES" in new.environment("main"):
        raise TestError(f"{new.name} asks for no GPU and has {new.environment('main')['NVIDIA_VISIBLE_DEVICES']}")
    begin = time.monotonic()
    took = _drains(bench, gpu, *order)
    if order == DELETE:
        _outlives_deadline(bench, begin)
    left = bench.berth.allocations()
    if left:
        raise TestError(f"no pod holds a GPU, and the API shows {[a.same() for a in left]}")
    return took


def short_pods(bench: Bench) -> str:
    """Jobs of short pods go on while one GPU of two drains with eviction: no new pod is on it, and the drain ends."""
    return _short_pods(bench, *DRAIN[:-1])


def short_pods_without_api_server(bench: Bench) -> str:
    """The same where Berth learns late that a pod has ended: the kubelet may offer the device for the next one before."""
    return _short_pods(bench, "--deadline", "10m")


def _short_pods(bench: Bench, *order: str) -> str:
    pods = ShortPods(bench, JOBS)
    bench.at_end.append(pods.stop)
    until("short pods run", 120, lambda: len(pods.seen()) >= SHORT_PODS)
    _, gpu = pods.seen()[-1]
    bench.berth.cli("gpu", "drain", gpu, *order)
    begin, marked = time.monotonic(), time.time()
    # A grant of before the mark may reach the kubelet's checkpoint, and its container, later.
    time.sleep(1)
    before = {uid for uid, seen in pods.seen() if seen == gpu} | granted_on(gpu)
    first = len(pods.seen())

    def drained() -> bool:
        _grants_nothing(bench, pods, gpu, before, marked)
        if bench.berth.drain(gpu) != "drained":
            raise TestError(f"it is {bench.berth.drain(gpu)}")
        return True

    until(f"{gpu} is drained while short pods come and go", DRAINED_SECONDS, drained, every=0.5)
    took = time.monotonic() - begin
    while time.monotonic() < begin + took + BESIDE_SECONDS:
        _grants_nothing(bench, pods, gpu, before, marked)
        time.sleep(0.5)
    count, refused = len(pods.seen()) - first, pods.refused()
    if bench.berth.setup.gpus > 1 and count < SHORT_PODS:
        raise TestError(f"only {count} pods have run beside the drain, so this case shows nothing")
    pods.stop()
    bench.berth.cli("gpu", "uncordon", gpu)
    bench.allocatable({WHOLE: bench.berth.setup.gpus}, 30)
    after = [bench.pod(f"after-{n}", {"main": 1}) for n in range(bench.berth.setup.gpus)]
    bench.start(*after)
    if gpu not in [seen for pod in after for seen in bench.gpus_seen(pod, "main")]:
        raise TestError(f"{gpu} is in use again, and none of {len(after)} pods got it")
    return f"drained_within_s={took:.0f} pods_beside={count} refused={refused}"


def _grants_nothing(bench: Bench, pods: ShortPods, gpu: str, before: set[str], marked: float) -> None:
    """No pods but the earlier ones are on the GPU, by what the pods wrote and by what Berth's API shows."""
    late = {uid for uid, seen in pods.seen() if seen == gpu} - before
    if late:
        raise Hopeless(f"pods {late} were started on {gpu} after it was drained")
    granted_late = [a for a in bench.berth.granted_on(gpu) if a.granted > marked]
    if granted_late:
        raise Hopeless(f"{gpu} was granted while it drained: {[a.same() for a in granted_late]}")


def contested(bench: Bench) -> str:
    """While an Allocate is on its way, another pod ends and the kubelet counts its devices again (kubernetes#137534): it takes
    the device of the Allocate for a free one, and gives it to the next pod, too."""
    for n in range(1, TRIES + 1):
        first, second = _give_to_two(bench, n)
        if second is not None:
            break
        _start_over(bench)
    else:
        raise TestError(f"the kubelet gave no GPU to two pods in {TRIES} tries")
    bench.running = [first, second]
    (gpu,) = first.environment("main")["NVIDIA_VISIBLE_DEVICES"].split(",")
    bench.shared = gpu
    # Each pod is found by its own name, with the same GPU.
    held = [bench.allocation(pod, "main") for pod in bench.running]
    if any(a.gpus != {gpu} for a in held) or held[0].id == held[1].id:
        raise TestError(f"the API shows {[a.same() for a in held]}, and both pods have {gpu}")
    for pod in bench.running:
        until(f"an event GPUContested of {pod.name}", 60, lambda pod=pod: _names_both(bench, pod))

    def warned() -> bool:
        passed, says = bench.berth.check("holders")
        if not passed or not all(f"{NAMESPACE}/{pod.name}" in says for pod in bench.running):
            raise TestError(f"the check holders says {says!r}")
        return True

    until("the check `holders` names both pods", 30, warned)
    shown = {event.get("allocation") for event in bench.berth.events("allocationContested")}
    if not {a.id for a in held} <= shown:
        raise TestError(f"the history has events of {shown}, and not of {[a.id for a in held]}")
    return f"tries={n}"


def contest_over(bench: Bench) -> None:
    """One of the two pods is deleted, as the event says: the warning is over, and the other one keeps the GPU."""
    first, second = bench.running
    bench.node.delete(first)
    bench.running.remove(first)

    def quiet() -> bool:
        passed, says = bench.berth.check("holders")
        if not passed or says:
            raise TestError(f"the check holders says {says!r}")
        return True

    until("the check `holders` is quiet", 60, quiet)
    if bench.gpus_seen(second, "main") != [bench.shared]:
        raise TestError(f"{second.name} has lost {bench.shared}")
    second.beats("main")
    bench.equals_truth(30)


def _give_to_two(bench: Bench, n: int) -> tuple[Pod, Pod | None]:
    """One try. Returns the first pod, and the second one if it was given the device of the first."""
    # It ends when the test says so, long after it was deleted.
    wait = "trap 'touch /e2e/leaving; until [ -e /e2e/leave ]; do sleep 0.05; done; exit 0' TERM"
    ends = bench.pod(f"ends-{n}", {"main": 1}, extra=wait)
    bench.start(ends)
    (other,) = bench.gpus_seen(ends, "main")
    # So that Berth does not choose it for the second pod.
    bench.berth.cordon(other)
    bench.node.cluster.kubectl("delete", "pod", ends.name, "--grace-period=120", "--wait=false")
    ends.wrote("leaving")
    first, second = bench.pod(f"first-{n}", {"main": 1}), bench.pod(f"second-{n}", {"main": 1})
    with disk.armed():
        bench.node.run(first)
        disk.wait_for_write(60)
    (ends.folder / "leave").touch()
    while disk.is_writing():
        call(bench.node.kubelet.pod_resources, LIST)
        time.sleep(0.05)
    bench.running.remove(ends)
    bench.node.gone(ends)
    try:
        bench.node.running(first)
        bench.node.run(second)
        bench.node.running(second, 20)
    except TestError:
        # Berth's disk was too slow, or the kubelet was late, or the API server knows of the cordon already.
        return first, None
    devices = [granted(pod.uid, "main") for pod in (first, second)]
    return first, second if devices[0] & devices[1] else None


def _start_over(bench: Bench) -> None:
    """Ends all pods of a try."""
    bench.node.cluster.empty()
    bench.running.clear()
    for gpu in bench.berth.gpus():
        bench.berth.uncordon(gpu)
    until("all allocations have ended", 60, lambda: not bench.berth.allocations())
    bench.allocatable({WHOLE: bench.berth.setup.gpus}, 30)


def _names_both(bench: Bench, pod: Pod) -> bool:
    """Whether a warning of the pod, by its UID, names both pods."""
    shown = json.loads(bench.node.cluster.kubectl("get", "events", "--field-selector=reason=GPUContested", "-o", "json"))
    mine = [e for e in shown["items"] if e["involvedObject"].get("uid") == pod.uid]
    names = [f"{NAMESPACE}/{p.name}" for p in bench.running]
    for event in mine:
        if event["type"] != "Warning" or not all(name in event["message"] for name in names):
            raise TestError(f"it says {event['type']}: {event['message']}")
    if not mine:
        raise TestError(f"there are {[(e['involvedObject'], e['message']) for e in shown['items']]}")
    return True


_NEXT = "the next pod of a StatefulSet"

SCENARIOS = [
    Scenario(
        "same name",
        Setup(gpus=2, api_server=True),
        {
            f"{_NEXT} has another GPU: a drain of the first one with eviction ends, the pod lives": moved,
            f"{_NEXT} has another GPU: a drain that deletes at its deadline spares it": moved_and_deleted,
            f"{_NEXT} comes while a drain with eviction goes on: it has another GPU, and the drain ends": evicted,
            f"{_NEXT} comes after a drain deleted the last one at its deadline: it lives": deleted_at_deadline,
            f"{_NEXT} asks for no GPU: a drain of the last one's GPU ends, the pod lives": without_gpu,
        },
        cluster=True,
    ),
    Scenario(
        "same name without the API server",
        Setup(gpus=2),
        {
            f"without the API server: {_NEXT} has another GPU, and a drain of the first one ends": moved_without_api_server,
            "the same over kill -9 of berth and a restart of the kubelet": moved_over_restarts,
            f"without the API server: {_NEXT} asks for no GPU, and a drain of the last one's ends": without_gpu_or_api_server,
        },
        cluster=True,
    ),
    Scenario(
        "short pods",
        Setup(gpus=2, api_server=True),
        {"jobs of short pods beside a drain with eviction: none gets the draining GPU, and the drain ends": short_pods},
        cluster=True,
    ),
    Scenario(
        "short pods on one GPU",
        Setup(gpus=1, api_server=True),
        {"jobs of short pods on the only GPU, which drains: none gets it, and the drain ends": short_pods},
        cluster=True,
    ),
    Scenario(
        "short pods without the API server",
        Setup(gpus=2),
        {"without the API server: none of the short pods gets the draining GPU": short_pods_without_api_server},
        cluster=True,
    ),
    Scenario(
        "two pods",
        Setup(gpus=2, api_server=True, slow_disk=True, slow_status=True),
        {
            "the kubelet gives one GPU to two pods: an event of each, a check, and both are found by name": contested,
            "one of the two pods is deleted: the warning is over, the other one keeps the GPU": contest_over,
        },
        cluster=True,
    ),
]
