"""Tests of Kubernetes for the kubelet and for DRA (1.37.2: test/e2e_node/dra_test.go, test/e2e/dra/dra.go), and the examples of
kubernetes-sigs/dra-example-driver, rewritten so that Berth is the driver.

Where such a test orders its driver to fail or not to answer, the case here freezes or stops Berth, or drains the GPU.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.parse

from bench import Bench
from berth import WHOLE, Setup, write_cdi_spec
from dra import (
    CHANGES_SECONDS,
    DRIVER,
    PUBLISHED_SECONDS,
    SHARED_CLASS,
    create,
    create_claim,
    create_classes,
    device_request,
    gpus_seen,
    is_allocated,
    metadata_versions,
    move_all,
    pod_of,
    published_devices,
    start_pod,
    start_registered,
    start_with_claim,
    taints,
    until_published,
    until_registered,
    until_released,
)
from gpus import uuids
from kubelet import NODE_NAME
from pods import NAMESPACE, Container, Pod
from say import Hopeless, TestError, until
from scenario import Scenario

GPUS = 2
#: GPUs for a pod without a toleration, one with a toleration, and one that tolerates the taint for a time.
GPUS_OF_RULES = 3
#: How long a GPU stays unhealthy after an XID: long enough that the kubelet shows that, also on a busy machine.
QUIET_SECONDS = 20
#: The kubelet prepares a pod's claims again 60 to 90 s after a failure; a call lasts up to 45 s.
RETRY_SECONDS = 180
#: A call to the driver that gets no answer ends after 45 s.
NO_ANSWER_SECONDS = 60
#: How long the test watches a pod that must stay Pending.
WAITS_SECONDS = 20
#: The kubelet's limit for a stream of health without a message, and its next status.
UNKNOWN_SECONDS = 120
HEALTH_SECONDS = 60
#: How long the test watches that the health stays known: several times the kubelet's limit of 30 s without a message.
QUIET_STREAM_SECONDS = 120
#: The grace period of a pod that ignores SIGTERM.
GRACE_SECONDS = 15
#: How long a claim tolerates the taint of a rule.
TOLERATED_SECONDS = 15
EVICTED_SECONDS = 60
_RULES = "devicetaintrules.resource.k8s.io"
_XID = 79
#: The line of a container's shell that makes it ignore SIGTERM, so that the pod lives for its whole grace period.
_STUBBORN = "trap '' TERM"
_METADATA = "/var/run/kubernetes.io/dra-device-attributes"
_ANY_NO_SCHEDULE = [{"operator": "Exists", "effect": "NoSchedule"}]


def prefers_device_plugin(bench: Bench) -> None:
    """While the node has a GPU of each API, a pod that requests nvidia.com/gpu gets that of the device plugin, and no claim is
    created for it."""
    create_classes(bench)
    of_claims, of_plugin = sorted(bench.berth.gpus())
    bench.berth.cli("gpu", "via", of_claims, "dra", "--wait", seconds=3 * CHANGES_SECONDS)
    bench.allocatable({WHOLE: 1})
    pod = start_pod(bench, bench.pod("either", {"main": 1}))
    if gpus_seen(bench, pod) != [of_plugin]:
        raise TestError(f"{of_plugin} is granted by the device plugin, and the container has got {gpus_seen(bench, pod)}")
    if _extended_claim(bench, pod) or bench.berth.claims():
        raise TestError(f"there are claims: {_extended_claim(bench, pod)}, {bench.berth.claims()}")


def after_device_plugin(bench: Bench) -> None:
    """Once no GPU of the node is granted by the device plugin, the same pod gets one by a claim that the scheduler creates."""
    _empty(bench)
    move_all(bench)
    bench.allocatable({WHOLE: 0})
    pod = start_pod(bench, bench.pod("extended", {"main": 1}))
    claim = (_extended_claim(bench, pod) or {}).get("resourceClaimName")
    shown = bench.berth.claims()
    if set(shown) != {claim} or gpus_seen(bench, pod) != shown[claim]["gpus"]:
        raise TestError(f"the pod's status names {claim}, the container has {gpus_seen(bench, pod)}, the API shows {shown}")


def across_containers(bench: Bench) -> None:
    """Both containers that use a claim from a template see its GPU, which is granted once."""
    _empty(bench)
    _template(bench, "one-gpu", device_request())
    containers = [Container(name, {}, claims=("one-gpu",)) for name in ("left", "right")]
    pod = start_pod(bench, Pod("containers", containers, templates=("one-gpu",)))
    (shown,) = bench.berth.claims().values()
    seen = [gpus_seen(bench, pod, name) for name in ("left", "right")]
    if seen != [shown["gpus"]] * 2 or len(bench.berth.allocations()) != 1:
        raise TestError(f"the containers see {seen}, and the API shows {shown}")


def across_pods(bench: Bench) -> None:
    """Two pods that use one claim see its GPU, which is granted once, and the API names both. It is released after the last."""
    _empty(bench)
    create_claim(bench, "common")
    pods = [start_pod(bench, pod_of(f"common-{n}", "common")) for n in range(2)]
    shown = bench.berth.claims()["common"]
    seen = [gpus_seen(bench, pod) for pod in pods]
    if seen != [shown["gpus"]] * 2 or len(bench.berth.allocations()) != 1:
        raise TestError(f"the pods see {seen}, and the API shows {shown}")
    until("the API names both pods", CHANGES_SECONDS, lambda: len(bench.berth.claims()["common"]["claim"]["pods"]) == 2)
    bench.node.delete(pods[0])
    pods[1].beats("main")
    if bench.berth.claims()["common"]["id"] != shown["id"]:
        raise TestError("the claim is not held as before, although a pod uses it")
    bench.node.delete(pods[1])
    until_released(bench, EVICTED_SECONDS)


def drain_of_shared_claim(bench: Bench) -> str:
    """A drain evicts every pod of a claim, also one that began to use it later."""
    _empty(bench)
    create_claim(bench, "common")
    pods = [start_pod(bench, pod_of(f"common-{n}", "common")) for n in range(2)]
    (gpu,) = bench.berth.claims()["common"]["gpus"]
    begin = time.monotonic()
    bench.berth.cli("gpu", "drain", gpu, "--evict", "--wait", seconds=EVICTED_SECONDS)
    took = time.monotonic() - begin
    if left := [pod.name for pod in pods if _is_there(bench, pod)]:
        raise TestError(f"the GPU is said to be drained, and {left} are there")
    return f"drained_within_s={took:.1f}"


def first_available(bench: Bench) -> None:
    """The scheduler allocates the first alternative of a request that some GPU satisfies, and Berth grants it to the request."""
    _empty(bench)
    model = f"device.attributes['{DRIVER}'].productName"
    huge = f"device.capacity['{DRIVER}'].memory.compareTo(quantity('1Ti')) >= 0"
    wanted = {
        "falls-back": [_alternative("newer", f"{model} == 'none'"), _alternative("huge", huge), _alternative("any")],
        "prefers": [_alternative("same", f"{model}.startsWith('NVIDIA')"), _alternative("any")],
    }
    pods = []
    for name, alternatives in wanted.items():
        _template(bench, name, {"name": "gpu", "firstAvailable": alternatives})
        pods.append(start_pod(bench, _from_template(name, name)))
    chosen = {}
    seen = [gpus_seen(bench, pod) for pod in pods]
    for pod in pods:
        (claim,) = [one for one in _claims(bench) if one["metadata"]["ownerReferences"][0]["name"] == pod.name]
        (result,) = claim["status"]["allocation"]["devices"]["results"]
        chosen[pod.name] = result["request"]
        shown = bench.berth.claims()[claim["metadata"]["name"]]
        if shown["claim"]["request"] != result["request"] or gpus_seen(bench, pod) != shown["gpus"]:
            raise TestError(f"{pod.name} sees {gpus_seen(bench, pod)}, and the API shows {shown}")
    if chosen != {"falls-back": "gpu/any", "prefers": "gpu/same"}:
        raise TestError(f"the scheduler chose {chosen}")
    if sorted(seen) != [[gpu] for gpu in sorted(bench.berth.gpus())]:
        raise TestError(f"the containers see {seen}")


def no_schedule(bench: Bench) -> None:
    """While all GPUs are cordoned a claim waits, and one that tolerates the taint is allocated and prepared."""
    _empty(bench)
    for gpu in bench.berth.gpus():
        bench.berth.cli("gpu", "cordon", gpu)
    until("both devices have the taint", PUBLISHED_SECONDS, lambda: taints(bench) == [f"{DRIVER}/cordoned"] * GPUS)
    create_claim(bench, "waits")
    waits = bench.node.run(pod_of("waits", "waits"))
    _unschedulable(bench, waits)
    start_with_claim(bench, "tolerates", tolerations=_ANY_NO_SCHEDULE)
    _stays_pending(bench, waits, 1)
    for gpu in bench.berth.gpus():
        bench.berth.cli("gpu", "uncordon", gpu)
    bench.node.running(waits)


def metadata_of_requests(bench: Bench) -> None:
    """A container that uses a claim finds the metadata of all of its requests, and one that uses one request only that."""
    _empty(bench)
    create_claim(bench, "two", requests=("first", "second"))
    containers = [_shows_metadata("all", "two"), _shows_metadata("one", "two/second")]
    pod = start_pod(bench, Pod("metadata", containers, claims=("two",)))
    for container, requests in (("all", ["first", "second"]), ("one", ["second"])):
        _check_metadata(bench, pod, container, "resourceclaims", "two", requests)


def metadata_of_template(bench: Bench) -> None:
    """The metadata of a claim from a template is found by the claim's name in the pod."""
    _empty(bench)
    _template(bench, "inline", device_request("first"))
    pod = start_pod(bench, Pod("metadata", [_shows_metadata("main", "inline")], templates=("inline",)))
    _check_metadata(bench, pod, "main", "resourceclaimtemplates", "inline", ["first"])


def health_changes(bench: Bench) -> str:
    """The pod's status says that the GPU of its claim is healthy, unhealthy after an XID, and healthy after the quiet time."""
    _empty(bench)
    return _health_changes(bench, start_with_claim(bench, "healthy"), "healthy")


def health_stays_known(bench: Bench) -> None:
    """The health does not become unknown while nothing changes."""
    _empty(bench)
    pod = start_with_claim(bench, "quiet")
    _health(bench, pod, "quiet", "Healthy", HEALTH_SECONDS)
    end = time.monotonic() + QUIET_STREAM_SECONDS
    while time.monotonic() < end:
        said = [health for _, health in _shown_health(bench, pod, "quiet")]
        if said != ["Healthy"]:
            raise TestError(f"the status of the pod says {said}")
        time.sleep(1)


def health_unknown(bench: Bench) -> str:
    """While Berth is stopped the health is unknown, and it is healthy when Berth is back."""
    _empty(bench)
    pod = start_with_claim(bench, "asked")
    _health(bench, pod, "asked", "Healthy", HEALTH_SECONDS)
    bench.berth.stop()
    unknown = _health(bench, pod, "asked", "Unknown", UNKNOWN_SECONDS)
    start_registered(bench)
    healthy = _health(bench, pod, "asked", "Healthy", HEALTH_SECONDS)
    return f"unknown_after_s={unknown:.0f} healthy_after_s={healthy:.0f}"


def prepare_times_out(bench: Bench) -> str:
    """A pod stays Pending while Berth does not answer, and runs once it does."""
    _empty(bench)
    create_claim(bench, "late")
    os.kill(bench.berth.pid, signal.SIGSTOP)
    try:
        pod = bench.node.run(pod_of("late", "late"))
        until("the claim is allocated", CHANGES_SECONDS, lambda: is_allocated(bench, "late"))
        _stays_pending(bench, pod, NO_ANSWER_SECONDS)
        _not_prepared(bench, pod, "")
    finally:
        os.kill(bench.berth.pid, signal.SIGCONT)
    begin = time.monotonic()
    bench.node.running(pod, RETRY_SECONDS)
    return f"running_after_s={time.monotonic() - begin:.0f}"


def prepare_fails_then_succeeds(bench: Bench) -> str:
    """A claim on a GPU that is being drained is not prepared, and an event of the pod says so; the pod runs after an uncordon."""
    _empty(bench)
    gpu = sorted(bench.berth.gpus())[0]
    bench.berth.cli("gpu", "drain", gpu)
    create_claim(bench, "drained", uuid=gpu, tolerations=_ANY_NO_SCHEDULE)
    pod = bench.node.run(pod_of("drained", "drained"))
    _not_prepared(bench, pod, gpu)
    _stays_pending(bench, pod, 1)
    bench.berth.cli("gpu", "uncordon", gpu)
    begin = time.monotonic()
    bench.node.running(pod, RETRY_SECONDS)
    if gpus_seen(bench, pod) != [gpu]:
        raise TestError(f"the container has got {gpus_seen(bench, pod)}")
    return f"running_after_s={time.monotonic() - begin:.0f}"


def unprepare_fails_then_succeeds(bench: Bench) -> str:
    """A pod that is deleted while Berth is stopped stays until Berth is back and has released the claim."""
    return _unprepared_later(bench, lambda: start_registered(bench))


def unprepare_after_kubelet_restart(bench: Bench) -> str:
    """A pod that is deleted while Berth is stopped stays until Berth is back, the kubelet has restarted, and the claim is
    released."""

    def restart() -> None:
        bench.node.kubelet.stop()
        bench.berth.start_unready()
        bench.node.kubelet.start()
        until_registered(bench)

    return _unprepared_later(bench, restart)


def slices_removed(bench: Bench) -> None:
    """A kubelet that starts deletes the slices of its node, those of a stopped Berth, too, and not those of others. Berth
    publishes them again and does not touch another node's."""
    _empty(bench)
    bench.berth.stop()
    bench.node.kubelet.stop()
    other = f"{NODE_NAME}-other"
    pool = {"name": other, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": other, "pool": pool, "devices": [{"name": "gpu-0"}]}
    create(bench, "ResourceSlice", {"name": other}, spec)
    bench.at_end.append(lambda: bench.node.cluster.kubectl("delete", "resourceslice", other, "--ignore-not-found"))
    _stays("the slices of both nodes are there", 5, lambda: _nodes_of_slices(bench) == {NODE_NAME, other})
    bench.node.kubelet.start()
    until("the kubelet has deleted the slices of its node", 60, lambda: _nodes_of_slices(bench) == {other})
    _stays("the other node's slice is there", 5, lambda: _nodes_of_slices(bench) == {other})
    start_registered(bench)
    until_published(bench, bench.berth.gpus())
    if _nodes_of_slices(bench) != {NODE_NAME, other}:
        raise TestError(f"there are slices of {_nodes_of_slices(bench)}")


def force_deleted(bench: Bench) -> str:
    """The claim of a pod that was deleted by force is released."""
    _empty(bench)
    create_claim(bench, "forced")
    start_pod(bench, pod_of("forced", "forced", grace=0))
    begin = time.monotonic()
    _delete_by_force(bench, "forced")
    until_released(bench, EVICTED_SECONDS)
    return f"released_within_s={time.monotonic() - begin:.1f}"


def same_names_wait(bench: Bench) -> str:
    """Pod and claim are deleted by force and created again under their names while the old container runs: the new pod starts
    only when the old claim is released, and holds the new claim."""
    _empty(bench)
    gpu = sorted(bench.berth.gpus())[0]
    old = start_pod(bench, _stubborn(bench, "again", gpu))
    uid = bench.berth.claims()["again"]["claim"]["uid"]
    _delete_by_force(bench, "again")
    bench.node.cluster.kubectl("delete", "resourceclaim", "again")
    if bench.berth.claims()["again"]["claim"]["uid"] != uid:
        raise TestError(f"the container runs, and the API shows {bench.berth.claims()}")
    new = bench.node.run(_stubborn(bench, "again", gpu))
    begin = time.monotonic()
    _not_prepared(bench, new, f"old ResourceClaim with same name again and different UID {uid} still exists")
    bench.node.running(new, RETRY_SECONDS)
    took = time.monotonic() - begin
    _began_after(new, old)
    (claim,) = _claims(bench)
    held = {name: shown["claim"]["uid"] for name, shown in bench.berth.claims().items()}
    if held != {"again": claim["metadata"]["uid"]} or held["again"] == uid:
        raise TestError(f"the API shows the claims {held}, and the API server has {claim['metadata']['uid']}")
    return f"running_after_s={took:.0f}"


def replacement_waits(bench: Bench) -> str:
    """The GPU of a pod that was deleted by force is allocated to another claim while the old container runs: Berth waits for
    its end, so that the new pod runs soon after, without another try of the kubelet."""
    _empty(bench)
    gpu = sorted(bench.berth.gpus())[0]
    old = start_pod(bench, _stubborn(bench, "old", gpu))
    _delete_by_force(bench, "old")
    bench.node.cluster.kubectl("delete", "resourceclaim", "old")
    create_claim(bench, "new", uuid=gpu)
    new = bench.node.run(pod_of("new", "new"))
    until("the GPU is allocated to the new claim", CHANGES_SECONDS, lambda: is_allocated(bench, "new"))
    if set(bench.berth.claims()) != {"old"}:
        raise TestError(f"the old container runs, and the API shows {bench.berth.claims()}")
    old.beats("main")
    until("the old claim is released", RETRY_SECONDS, lambda: "old" not in bench.berth.claims())
    begin = time.monotonic()
    bench.node.running(new, CHANGES_SECONDS)
    took = time.monotonic() - begin
    _began_after(new, old)
    if gpus_seen(bench, new) != [gpu]:
        raise TestError(f"the new container has got {gpus_seen(bench, new)}")
    if said := _said(bench, new):
        raise TestError(f"the kubelet had to try again: {said}")
    return f"running_after_release_s={took:.1f}"


def capacity_consumed(bench: Bench) -> None:
    """Two claims for half of a GPU's memory each are granted. A claim for all of the memory, created between them, waits until
    both are released."""
    _all_through_claims(bench)
    (device,) = [one for one in published_devices(bench) if one.get("allowMultipleAllocations")]
    memory = device["capacity"]["memory"]
    half = 2 * int(memory["requestPolicy"]["default"].removesuffix("Mi"))
    first = start_with_claim(bench, "half-a", SHARED_CLASS, f"{half}Mi")
    create_claim(bench, "all", SHARED_CLASS, memory["value"])
    waits = bench.node.run(pod_of("all", "all"))
    second = start_with_claim(bench, "half-b", SHARED_CLASS, f"{half}Mi")
    _stays_pending(bench, waits, WAITS_SECONDS)
    for pod in (first, second):
        bench.node.delete(pod)
    bench.node.running(waits)
    shown = bench.berth.claims()
    if set(shown) != {"all"} or len(shown["all"]["devices"]) != 4:
        raise TestError(f"the API shows {shown}")


def counters_consumed(bench: Bench) -> None:
    """A claim for the whole GPU waits while a share of it is held, and a claim for a share waits while the whole GPU is held;
    each runs once the other was released."""
    _empty(bench)
    classes = {"share": SHARED_CLASS, "whole": DRIVER}
    for first, second in (("share", "whole"), ("whole", "share")):
        _empty(bench)
        for name in (first, second):
            create_claim(bench, name, classes[name])
        holds = start_pod(bench, pod_of(first, first))
        waits = bench.node.run(pod_of(second, second))
        _stays_pending(bench, waits, WAITS_SECONDS)
        bench.node.delete(holds)
        bench.node.running(waits)


def health_of_shares(bench: Bench) -> str:
    """The pod's status follows the health of the GPU of which its claim was allocated a share; the scheduler's result has a
    share's id."""
    _empty(bench)
    pod = start_with_claim(bench, "share", SHARED_CLASS)
    (result,) = _claims(bench)[0]["status"]["allocation"]["devices"]["results"]
    if not result.get("shareID"):
        raise TestError(f"the scheduler's result has no id of a share: {result}")
    return _health_changes(bench, pod, "share")


def rule_of_device_plugin(bench: Bench) -> str:
    """A DeviceTaintRule also cordons the GPUs that the device plugin grants, and no caller removes the mark. The GPU that is granted
    through claims is not cordoned: a claim that tolerates the taint gets it."""
    create_classes(bench)
    gpu = sorted(bench.berth.gpus())[0]
    bench.berth.cli("gpu", "via", gpu, "dra", "--wait", seconds=CHANGES_SECONDS)
    until_published(bench, {gpu})
    bench.allocatable({WHOLE: GPUS_OF_RULES - 1})
    begin = time.monotonic()
    _rule(bench, "NoSchedule")
    others = sorted(bench.berth.gpus() - {gpu})
    until("they are cordoned", CHANGES_SECONDS, lambda: sorted(bench.berth.drains("cordoned")) == others, every=0.05)
    took = time.monotonic() - begin
    bench.allocatable({WHOLE: 0})
    waits = bench.node.run(bench.pod("waits", {"main": 1}))
    _unschedulable(bench, waits)
    said = bench.berth.cli("gpu", "uncordon", others[0], "--owner", "all")
    if "kubectl delete devicetaintrule e2e" not in said or bench.berth.drain(others[0]) != "cordoned":
        raise TestError(f"an uncordon of all owners says {said}")
    (rule,) = bench.node.cluster.get("/apis/resource.k8s.io/v1/devicetaintrules")["items"]
    said = bench.berth.fails("gpu", "uncordon", others[0], "--owner", f"taintRule:{rule['metadata']['uid']}")
    if "is removed when the object is deleted" not in said:
        raise TestError(f"an uncordon of the rule's mark says {said}")
    if taints(bench):
        raise TestError(f"the slices have the taints {taints(bench)}")
    _template(bench, "tolerates", device_request(tolerations=[{"key": "example.com/unhealthy", "operator": "Exists"}]))
    if gpus_seen(bench, start_pod(bench, _from_template("tolerates", "tolerates"))) != [gpu]:
        raise TestError(f"the pod that tolerates the rule has not got {gpu}")
    bench.berth.crash()
    bench.node.cluster.kubectl("delete", _RULES, "--all")
    bench.berth.start()
    until("no GPU is cordoned", CHANGES_SECONDS, lambda: not bench.berth.drains("cordoned"))
    bench.node.running(waits)
    return f"cordoned_within_s={took:.1f}"


def rule_no_schedule(bench: Bench) -> None:
    """A DeviceTaintRule with NoSchedule leaves the pods that run, and keeps others waiting until it is deleted."""
    _empty(bench)
    _all_through_claims(bench)
    _template(bench, "any", device_request())
    runs = start_pod(bench, _from_template("runs", "any"))
    _rule(bench, "NoSchedule")
    waits = bench.node.run(_from_template("waits", "any"))
    _unschedulable(bench, waits)
    runs.beats("main")
    bench.node.cluster.kubectl("delete", _RULES, "--all")
    bench.node.running(waits)


def rule_no_execute(bench: Bench) -> str:
    """A DeviceTaintRule with NoExecute evicts a pod at once; one that tolerates the taint for a time is evicted after that time,
    and one that always tolerates it stays. Berth releases the claims of evicted pods, and a further claim waits until the
    rule is deleted."""
    _empty(bench)
    tolerated = {"key": "example.com/unhealthy", "operator": "Equal", "value": "true", "effect": "NoExecute"}
    for_a_time = {**tolerated, "tolerationSeconds": TOLERATED_SECONDS}
    tolerations = {"never": {}, "always": {"tolerations": [tolerated]}, "for-a-time": {"tolerations": [for_a_time]}}
    pods = {}
    for name, tolerates in tolerations.items():
        _template(bench, name, device_request(**tolerates))
        pods[name] = start_pod(bench, _from_template(name, name))
    begin = time.monotonic()
    _rule(bench, "NoExecute")
    bench.node.gone(pods["never"])
    at_once = time.monotonic() - begin
    bench.node.gone(pods["for-a-time"])
    later = time.monotonic() - begin
    if later < TOLERATED_SECONDS:
        raise TestError(f"the taint was to be tolerated for {TOLERATED_SECONDS} s, and the pod was evicted after {later:.1f} s")
    pods["always"].beats("main")
    until("the claims of the evicted pods are released", CHANGES_SECONDS, lambda: len(bench.berth.claims()) == 1)
    waits = bench.node.run(_from_template("late", "never"))
    _unschedulable(bench, waits)
    bench.node.cluster.kubectl("delete", _RULES, "--all")
    bench.node.running(waits)
    return f"evicted_after_s={at_once:.0f},{later:.0f}"


def _empty(bench: Bench) -> None:
    """Deletes the pods and claims of the cases before, whatever became of them."""
    for gpu in bench.berth.gpus():
        bench.berth.uncordon(gpu)
    bench.node.cluster.empty()

    def nothing() -> bool:
        left = [pod["metadata"]["name"] for pod in bench.node.kubelet.pods()] + list(bench.berth.claims())
        if left or _claims(bench):
            raise TestError(f"there are {left}, {[one['metadata']['name'] for one in _claims(bench)]}")
        return True

    until("pods and claims are gone", RETRY_SECONDS, nothing)


def _all_through_claims(bench: Bench) -> None:
    create_classes(bench)
    move_all(bench)
    until_published(bench, bench.berth.gpus())


def _alternative(name: str, expression: str = "true") -> dict:
    return {"name": name, "deviceClassName": DRIVER, "selectors": [{"cel": {"expression": expression}}]}


def _template(bench: Bench, name: str, request: dict) -> None:
    spec = {"spec": {"devices": {"requests": [request]}}}
    create(bench, "ResourceClaimTemplate", {"name": name, "namespace": NAMESPACE}, spec)


def _rule(bench: Bench, effect: str) -> None:
    """Taints all devices of the driver."""
    taint = {"key": "example.com/unhealthy", "value": "true", "effect": effect}
    bench.at_end.append(lambda: bench.node.cluster.kubectl("delete", _RULES, "--all"))
    create(bench, "DeviceTaintRule", {"name": "e2e"}, {"deviceSelector": {"driver": DRIVER}, "taint": taint})


def _claims(bench: Bench) -> list[dict]:
    """As the API server has them."""
    return bench.node.cluster.get(f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims")["items"]


def _nodes_of_slices(bench: Bench) -> set[str]:
    slices = bench.node.cluster.get("/apis/resource.k8s.io/v1/resourceslices")["items"]
    return {one["spec"]["nodeName"] for one in slices}


def _from_template(name: str, template: str) -> Pod:
    return Pod(name, [Container("main", {}, claims=(template,))], templates=(template,))


def _stubborn(bench: Bench, name: str, gpu: str) -> Pod:
    """A pod that ends only after its grace period, and its claim of that GPU."""
    create_claim(bench, name, uuid=gpu)
    return pod_of(name, name, _STUBBORN, GRACE_SECONDS)


def _shows_metadata(name: str, claim: str) -> Container:
    """A container that copies what it finds in the folder of metadata to the host."""
    return Container(name, {}, f"cp -r {_METADATA} /e2e/{name}.metadata", claims=(claim,))


def _extended_claim(bench: Bench, pod: Pod) -> dict | None:
    """The claim that the scheduler has created for the resources of a pod."""
    return bench.node.cluster.pod(pod.name)["status"].get("extendedResourceClaimStatus")


def _delete_by_force(bench: Bench, pod: str) -> None:
    bench.node.cluster.kubectl("delete", "pod", pod, "--force", "--grace-period=0")


def _began_after(new: Pod, old: Pod) -> None:
    """The old container had written its last heartbeat before the new one wrote its environment."""
    new.started("main")
    time.sleep(1)
    if (old.folder / "main.beat").stat().st_mtime >= (new.folder / "main.env").stat().st_mtime:
        raise TestError(f"{new.name} started while the container of {old.name} had the GPU")


def _unprepared_later(bench: Bench, restart) -> str:
    """A pod is deleted while Berth is stopped; `restart` starts it again."""
    _empty(bench)
    pod = start_with_claim(bench, "ends")
    bench.berth.stop()
    bench.node.cluster.kubectl("delete", "pod", pod.name, "--wait=false")
    until("its container has ended", CHANGES_SECONDS, lambda: not pod.alive("main"))
    _stays("the pod stays while Berth is stopped", WAITS_SECONDS, lambda: _is_there(bench, pod))
    begin = time.monotonic()
    restart()
    until("the pod is gone", RETRY_SECONDS, lambda: not _is_there(bench, pod))
    until_released(bench, EVICTED_SECONDS)
    return f"gone_after_s={time.monotonic() - begin:.0f}"


def _is_there(bench: Bench, pod: Pod) -> bool:
    return pod.uid in {one["metadata"]["uid"] for one in bench.node.cluster.pods()}


def _stays(what: str, seconds: float, holds) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not holds():
            raise TestError(f"{what}: no longer")
        time.sleep(0.2)


def _stays_pending(bench: Bench, pod: Pod, seconds: float) -> None:
    def is_pending() -> bool:
        return bench.node.cluster.pod(pod.name)["status"]["phase"] == "Pending"

    _stays(f"{pod.name} is Pending", seconds, is_pending)


def _unschedulable(bench: Bench, pod: Pod) -> None:
    """Waits until the scheduler has said that it finds no node for the pod."""

    def look() -> bool:
        status = bench.node.cluster.pod(pod.name)["status"]
        if status["phase"] != "Pending":
            raise Hopeless(f"it is {status['phase']}")
        return any(one.get("reason") == "Unschedulable" for one in status.get("conditions", []))

    until(f"{pod.name} is unschedulable", CHANGES_SECONDS, look)


def _said(bench: Bench, pod: Pod) -> list[str]:
    """The kubelet's events about claims of the pod that were not prepared."""
    fields = f"involvedObject.uid={pod.uid},reason=FailedPrepareDynamicResources"
    path = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector={urllib.parse.quote(fields)}"
    return [event["message"] for event in bench.node.cluster.get(path)["items"]]


def _not_prepared(bench: Bench, pod: Pod, why: str) -> None:
    """Waits for a FailedPrepareDynamicResources event of the pod that contains `why`."""

    def look() -> bool:
        said = _said(bench, pod)
        if said and not any(why in text for text in said):
            raise TestError(f"they say {said}")
        return bool(said)

    until(f"an event of {pod.name} says that its claim is not prepared", NO_ANSWER_SECONDS, look)


def _health_changes(bench: Bench, pod: Pod, claim: str) -> str:
    (gpu,) = gpus_seen(bench, pod)
    _health(bench, pod, claim, "Healthy", HEALTH_SECONDS)
    bench.berth.fake.xid(gpu, _XID)
    until("the devices of the GPU have the taint", PUBLISHED_SECONDS, lambda: set(taints(bench)) == {f"{DRIVER}/xid"}, every=0.05)
    unhealthy = _health(bench, pod, claim, "Unhealthy", HEALTH_SECONDS)
    healthy = _health(bench, pod, claim, "Healthy", QUIET_SECONDS + HEALTH_SECONDS)
    until("the taint is gone", PUBLISHED_SECONDS, lambda: not taints(bench))
    pod.beats("main")
    return f"unhealthy_after_s={unhealthy:.1f} healthy_after_s={healthy:.0f}"


def _health(bench: Bench, pod: Pod, claim: str, health: str, seconds: float) -> float:
    """Waits until the pod's status says so of the claim's device. Returns how long it took."""
    begin = time.monotonic()

    def look() -> bool:
        said = _shown_health(bench, pod, claim)
        if [one for _, one in said] != [health] or not said[0][0].startswith(DRIVER):
            raise TestError(f"it says {said}")
        return True

    until(f"the status of {pod.name} says {health}", seconds, look)
    return time.monotonic() - begin


def _shown_health(bench: Bench, pod: Pod, claim: str) -> list[tuple[str, str]]:
    """The devices of the claim in the pod's status, each with its health."""
    (status,) = bench.node.cluster.pod(pod.name)["status"]["containerStatuses"]
    of_claim = [one for one in status.get("allocatedResourcesStatus", []) if one["name"].split("/")[0] == f"claim:{claim}"]
    return [(one["resourceID"], one["health"]) for named in of_claim for one in named["resources"]]


def _check_metadata(bench: Bench, pod: Pod, container: str, folder: str, name: str, requests: list[str]) -> None:
    """The container has a file for each of these requests of its claim, and no others. `name` is that of the claim in the pod."""
    root = pod.folder / f"{container}.metadata"
    files = {f"{folder}/{name}/{request}/{DRIVER}-metadata.json": request for request in requests}
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    if found != set(files):
        raise TestError(f"container {container} has the files {found}")
    (claim,) = _claims(bench)
    results = claim["status"]["allocation"]["devices"]["results"]
    uuid_of = {one["name"]: one["attributes"]["uuid"]["string"] for one in published_devices(bench)}
    expected = {
        "uid": claim["metadata"]["uid"],
        "name": claim["metadata"]["name"],
        "namespace": NAMESPACE,
        "generation": 1,
        "podClaimName": name if folder == "resourceclaimtemplates" else None,
    }
    for file, request in files.items():
        (device,) = [one["device"] for one in results if one["request"] == request]
        for version in metadata_versions(root / file):
            shown = {key: version[key] for key in expected}
            (described,) = version["requests"][request]
            of_device = (described["driver"], described["pool"], described["name"], described["attributes"]["uuid"]["string"])
            if (shown, of_device) != (expected, (DRIVER, NODE_NAME, device, uuid_of[device])) or len(version["requests"]) != 1:
                raise TestError(f"{file} has {json.dumps(version)}, expected are {expected} and {device}")


SCENARIOS = [
    Scenario(
        "claims-conformance",
        Setup(gpus=GPUS, cdi=True, api_server=True, dra=True, quiet_seconds=QUIET_SECONDS),
        {
            "conformance: the device plugin is preferred where a node has GPUs of both APIs": prefers_device_plugin,
            "conformance: nvidia.com/gpu is served by a claim when the device plugin has no GPU": after_device_plugin,
            "conformance: containers share a claim": across_containers,
            "conformance: pods share a claim": across_pods,
            "conformance: a drain evicts all pods that share a claim": drain_of_shared_claim,
            "conformance: the first alternative that fits is allocated and prepared": first_available,
            "conformance: NoSchedule keeps a claim waiting, and can be tolerated": no_schedule,
            "conformance: metadata is mounted into the right containers": metadata_of_requests,
            "conformance: metadata is mounted for claims from templates": metadata_of_template,
            "conformance: a pod's status follows the health of its claim's GPU": health_changes,
            "conformance: health stays known while nothing changes": health_stays_known,
            "conformance: health is Unknown while Berth is stopped, and recovers": health_unknown,
            "conformance: the claim of a pod that was deleted by force is released": force_deleted,
            "conformance: a replacement waits for the end of a pod that was deleted by force": replacement_waits,
            "conformance: a new pod and claim with the names of force-deleted ones wait for the end of the old pod": (
                same_names_wait
            ),
            "conformance: a pod is Pending while NodePrepareResources times out": prepare_times_out,
            "conformance: NodePrepareResources fails and then succeeds": prepare_fails_then_succeeds,
            "conformance: NodeUnprepareResources of a deleted pod fails and then succeeds": unprepare_fails_then_succeeds,
            "conformance: NodeUnprepareResources of a deleted pod succeeds after Berth and the kubelet were restarted": (
                unprepare_after_kubelet_restart
            ),
            "conformance: slices are removed when the kubelet starts, and published again": slices_removed,
        },
        before=lambda: write_cdi_spec(uuids(GPUS)),
        cluster=True,
    ),
    Scenario(
        "claims-conformance-of-shares",
        Setup(gpus=1, mixed="both", cdi=True, api_server=True, dra=True, quiet_seconds=QUIET_SECONDS),
        {
            "conformance of shares: several claims consume the capacity of one device": capacity_consumed,
            "conformance of shares: counters are consumed and freed": counters_consumed,
            "conformance of shares: a pod's status follows the health of a share": health_of_shares,
        },
        before=lambda: write_cdi_spec(uuids(1)),
        cluster=True,
    ),
    Scenario(
        "claims-conformance-of-rules",
        Setup(gpus=GPUS_OF_RULES, cdi=True, api_server=True, dra=True),
        {
            "conformance of rules: GPUs of the device plugin are cordoned, too": rule_of_device_plugin,
            "conformance of rules: NoSchedule keeps further pods waiting": rule_no_schedule,
            "conformance of rules: NoExecute evicts pods that do not tolerate it": rule_no_execute,
        },
        before=lambda: write_cdi_spec(uuids(GPUS_OF_RULES)),
        cluster=True,
        first_minor=37,
    ),
]
