"""Cases on a full node: etcd, API server, scheduler and controller manager beside the kubelet, pods made by kubectl."""

from __future__ import annotations

import json
import time

from bench import Bench
from berth import SHARED, WHOLE, Setup, gpu_of
from kubelet import healthy
from pods import NAMESPACE, Pod
from say import TestError, until
from scenario import Scenario

#: A pod that waits is tried again when the node changes, at the latest when its back-off of 10 s is over.
SCHEDULE_SECONDS = 60
#: Two rounds 5 s apart, 30 s after the grant, and until the scheduler has heard of it.
FREED_SECONDS = 60
#: The kubelet writes its status every second; an id that leaves the list would be shown for 60 s.
FIRST_LIST_SECONDS = 10
#: How long nothing may be withdrawn; the kubelet writes its status every second.
STAYS_SECONDS = 5
#: Quiet time of the fault cases, and how much later at most the GPU is back.
QUIET_SECONDS = 10
BACK_SECONDS = 20


def first_list(bench: Bench) -> None:
    """On a new node the kubelet is shown the stack's devices from its first list on, and no other resource."""
    resource, wanted = bench.resource, bench.berth.setup.gpus * bench.berth.setup.shares
    end = time.monotonic() + FIRST_LIST_SECONDS
    capacity = 0
    while time.monotonic() < end:
        capacity = bench.node.cluster.capacity(resource)
        # None until the kubelet writes its first status with them.
        if capacity not in (0, wanted):
            raise TestError(f"the node has {capacity} {resource}, the stack offers {wanted}")
        time.sleep(0.2)
    if capacity != wanted:
        raise TestError(f"the node has {capacity} {resource} after {FIRST_LIST_SECONDS} s, the stack offers {wanted}")
    bench.allocatable({resource: wanted})
    foreign = [r for r in (WHOLE, SHARED) if r != resource and bench.node.kubelet.registrations_ms(r)]
    if foreign:
        raise TestError(f"resources {foreign} were registered, but the stack does not offer them")
    pod = bench.pod("first", {"main": 4})
    bench.start(pod)
    bench.gpus_seen(pod, "main")


def both(bench: Bench) -> None:
    """Each GPU is listed whole and as shares; what is held takes the rest from the scheduler's view."""
    bench.allocatable({WHOLE: 2, SHARED: 8})
    whole = bench.pod("whole", {"main": 1})
    bench.start(whole)
    taken = set(bench.gpus_seen(whole, "main"))
    # Held, and the other one; the shares of the other one.
    bench.allocatable({WHOLE: 2, SHARED: 4})
    shares = [bench.pod(f"share-{n}", {"main": 1}, resource=SHARED) for n in range(4)]
    bench.start(*shares)
    for pod in shares:
        if taken & set(bench.gpus_seen(pod, "main")):
            raise TestError(f"{pod.name} has a share of the GPU that {whole.name} holds whole")
    bench.allocatable({WHOLE: 1, SHARED: 4})
    second, fifth = bench.pod("whole-2", {"main": 1}), bench.pod("share-5", {"main": 1}, resource=SHARED)
    bench.waits(second)
    bench.waits(fifth)
    bench.equals_truth(FREED_SECONDS)
    _delete(bench, shares[0])
    _runs_at_last(bench, fifth)
    bench.node.cluster.kubectl("delete", "pod", second.name)
    _delete(bench, whole)
    bench.allocatable({WHOLE: 1, SHARED: 8}, FREED_SECONDS)
    third = bench.pod("whole-3", {"main": 1})
    bench.start(third)
    if set(bench.gpus_seen(third, "main")) != taken:
        raise TestError(f"{third.name} should have {taken}, the only GPU without shares")
    bench.equals_truth(FREED_SECONDS)
    bench.no_pod_failed()


def latched(bench: Bench) -> str:
    """Each GPU is listed in one mode, so pods that come all at once are never promised one GPU twice."""
    bench.allocatable({WHOLE: 2, SHARED: 4})
    wholes = [bench.pod(f"whole-{n}", {"main": 1}) for n in range(2)]
    shares = [bench.pod(f"share-{n}", {"main": 1}, resource=SHARED) for n in range(4)]
    bench.start(*wholes, *shares)
    whole_gpus = {gpu for pod in wholes for gpu in bench.gpus_seen(pod, "main")}
    for pod in shares:
        if whole_gpus & set(bench.gpus_seen(pod, "main")):
            raise TestError(f"{pod.name} has a share of a GPU that is held whole")
    fifth = bench.pod("share-5", {"main": 1}, resource=SHARED)
    bench.waits(fifth)
    begin = time.monotonic()
    for pod in wholes:
        _delete(bench, pod)
    _runs_at_last(bench, fifth)
    took = time.monotonic() - begin
    if not set(bench.gpus_seen(fifth, "main")) <= whole_gpus:
        raise TestError(f"{fifth.name} sees {bench.gpus_seen(fifth, 'main')}; the idle GPUs were {whole_gpus}")
    bench.allocatable({WHOLE: 1, SHARED: 8}, FREED_SECONDS)
    bench.equals_truth(FREED_SECONDS)
    bench.no_pod_failed()
    return f"changed_over_within_s={took:.0f}"


def cordon(bench: Bench) -> None:
    pods = [bench.pod(f"share-{n}", {"main": 1}) for n in range(2)]
    bench.start(*pods)
    gpu, other = (bench.gpus_seen(pod, "main")[0] for pod in pods)
    if gpu == other:
        raise TestError(f"two shares lie on one GPU of two: {gpu}")
    bench.allocatable({SHARED: 8})
    before = bench.picture()
    bench.berth.cli("gpu", "cordon", gpu, "--reason", "fan replacement")
    # Four of the other GPU, and the one that is held.
    bench.allocatable({SHARED: 5})
    bench.unchanged(before)
    late = [bench.pod(f"late-{n}", {"main": 1}) for n in range(3)]
    bench.start(*late)
    for pod in late:
        if bench.gpus_seen(pod, "main") != [other]:
            raise TestError(f"{pod.name} was given a share of the cordoned GPU")
    waiting = bench.pod("waiting", {"main": 1})
    bench.waits(waiting)
    bench.berth.cli("gpu", "uncordon", gpu)
    _runs_at_last(bench, waiting)
    if bench.gpus_seen(waiting, "main") != [gpu]:
        raise TestError(f"{waiting.name} should be on {gpu}, where the only free shares are")
    bench.allocatable({SHARED: 8})
    bench.equals_truth(HOLDER_SECONDS)
    bench.no_pod_failed()


def nothing_to_roll_back(bench: Bench) -> None:
    """Only the file's stack has ever been active: a rollback is refused, and withdraws no device from under the pods."""
    before, stack = bench.picture(), bench.berth.stack()
    for command in (("policy", "rollback"), ("policy", "rollback", "--dry-run")):
        said = bench.berth.fails(*command)
        if "nothing to roll back to" not in said:
            raise TestError(f"berth {' '.join(command)} says {said.strip()}")
    end = time.monotonic() + STAYS_SECONDS
    while time.monotonic() < end:
        now = bench.node.cluster.allocatable(SHARED), bench.node.cluster.capacity(SHARED)
        if now != (8, 8) or len(healthy(SHARED)) != 8:
            raise TestError(f"the node has {now} and the kubelet {len(healthy(SHARED))} devices after a refused rollback")
        time.sleep(0.2)
    if bench.berth.stack() != stack:
        raise TestError(f"the stack was {stack}, and is {bench.berth.stack()}")
    bench.unchanged(before)


def dead_gpu_and_word(bench: Bench) -> str:
    """XID 79 takes all shares of a GPU; mark-healthy brings them back."""
    victim = bench.running[0]
    (gpu,) = bench.gpus_seen(victim, "main")
    waiting, took = _kill(bench, gpu, "after-word")
    bench.berth.cli("gpu", "mark-healthy", gpu, "--reason", "reseated")
    bench.allocatable({SHARED: 8})
    _runs_at_last(bench, waiting)
    if bench.gpus_seen(waiting, "main") != [gpu]:
        raise TestError(f"{waiting.name} should be on {gpu}, where the only free shares are")
    _health_in_pod(bench, victim, "Healthy")
    bench.no_pod_failed()
    return f"left_allocatable_after_s={took:.1f}"


def dead_gpu_and_quiet(bench: Bench) -> str:
    """The same, and it comes back by itself after the quiet time."""
    (gpu,) = bench.gpus_seen(bench.running[0], "main")
    begin = time.monotonic()
    waiting, took = _kill(bench, gpu, "after-quiet")
    bench.allocatable({SHARED: 8}, QUIET_SECONDS + BACK_SECONDS)
    back = time.monotonic() - begin
    if back < QUIET_SECONDS:
        raise TestError(f"the GPU was back after {back:.1f} s, before its quiet time of {QUIET_SECONDS} s was over")
    _runs_at_last(bench, waiting)
    bench.equals_truth(HOLDER_SECONDS)
    bench.no_pod_failed()
    return f"left_allocatable_after_s={took:.1f} back_after_s={back:.1f}"


def _kill(bench: Bench, gpu: str, newcomer: str) -> tuple[Pod, float]:
    """Lets a GPU report XID 79. Returns a pod that waits for it, and when the scheduler knew."""
    before = bench.picture()
    begin = time.monotonic()
    bench.berth.fake.xid(gpu, 79)
    bench.allocatable({SHARED: 4})
    took = time.monotonic() - begin
    left = {gpu_of(device) for device in healthy(bench.resource)}
    if gpu in left:
        raise TestError(f"the kubelet holds a share of {gpu} for healthy")
    bench.unchanged(before)
    for pod in bench.running:
        dead = bench.gpus_seen(pod, "main") == [gpu]
        _health_in_pod(bench, pod, "Unhealthy" if dead else "Healthy")
    waiting = bench.pod(newcomer, {"main": 1})
    bench.waits(waiting)
    return waiting, took


def _health_in_pod(bench: Bench, pod: Pod, health: str) -> None:
    """The pod's own status says how its devices are (`allocatedResourcesStatus`)."""

    def look() -> bool:
        statuses = bench.node.cluster.pod(pod.name)["status"]["containerStatuses"]
        said = [r["health"] for s in statuses for a in s.get("allocatedResourcesStatus", []) for r in a["resources"]]
        if said != [health]:
            raise TestError(f"it says {said}")
        return True

    until(f"the status of {pod.name} says {health}", 30, look)


def crashed(bench: Bench) -> None:
    """Its container is started again, on the same devices, without a new grant."""
    names = {"crashes": "Always", "stays": "Always", "finishes": "Never", "fails": "Never", "forced": "Always"}
    pods = [bench.pod(name, {"main": 1}, restart=restart) for name, restart in names.items()]
    pods.append(bench.pod("evicted", {"main": 1}, labels={"e2e": "evicted"}))
    bench.start(*pods)
    # The later cases end these one by one; by then each has been granted for longer than 30 s.
    bench.shared = {pod.name: pod for pod in pods}
    pod = bench.shared["crashes"]
    seen = bench.gpus_seen(pod, "main")
    before = bench.allocation(pod, "main").same()
    bench.crash(pod, "main")
    if bench.gpus_seen(pod, "main") != seen or bench.allocation(pod, "main").same() != before:
        raise TestError(f"{pod.name} had {seen} by {before}; now {bench.allocation(pod, 'main').same()}")
    bench.equals_truth(HOLDER_SECONDS)


def deleted(bench: Bench) -> str:
    """Deleted as soon as it runs: the longest way, since nothing ends within 30 s of its grant."""
    pod = bench.pod("deleted", {"main": 2})
    bench.start(pod)
    bench.equals_truth(HOLDER_SECONDS)
    bench.node.cluster.kubectl("delete", "pod", pod.name)
    bench.node.gone(pod)
    return bench.ends(pod)


def finished(bench: Bench) -> str:
    """Its container ends with 0, and the pod stays to be looked at, without its GPU."""
    pod = bench.shared["finishes"]
    pod.end("main", 0)
    bench.node.ended(pod, "Succeeded")
    return bench.ends(pod)


def failed(bench: Bench) -> str:
    """Its container ends with 1 and is not started again."""
    pod = bench.shared["fails"]
    pod.end("main", 1)
    bench.node.ended(pod, "Failed")
    return bench.ends(pod)


def force_deleted(bench: Bench) -> str:
    """The API server forgets it at once, its container lives on until the kubelet has ended it."""
    pod = bench.shared["forced"]
    bench.node.cluster.kubectl("delete", "pod", pod.name, "--force", "--grace-period=0")
    bench.node.gone(pod)
    return bench.ends(pod)


def evicted(bench: Bench) -> str:
    """By the Eviction API, as `kubectl drain` does it."""
    pod = bench.shared["evicted"]
    cluster = bench.node.cluster
    said = cluster.kubectl("drain", cluster.name, "--pod-selector=e2e=evicted", "--force", "--timeout=60s")
    if "evicting pod" not in said:
        raise TestError(f"kubectl drain evicted nothing: {said.strip()}")
    cluster.kubectl("uncordon", cluster.name)
    bench.node.gone(pod)
    return bench.ends(pod)


def kubelet_restarted(bench: Bench) -> str:
    """Its pods are those of the API server, which it hears of after it has started: by then berth must be there again."""
    before = bench.picture()
    kubelet = bench.node.kubelet
    kubelet.stop()
    kubelet.start()
    took = until("berth registers again", 30, lambda: kubelet.registrations_ms(bench.resource), every=0.02)[0]
    bench.node.cluster.ready()
    bench.allocatable({WHOLE: bench.berth.setup.gpus})
    bench.unchanged(before)
    pod = bench.pod("after-kubelet", {"main": 1})
    bench.start(pod)
    bench.equals_truth(HOLDER_SECONDS)
    bench.no_pod_failed()
    return f"registered_after_ms={took:.0f}"


def berth_away(bench: Bench) -> str:
    """Berth is down while one pod goes and another one comes."""
    goes = bench.running[-1]
    bench.berth.stop()
    bench.allocatable({WHOLE: 0})
    bench.node.cluster.kubectl("delete", "pod", goes.name)
    bench.node.gone(goes)
    bench.running.remove(goes)
    comes = bench.pod("comes", {"main": 1})
    bench.waits(comes)
    bench.berth.start()
    _runs_at_last(bench, comes)
    took = bench.ends(goes)
    bench.no_pod_failed()
    return took


def kubelet_away(bench: Bench) -> str:
    """The kubelet is down while its pod is deleted by force: the container runs on, and ends when the kubelet is back."""
    pod = bench.running[-1]
    bench.node.kubelet.stop()
    bench.node.cluster.kubectl("delete", "pod", pod.name, "--force", "--grace-period=0")
    pod.beats("main")
    bench.node.kubelet.start()
    bench.node.cluster.ready()
    bench.node.gone(pod)
    # The kubelet forgets the pod before its container has ended.
    until(f"the container of {pod.name} ends", 60, lambda: not pod.alive("main"))
    return bench.ends(pod)


def drained(bench: Bench) -> str:
    """Without the API server Berth evicts no pod: it cordons, watches the pod leave, and reports when the GPU is empty."""
    pod = bench.running[0]
    (gpu,) = bench.gpus_seen(pod, "main")
    free = bench.berth.setup.gpus
    bench.berth.cli("gpu", "drain", gpu, "--deadline", "10m")
    if bench.berth.drain(gpu) != "draining":
        raise TestError(f"{gpu} is {bench.berth.drain(gpu)} while {pod.name} holds it")
    pod.beats("main")
    bench.node.cluster.kubectl("delete", "pod", pod.name)
    bench.node.gone(pod)
    begin = time.monotonic()
    said = bench.berth.cli("gpu", "drain", gpu, "--wait", seconds=120)
    if bench.berth.drain(gpu) != "drained":
        raise TestError(f"`berth gpu drain --wait` ended, and the GPU is {bench.berth.drain(gpu)}: {said.strip()}")
    took = time.monotonic() - begin
    bench.running.remove(pod)
    bench.equals_truth(1)
    bench.allocatable({WHOLE: free - 1})
    bench.berth.cli("gpu", "uncordon", gpu)
    bench.allocatable({WHOLE: free})
    return f"drained_within_s={took:.0f}"


def labelled(bench: Bench) -> str:
    """Pods find the node by what its GPUs are, with the names and values that GPU feature discovery has taught them."""
    wanted = {f"{WHOLE}.product": "NVIDIA-H100-80GB-HBM3", f"{WHOLE}.count": "2", f"{WHOLE}.memory": "81559"}
    _labels(bench, {**wanted, f"{WHOLE}.replicas": "1"})
    here = bench.pod("here", {"main": 1}, on=wanted)
    bench.start(here)
    bench.gpus_seen(here, "main")
    elsewhere = bench.pod("elsewhere", {"main": 1}, on={f"{WHOLE}.product": "NVIDIA-L4"})
    bench.node.run(elsewhere)

    def unschedulable() -> bool:
        shown = bench.node.cluster.pod(elsewhere.name)["status"]
        said = [c.get("message", "") for c in shown.get("conditions", []) if c.get("reason") == "Unschedulable"]
        return any("node affinity" in text for text in said)

    until("the scheduler says that no node has an L4", 30, unschedulable)
    return f"product={wanted[f'{WHOLE}.product']}"


def labels_follow(bench: Bench) -> None:
    """Another stack is another label, and a pod that waits for it comes."""
    shares = {f"{WHOLE}.replicas": "4", f"{WHOLE}.sharing-strategy": "time-slicing"}
    waiting = bench.pod("shares", {"main": 1}, resource=SHARED, on=shares)
    bench.node.run(waiting)
    bench.berth.share(4)
    _labels(bench, shares)
    _runs_at_last(bench, waiting)
    bench.no_pod_failed()


def labels_stand_back(bench: Bench) -> None:
    """GPU feature discovery signs with a timestamp: where that is, Berth's labels go, and what others wrote stays."""
    kubectl, name = bench.node.cluster.kubectl, bench.node.cluster.name
    stamp, product = "nvidia.com/gfd.timestamp", f"{WHOLE}.product"
    kubectl("label", "node", name, f"{stamp}=1700000000", "e2e/kept=yes")
    # It checks when its own labels change, and every quarter of an hour.
    bench.berth.share(3)
    until("Berth's labels are gone", 90, lambda: product not in bench.node.cluster.node()["metadata"]["labels"])
    left = bench.node.cluster.node()["metadata"]["labels"]
    if left.get("e2e/kept") != "yes" or stamp not in left:
        raise TestError(f"the node has the labels {left}")
    kubectl("label", "node", name, f"{stamp}-", "e2e/kept-")
    bench.berth.share(4)
    _labels(bench, {f"{WHOLE}.replicas": "4"}, 90)


def configured(bench: Bench) -> None:
    """Two files of NVIDIA's plugin in a ConfigMap; without the label, `default` is the node's."""
    cluster = bench.node.cluster
    drafts = bench.logs / "nvidia-configs"
    drafts.mkdir(exist_ok=True)
    files = []
    for name, config in _NVIDIA_CONFIGS.items():
        # JSON is YAML.
        (drafts / name).write_text(json.dumps(config, indent=1), encoding="utf-8")
        files.append(f"--from-file={name}={drafts / name}")
    cluster.kubectl("create", "configmap", _CONFIGS, *files)
    bench.at_end.append(lambda: cluster.kubectl("delete", "configmap", _CONFIGS))
    bench.at_end.append(lambda: cluster.kubectl("label", "node", cluster.name, f"{_CONFIG_LABEL}-"))
    # What the chart adds to the first role where it renders `config.map`.
    cluster.kubectl("create", "clusterrole", "berth-configs", "--verb=watch", "--resource=nodes")
    cluster.kubectl("create", "clusterrolebinding", "berth-configs", "--clusterrole=berth-configs", "--user=berth")
    bench.berth.mount_configs(cluster.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{_CONFIGS}")["data"])
    bench.berth.start()
    bench.allocatable({WHOLE: 2})
    whole = bench.pod("whole", {"main": 1})
    bench.start(whole)
    bench.equals_truth(HOLDER_SECONDS)


def reconfigured(bench: Bench) -> str:
    """Another label, and the other file is in force: the same process, the same allocations, no pod notices."""
    kubectl, name = bench.node.cluster.kubectl, bench.node.cluster.name
    (taken,) = bench.gpus_seen(bench.running[0], "main")
    before, pid, begin = bench.picture(), bench.berth.pid, time.monotonic()
    # The held GPU stays whole, the other one is cut into shares.
    kubectl("label", "node", name, f"{_CONFIG_LABEL}=shared")
    # Where the right to watch the node is not in force at the first try, it is tried again after 30 s.
    bench.allocatable({WHOLE: 1, SHARED: 4}, 90)
    took = time.monotonic() - begin
    bench.unchanged(before)
    # A name that is no key of the ConfigMap changes nothing.
    kubectl("label", "node", name, f"{_CONFIG_LABEL}=nothing", "--overwrite")
    shares = [bench.pod(f"share-{n}", {"main": 1}, resource=SHARED) for n in range(4)]
    bench.start(*shares)
    for pod in shares:
        if taken in bench.gpus_seen(pod, "main"):
            raise TestError(f"{pod.name} has a share of the GPU that is held whole")
    bench.equals_truth(HOLDER_SECONDS)
    if bench.berth.pid != pid:
        raise TestError("berth's PID changed: the process was replaced")
    bench.no_pod_failed()
    return f"in_force_after_s={took:.1f}"


def _labels(bench: Bench, wanted: dict[str, str], seconds: float = 30) -> None:
    def look() -> bool:
        shown = bench.node.cluster.node()["metadata"]["labels"]
        seen = {key: shown.get(key) for key in wanted}
        if seen != wanted:
            raise TestError(f"they are {seen}")
        return True

    until(f"the node has the labels {wanted}", seconds, look)


def _delete(bench: Bench, pod: Pod) -> None:
    bench.node.cluster.kubectl("delete", "pod", pod.name, "--wait=false")
    bench.running.remove(pod)


def _runs_at_last(bench: Bench, pod: Pod) -> None:
    """A pod that waited is scheduled and runs."""
    bench.node.running(pod, SCHEDULE_SECONDS)
    bench.running.append(pod)


#: Names come with the first `List`; the rest is for a slow machine.
HOLDER_SECONDS = 20

_ENDS = {
    "a crashed container starts again on its GPU, without a new grant": crashed,
    "a pod deleted right after its start": deleted,
    "a pod that finishes": finished,
    "a pod that fails": failed,
    "a pod deleted by force": force_deleted,
    "an evicted pod": evicted,
    "restart of the kubelet under running pods": kubelet_restarted,
    "berth is down while a pod ends and another starts": berth_away,
    "the kubelet is down while a pod is deleted by force": kubelet_away,
}


#: By which NVIDIA's plugin chooses a node's file, and the ConfigMap with two of them.
_CONFIG_LABEL = "nvidia.com/device-plugin.config"
_CONFIGS = "gpu-configs"
_NVIDIA_CONFIGS = {
    "default": {"version": "v1", "flags": {"migStrategy": "none"}},
    "shared": {
        "version": "v1",
        "flags": {"migStrategy": "none", "plugin": {"deviceIDStrategy": "uuid"}},
        "sharing": {"timeSlicing": {"renameByDefault": True, "resources": [{"name": WHOLE, "replicas": 4}]}},
    },
}

SCENARIOS = [
    Scenario(
        "first list",
        Setup(gpus=8, shares=10, shares_as=WHOLE),
        {"a new node with ten shares a GPU has 80 devices from the first list on": first_list},
        cluster=True,
    ),
    Scenario(
        "first list, own name",
        Setup(gpus=8, shares=10),
        {"the same under a name of their own, and no other resource is registered": first_list},
        cluster=True,
    ),
    Scenario(
        "both",
        Setup(gpus=2, mixed="both"),
        {"mixed, both: kubectl's pods are scheduled by what is allocatable": both},
        cluster=True,
    ),
    Scenario(
        "latched",
        Setup(gpus=3, mixed="latched", api_server=True),
        {"mixed, latched: pods that come at once all run, and an idle GPU changes over": latched},
        cluster=True,
    ),
    Scenario(
        "allocatable",
        Setup(gpus=2, shares=4, quiet_seconds=QUIET_SECONDS),
        {
            "a cordoned GPU's free shares leave allocatable, pods are not affected": cordon,
            "`policy rollback` where nothing was activated is refused, and no device is withdrawn": nothing_to_roll_back,
            "XID 79 removes all shares from allocatable, mark-healthy brings them back": dead_gpu_and_word,
            "XID 79 again, and the GPU comes back after its quiet time": dead_gpu_and_quiet,
        },
        cluster=True,
    ),
    Scenario(
        "labels",
        Setup(gpus=2, api_server=True, labels=True),
        {
            "a pod with nodeAffinity on gpu.product runs, one for another product waits": labelled,
            "the node's labels follow the stack": labels_follow,
            "they are removed while GPU feature discovery writes its own, and written again": labels_stand_back,
        },
        cluster=True,
    ),
    Scenario(
        "configs",
        Setup(gpus=2, api_server=True, configs=True),
        {
            "NVIDIA's config file by ConfigMap: whole GPUs without the label": configured,
            "NVIDIA's config file by label: shares, and running pods are not affected": reconfigured,
        },
        cluster=True,
        berth_first=False,
    ),
    Scenario(
        "ends",
        Setup(gpus=8),
        {
            **{f"the API's list equals the truth: {name}": case for name, case in _ENDS.items()},
            "a drained GPU is empty when the command reports it": drained,
        },
        cluster=True,
    ),
    Scenario(
        "ends by the API server",
        Setup(gpus=8, api_server=True),
        {f"with the API server: {name}": case for name, case in _ENDS.items()},
        cluster=True,
    ),
]
