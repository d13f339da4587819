"""Cases of the DRA driver at a real kubelet and a real scheduler: claims get their GPU, and a GPU moves between the
device plugin and claims while the node runs."""

from __future__ import annotations

import json
import re
import textwrap
import time
import urllib.parse
from pathlib import Path

import images
import machine
import process
from bench import Bench
from berth import WHOLE, Setup, cdi_variable, write_cdi_spec
from gpus import uuids
from guard import connected, start_guard
from kubelet import NODE_NAME
from limits import cgroup_of, enforced, hard_mib, limit_file, process_of, written
from places import CDI_SPECS, REPO, RUN
from pods import NAMESPACE, Container, Pod
from say import TestError, until
from scenario import Scenario

DRIVER = "gpu.nvidia.com"
SHARED_CLASS = f"shared.{DRIVER}"
MIG_CLASS = "mig.nvidia.com"
GPUS = 3
#: Of the setup whose GPUs are offered both whole and in four shares.
SHARED_GPUS = 2
#: Until the kubelet has called NotifyRegistrationStatus; the watcher of plugins looks once a second.
REGISTERED_SECONDS = 20
#: `viaMs` of the setup, two looks at the API server, and the kubelet's status.
CHANGES_SECONDS = 30
#: From the kubelet's registration of the driver, which has deleted the slices at its start, or from their deletion.
PUBLISHED_SECONDS = 10
_SLICES = "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=" + urllib.parse.quote(
    f"spec.driver={DRIVER},spec.nodeName={NODE_NAME}"
)


def registered(bench: Bench) -> str:
    """The kubelet finds the driver by its socket, whose name has an `@`, and the pool is empty but complete."""
    begin = time.monotonic()
    until_registered(bench)
    until_published(bench, set())
    create_classes(bench)
    return f"registered_within_s={time.monotonic() - begin:.1f}"


def moves(bench: Bench) -> str:
    """A GPU leaves the device plugin's list, and is published once the node's status shows that."""
    bench.allocatable({WHOLE: GPUS})
    gpu = bench.shared = sorted(bench.berth.gpus())[0]
    begin = time.monotonic()
    bench.berth.cli("gpu", "via", gpu, "dra", "--wait", "--reason", "new jobs", seconds=CHANGES_SECONDS)
    took = time.monotonic() - begin
    if bench.node.cluster.allocatable(WHOLE) != GPUS - 1:
        raise TestError(f"{WHOLE} of the node is {bench.node.cluster.allocatable(WHOLE)}")
    until_published(bench, {gpu})
    return f"moved_within_s={took:.0f}"


def documented(bench: Bench) -> None:
    """The claim and the pod of docs/dra.md run as they are written, but for the image, which cannot be pulled here, its command,
    and the network of the host, since the node has no other."""
    page = (REPO / "docs/dra.md").read_text(encoding="utf-8")
    manifest = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "kind: Pod" in block)
    path = RUN / "documented.yaml"
    path.write_text(textwrap.dedent(manifest), encoding="utf-8")
    shown = bench.node.cluster.kubectl("create", "--dry-run=client", "-f", path, "-o", "json")
    claim, end = json.JSONDecoder().raw_decode(shown)
    pod = json.loads(shown[end:])
    pod["spec"]["hostNetwork"] = True
    pod["spec"]["containers"][0] |= {"image": images.BUSYBOX, "imagePullPolicy": "Never", "command": ["sleep", "3600"]}
    for one in (claim, pod):
        bench.node.cluster.create(json.dumps(one))
    claim_name, pod_name = claim["metadata"]["name"], pod["metadata"]["name"]
    bench.node.cluster.kubectl("wait", "--for=condition=Ready", f"pod/{pod_name}", "--timeout=60s")
    listed = bench.berth.cli("allocation", "list", "-o", "json")
    if not all(f'"{name}"' in listed for name in (claim_name, pod_name)):
        raise TestError(f"the allocations do not name claim and pod: {listed}")
    bench.node.cluster.kubectl("delete", "pod", pod_name, "--grace-period=1")
    bench.node.cluster.kubectl("delete", "resourceclaim", claim_name)
    until_released(bench)


def claim_runs(bench: Bench) -> None:
    """A pod with a claim gets the GPU by CDI, and the API names claim and pod; the other pods get none of it."""
    create_claim(bench, "first")
    pod = start_pod(bench, pod_of("claims", "first"))
    environment = pod.environment("main")
    if bench.shared not in gpus_seen(bench, pod):
        raise TestError(f"the container has not got {bench.shared}: {sorted(environment)}")
    shown = bench.berth.claims()["first"]
    if (shown["gpus"], shown["claim"]["pods"]) != ([bench.shared], [pod.name]):
        raise TestError(f"the API shows {shown}")
    if shown["id"] not in environment.values():
        raise TestError(f"the container has not got the id of its allocation {shown['id']}: {environment}")
    plugin = [bench.pod(f"plugin-{n}", {"main": 1}) for n in range(GPUS - 1)]
    for one in plugin:
        if bench.shared in gpus_seen(bench, start_pod(bench, one)):
            raise TestError(f"{one.name} has the GPU of the claim")
    for one in plugin:
        bench.node.delete(one)
    bench.claim_pod = pod


def second_waits(bench: Bench) -> str:
    """A second claim waits for the GPU, and runs when the first one is released."""
    pod = create_waiting(bench, "second")
    begin = time.monotonic()
    bench.node.delete(bench.claim_pod)
    bench.node.cluster.kubectl("delete", "resourceclaim", "first")
    bench.node.running(pod)
    pod.started("main")
    if set(bench.berth.claims()) != {"second"}:
        raise TestError(f"live claims: {set(bench.berth.claims())}")
    bench.claim_pod = pod
    return f"running_after_s={time.monotonic() - begin:.1f}"


def kubelet_restarted(bench: Bench) -> str:
    """The kubelet deletes the slices at its start; they are back, the claim keeps its allocation, and its container starts again."""
    before = bench.berth.claims()["second"]["id"]
    bench.node.kubelet.stop()
    bench.node.kubelet.start()
    begin = time.monotonic()
    until_published(bench, {bench.shared})
    took = time.monotonic() - begin
    bench.node.running(bench.claim_pod)
    _crash(bench, bench.claim_pod)
    if bench.berth.claims()["second"]["id"] != before:
        raise TestError("the allocation of the claim is another one")
    return f"published_after_s={took:.1f}"


def berth_restarted(bench: Bench) -> None:
    """kill -9: the claim is there, its specification is, and its container can start again."""
    before = bench.berth.claims()["second"]["id"]
    bench.berth.crash()
    for file in CDI_SPECS.glob(f"{DRIVER}-*"):
        file.unlink()
    bench.berth.start()
    if bench.berth.claims()["second"]["id"] != before:
        raise TestError("the allocation of the claim is another one")
    _crash(bench, bench.claim_pod)
    until_registered(bench)


def specification_deleted(bench: Bench) -> str:
    """A specification that is deleted is written again."""
    (file,) = CDI_SPECS.glob(f"{DRIVER}-*.json")
    begin = time.monotonic()
    file.unlink()
    until("the specification is written again", 10, file.exists, every=0.02)
    took = (time.monotonic() - begin) * 1000
    _crash(bench, bench.claim_pod)
    return f"written_again_within_ms={took:.0f}"


def cordoned(bench: Bench) -> str:
    """A cordon is a taint: the pod stays, and no further claim is given the GPU."""
    begin = time.monotonic()
    bench.berth.cli("gpu", "cordon", bench.shared)
    until("the slice has the taint", PUBLISHED_SECONDS, lambda: taints(bench) == [f"{DRIVER}/cordoned"], every=0.05)
    took = time.monotonic() - begin
    bench.claim_pod.beats("main")
    bench.berth.cli("gpu", "uncordon", bench.shared)
    until("the taint is gone", PUBLISHED_SECONDS, lambda: not taints(bench))
    return f"tainted_within_s={took:.1f}"


def moves_back(bench: Bench) -> str:
    """The GPU waits for the claim's release, says so, and is listed by the device plugin again."""
    bench.berth.cli("gpu", "via", bench.shared, "device-plugin")
    until("the slice has the taint", PUBLISHED_SECONDS, lambda: taints(bench) == [f"{DRIVER}/moving"])
    time.sleep(4)
    via = bench.berth.via(bench.shared)
    if via["state"] != "toDevicePlugin" or bench.berth.claims()["second"]["id"] not in via.get("waitsFor", ""):
        raise TestError(f"the API shows {via}")
    bench.claim_pod.beats("main")
    bench.node.delete(bench.claim_pod)
    bench.node.cluster.kubectl("delete", "resourceclaim", "second")
    begin = time.monotonic()
    until("the GPU was moved", CHANGES_SECONDS, lambda: bench.berth.via(bench.shared)["state"] == "devicePlugin")
    took = time.monotonic() - begin
    bench.allocatable({WHOLE: GPUS})
    until_published(bench, set())
    pods = [bench.pod(f"back-{n}", {"main": 1}) for n in range(GPUS)]
    bench.start(*pods)
    bench.no_pod_failed()
    for one in pods:
        bench.node.delete(one)
        bench.running.remove(one)
    return f"moved_within_s={took:.0f}"


def unchanged_pod(bench: Bench) -> None:
    """A pod that requests `nvidia.com/gpu: 1` runs by the device plugin, by DRA after all GPUs were moved, and again by the
    device plugin."""
    for round_, api in enumerate(("device-plugin", "dra", "device-plugin")):
        move_all(bench, api)
        bench.allocatable({WHOLE: 0 if api == "dra" else GPUS})
        pod = start_pod(bench, bench.pod(f"unchanged-{round_}", {"main": 1}))
        got = gpus_seen(bench, pod)
        if len(got) != 1:
            raise TestError(f"by {api} the container has got {got}")
        if bool(bench.berth.claims()) != (api == "dra"):
            raise TestError(f"by {api} the API shows the claims {bench.berth.claims()}")
        bench.node.delete(pod)
    bench.no_pod_failed()


def shares_published(bench: Bench) -> None:
    """GPUs that are offered both whole and in shares are two devices each, with a counter that keeps the scheduler from
    allocating both."""
    create_classes(bench)
    move_all(bench)
    devices = until("the shares are published", PUBLISHED_SECONDS, lambda: _of_two_kinds(bench))
    for device in devices:
        if len(device["consumesCounters"]) != 1:
            raise TestError(f"{device['name']} takes {device['consumesCounters']}")
    if reason := bench.berth.node()["dra"].get("noShares"):
        raise TestError(f"the API says that no shares are published: {reason}")


def shares_run(bench: Bench) -> str:
    """Five claims without a request of capacity get a share each, four of them of one GPU; each container sees only that GPU."""
    bench.claim_pods = []
    begin = time.monotonic()
    for n in range(5):
        create_claim(bench, f"share-{n}", SHARED_CLASS)
        pod = pod_of(f"share-{n}", f"share-{n}")
        bench.node.run(pod)
        bench.claim_pods.append(pod)
    seen = []
    for n, pod in enumerate(bench.claim_pods):
        bench.node.running(pod)
        pod.started("main")
        got = gpus_seen(bench, pod)
        shown = bench.berth.claims()[f"share-{n}"]
        if got != shown["gpus"] or shown["id"] not in pod.environment("main").values():
            raise TestError(f"the container has got {got}, and the API shows {shown}")
        seen += shown["devices"]
    if len(set(seen)) != 5:
        raise TestError(f"the claims hold {seen}")
    return f"running_after_s={time.monotonic() - begin:.1f}"


def whole_waits_for_shares(bench: Bench) -> str:
    """A claim for a whole GPU waits until the shares of one are released, and then no share of that GPU is allocated."""
    whole = create_waiting(bench, "whole")
    claims = bench.berth.claims()
    by_gpu = {gpu: [n for n in range(5) if claims[f"share-{n}"]["gpus"] == [gpu]] for gpu in bench.berth.gpus()}
    fewest = min(by_gpu.values(), key=len)
    begin = time.monotonic()
    for n in fewest:
        bench.node.delete(bench.claim_pods[n])
        bench.node.cluster.kubectl("delete", "resourceclaim", f"share-{n}")
    bench.node.running(whole)
    took = time.monotonic() - begin
    create_claim(bench, "late", SHARED_CLASS)
    bench.node.run(pod_of("late", "late"))
    time.sleep(3)
    held = bench.berth.claims()
    # The other GPU has four shares.
    has_room = 5 - len(fewest) < 4
    if is_allocated(bench, "late") != has_room:
        raise TestError(f"of {held} a further claim was {'not ' if has_room else ''}allocated a share")
    if has_room and held["late"]["gpus"] == held["whole"]["gpus"]:
        raise TestError(f"{held['late']} is on the GPU of {held['whole']}")
    delete_all(bench)
    return f"running_after_s={took:.1f}"


def memory_of_shares(bench: Bench) -> None:
    """A claim that requests memory gets as many shares as that takes, and no share is allocated twice."""
    devices = _of_two_kinds(bench)
    shared = next(device for device in devices if device.get("allowMultipleAllocations"))
    share = shared["capacity"]["memory"]["requestPolicy"]["default"]
    mib = int(share.removesuffix("Mi"))
    for name, memory in (("three-a", 3 * mib), ("three-b", 2 * mib + 1)):
        start_with_claim(bench, name, SHARED_CLASS, f"{memory}Mi")
        if len(bench.berth.claims()[name]["devices"]) != 3:
            raise TestError(f"the claim for {memory} MiB of shares of {share} holds {bench.berth.claims()[name]}")
    # Each GPU has only one share left.
    create_waiting(bench, "two", SHARED_CLASS, f"{2 * mib}Mi")
    held = [bench.berth.claims()[name]["gpus"] for name in ("three-a", "three-b")]
    if held[0] == held[1]:
        raise TestError(f"six shares of {held[0]} are held")


def memory_limited(bench: Bench) -> str:
    """The driver limits the memory of a claim's container before it runs, also while Berth is down, and the container finds
    the attributes of its device as Kubernetes' own library reads them."""
    delete_all(bench)
    bench.berth.fake.limits_memory("dmem")
    start_guard(bench)
    pod = bench.claim_pod = start_with_claim(bench, "limited", SHARED_CLASS)
    shown = bench.berth.claims()["limited"]
    (gpu,) = shown["gpus"]
    file = limit_file(bench, pod, gpu)
    if not _is_limit(hard_mib(file), shown):
        raise TestError(f"the driver holds {hard_mib(file)} MiB on {gpu}, the API shows {shown['limits']}")
    if file.stat().st_mtime_ns > written(pod):
        raise TestError("the container wrote before its limit was set")
    enforced(bench, pod, "memoryLimits")
    _read_metadata(pod, "limited", shown)
    bench.berth.stop()
    before = cgroup_of(pod)
    _crash(bench, pod)
    if cgroup_of(pod) == before or not _is_limit(hard_mib(limit_file(bench, pod, gpu)), shown):
        raise TestError("the container that started again while Berth was down has no limit")
    start_registered(bench)
    connected(bench)
    enforced(bench, pod, "memoryLimits")
    return f"memory_mib={shown['limits']['memoryMiB']}"


def shared_claim(bench: Bench) -> None:
    """Each container of a claim that two pods use has the limit, and the API says that together they are not limited."""
    pod = bench.claim_pod
    second = start_pod(bench, pod_of("second", "limited"))
    (gpu,) = bench.berth.claims()["limited"]["gpus"]
    if hard_mib(limit_file(bench, second, gpu)) != hard_mib(limit_file(bench, pod, gpu)):
        raise TestError("the container of the second pod has another limit")
    enforced(bench, pod, "none")
    bench.node.delete(second)
    enforced(bench, pod, "memoryLimits")


def memory_required(bench: Bench) -> None:
    """Under `require` shares have a taint while there is no guard, and a claim of a share is prepared once it can be limited."""
    delete_all(bench)
    guard = bench.shared
    guard.stop()
    bench.berth.stop()
    bench.berth.configure({**bench.berth.settings, "enforce": {"memory": "require"}})
    start_registered(bench)
    until("the shares have a taint without the guard", PUBLISHED_SECONDS, lambda: taints(bench) == [f"{DRIVER}/not-ready"] * SHARED_GPUS)
    guard.start()
    connected(bench)
    until("the taints are gone", PUBLISHED_SECONDS, lambda: not taints(bench))
    enforced(bench, start_with_claim(bench, "required", SHARED_CLASS), "memoryLimits")
    # The next setup's Berth would adopt the claim.
    delete_all(bench)


def _is_limit(mib: int, shown: dict) -> bool:
    """Whether it is the limit of an allocation, after the driver has rounded it down to its pages of 2 MiB."""
    return shown["limits"]["memoryMiB"] - 2 < mib <= shown["limits"]["memoryMiB"]


def until_registered(bench: Bench) -> None:
    """Waits until the kubelet has registered the driver."""
    until("the kubelet has registered the driver", REGISTERED_SECONDS, lambda: bench.berth.node()["dra"]["registered"])


def start_registered(bench: Bench) -> None:
    """Starts Berth, all of whose GPUs are granted through DRA."""
    bench.berth.start_unready()
    until_registered(bench)


def until_released(bench: Bench, seconds: float = CHANGES_SECONDS) -> None:
    until("all claims are released", seconds, lambda: not bench.berth.claims())


def delete_all(bench: Bench) -> None:
    """Deletes all pods and claims."""
    bench.node.cluster.kubectl("delete", "pods,resourceclaims", "--all", "--wait=false")
    until_released(bench)
    until("all pods are gone", CHANGES_SECONDS, lambda: not bench.node.cluster.pods())


def move_all(bench: Bench, api: str = "dra") -> None:
    """Moves all GPUs to that API of the kubelet (`dra` or `device-plugin`), and waits until they are moved."""
    for gpu in sorted(bench.berth.gpus()):
        bench.berth.cli("gpu", "via", gpu, api, "--wait", seconds=3 * CHANGES_SECONDS)


def _read_metadata(pod: Pod, claim: str, shown: dict) -> None:
    """Reads the file of a claim's request in the pod's container."""
    folder = f"var/run/kubernetes.io/dra-device-attributes/resourceclaims/{claim}/gpu"
    file = process_of(pod) / "root" / folder / f"{DRIVER}-metadata.json"
    for one in metadata_versions(file):
        uuids_of = {name: [device["attributes"]["uuid"]["string"] for device in of] for name, of in one["requests"].items()}
        if (one["uid"], uuids_of) != (shown["claim"]["uid"], {"gpu": shown["gpus"]}):
            raise TestError(f"the file has {one}, and the API shows {shown}")


def metadata_versions(file: Path) -> list[dict]:
    """Both versions in a file of metadata, as Kubernetes' own library reads them."""
    program = RUN / "device-metadata"
    if not program.exists():
        source = REPO / "tests" / "e2e" / "device-metadata"
        process.run([machine.go(), "build", "-C", source, "-o", program, "."], "build a reader of metadata", seconds=600)
    lines = process.run([program, file], "read the metadata of the claim").splitlines()
    versions = [json.loads(line) for line in lines]
    if [one["version"] for one in versions] != ["v1beta1", "v1alpha1"]:
        raise TestError(f"{file} has {versions}")
    return versions


def is_allocated(bench: Bench, claim: str) -> bool:
    """Whether the scheduler has allocated devices to it."""
    shown = bench.node.cluster.get(f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims/{claim}")
    return "allocation" in shown.get("status", {})


def _of_two_kinds(bench: Bench) -> list[dict]:
    """The devices of the slices: each GPU whole and in shares."""
    devices = published_devices(bench)
    kinds = sorted(device["attributes"]["type"]["string"] for device in devices)
    if kinds != ["gpu"] * SHARED_GPUS + ["shared"] * SHARED_GPUS:
        raise TestError(f"the slices have {kinds}")
    return devices


def device_request(name: str = "gpu", device_class: str = DRIVER, memory: str = "", uuid: str = "", **more) -> dict:
    """A request of a claim. `uuid`: the UUID of the device that it must be allocated. `more`: further fields, such as `count`."""
    if memory:
        more["capacity"] = {"requests": {"memory": memory}}
    if uuid:
        more["selectors"] = [{"cel": {"expression": f"device.attributes['{DRIVER}'].uuid == '{uuid}'"}}]
    return {"name": name, "exactly": {"deviceClassName": device_class, **more}}


def create_claim(
    bench: Bench,
    name: str,
    device_class: str = DRIVER,
    memory: str = "",
    requests: tuple[str, ...] = ("gpu",),
    same_attribute: str = "",
    **more,
) -> None:
    """Creates a claim. `requests`: the names of its requests, which are equal otherwise and have the fields `more`.
    `same_attribute`: must have one value on all devices."""
    devices: dict = {"requests": [device_request(one, device_class, memory, **more) for one in requests]}
    if same_attribute:
        devices["constraints"] = [{"requests": list(requests), "matchAttribute": f"{DRIVER}/{same_attribute}"}]
    spec = {"devices": devices}
    create(bench, "ResourceClaim", {"name": name, "namespace": NAMESPACE}, spec)


def create_classes(bench: Bench) -> None:
    """Creates the chart's DeviceClasses, unless an earlier setup has created them."""
    shown = {one["metadata"]["name"] for one in bench.node.cluster.get("/apis/resource.k8s.io/v1/deviceclasses")["items"]}
    classes = ((DRIVER, "gpu", {"extendedResourceName": WHOLE}), (SHARED_CLASS, "shared", {}), (MIG_CLASS, "mig", {}))
    for name, kind, extended in classes:
        expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
        if name not in shown:
            create(bench, "DeviceClass", {"name": name}, {"selectors": [{"cel": {"expression": expression}}], **extended})


def create(bench: Bench, kind: str, metadata: dict, spec: dict) -> None:
    manifest = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
    bench.node.cluster.create(json.dumps(manifest))


def pod_of(name: str, claim: str, extra: str = "", grace: int = 2) -> Pod:
    return Pod(name, [Container("main", {}, extra, claims=(claim,))], claims=(claim,), grace=grace)


def start_pod(bench: Bench, pod: Pod) -> Pod:
    """Creates a pod and waits until its containers run."""
    bench.node.run(pod)
    bench.node.running(pod)
    for container in pod.containers:
        pod.started(container.name)
    return pod


def start_with_claim(bench: Bench, name: str, device_class: str = DRIVER, memory: str = "", **more) -> Pod:
    """Creates a claim and a pod of that name that uses it, and waits until the pod runs. `more`: as of `create_claim`."""
    create_claim(bench, name, device_class, memory, **more)
    return start_pod(bench, pod_of(name, name))


def create_waiting(bench: Bench, name: str, device_class: str = DRIVER, memory: str = "", **more) -> Pod:
    """Creates a claim and a pod that uses it; the scheduler must allocate nothing to the claim."""
    create_claim(bench, name, device_class, memory, **more)
    pod = bench.node.run(pod_of(name, name))
    time.sleep(3)
    if is_allocated(bench, name):
        raise TestError(f"the claim {name} was allocated a device")
    return pod


def injected(pod: Pod, devices: list[str], container: str = "main") -> list[str]:
    """Those of these GPUs or MIG instances that the container has got by CDI."""
    environment = pod.environment(container)
    return [one for one in devices if environment.get(cdi_variable(one)) == "injected"]


def gpus_seen(bench: Bench, pod: Pod, container: str = "main") -> list[str]:
    """The node's GPUs that the container has got by CDI."""
    return injected(pod, sorted(bench.berth.gpus()), container)


def published_devices(bench: Bench) -> list[dict]:
    """The devices of the node's pool, in the order of its slices."""
    return [device for spec in complete_pool(bench) for device in spec.get("devices", [])]


def complete_pool(bench: Bench) -> list[dict]:
    """The specs of the pool's slices of the newest generation, sorted by name; none of them may be missing."""
    slices = sorted(bench.node.cluster.get(_SLICES)["items"], key=lambda one: one["metadata"]["name"])
    newest = max((one["spec"]["pool"]["generation"] for one in slices), default=0)
    current = [one["spec"] for one in slices if one["spec"]["pool"]["generation"] == newest]
    if not current or len(current) != current[0]["pool"]["resourceSliceCount"]:
        raise TestError(f"the pool is not complete: {slices}")
    return current


def taints(bench: Bench) -> list[str]:
    return [taint["key"] for device in published_devices(bench) for taint in device.get("taints", [])]


def until_published(bench: Bench, gpus: set[str]) -> None:
    """Waits until the slices have exactly the devices of these GPUs, as the API server has them."""

    def look() -> bool:
        shown = {device["attributes"]["uuid"]["string"] for device in published_devices(bench)}
        if shown != gpus:
            raise TestError(f"the slices have {shown}")
        return True

    until(f"the slices have {len(gpus)} devices", PUBLISHED_SECONDS + REGISTERED_SECONDS, look, every=0.05)


def _crash(bench: Bench, pod: Pod) -> None:
    """Ends the pod's container, which the kubelet then starts again with the CDI ids that it has kept."""
    before = bench.node.status(pod)["status"]["containerStatuses"][0]["restartCount"]
    pod.end("main", 1)

    def again() -> bool:
        status = bench.node.status(pod)["status"]["containerStatuses"][0]
        return status["restartCount"] > before and "running" in status["state"]

    until(f"the container of {pod.name} runs again", 90, again)
    pod.beats("main")


SCENARIOS = [
    Scenario(
        "claims",
        Setup(gpus=GPUS, cdi=True, api_server=True, dra=True),
        {
            "claims: the kubelet registers the DRA driver": registered,
            "claims: a GPU moves from the device plugin to DRA": moves,
            "claims: the claim and the pod of docs/dra.md run": documented,
            "claims: a pod with a claim gets the GPU, and the API names both": claim_runs,
            "claims: a second claim waits until the first is released": second_waits,
            "claims: a cordon is a taint that clears": cordoned,
            "claims: the kubelet restarts: slices and containers come back": kubelet_restarted,
            "claims: kill -9 of Berth loses no claim, and its specification is written again": berth_restarted,
            "claims: a deleted specification is written again": specification_deleted,
            "claims: the GPU moves back once the claim is released": moves_back,
            "claims: a pod that requests nvidia.com/gpu runs unchanged by either API": unchanged_pod,
        },
        before=lambda: write_cdi_spec(uuids(GPUS)),
        cluster=True,
    ),
    Scenario(
        "claims-of-shares",
        Setup(gpus=SHARED_GPUS, mixed="both", cdi=True, api_server=True, dra=True),
        {
            "claims of shares: a GPU is published whole and in shares": shares_published,
            "claims of shares: each claim gets a share, and its container only that GPU": shares_run,
            "claims of shares: a GPU is not allocated both whole and in shares": whole_waits_for_shares,
            "claims of shares: memory is rounded up to shares, and never allocated twice": memory_of_shares,
            "claims of shares: memory is limited before the container runs, also while Berth is down": memory_limited,
            "claims of shares: pods that share a claim are not limited together, and the API says so": shared_claim,
            "claims of shares: required limits withdraw shares while there is no guard": memory_required,
        },
        before=lambda: write_cdi_spec(uuids(SHARED_GPUS)),
        cluster=True,
    ),
]
