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
    published(bench, set())
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
    published(bench, {gpu})
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
    until("the claim is released", CHANGES_SECONDS, lambda: not bench.berth.claims())


def claim_runs(bench: Bench) -> None:
    """A pod with a claim gets the GPU by CDI, and the API names claim and pod; the other pods get none of it."""
    create_claim(bench, "first")
    pod = pod_of("claims", "first")
    bench.node.run(pod)
    bench.node.running(pod)
    pod.started("main")
    environment = pod.environment("main")
    if environment.get(cdi_variable(bench.shared)) != "injected":
        raise TestError(f"the container has not got {bench.shared}: {sorted(environment)}")
    shown = bench.berth.claims()["first"]
    if (shown["gpus"], shown["claim"]["pods"]) != ([bench.shared], [pod.name]):
        raise TestError(f"the API shows {shown}")
    if shown["id"] not in environment.values():
        raise TestError(f"the container has not got the id of its allocation {shown['id']}: {environment}")
    plugin = [bench.pod(f"plugin-{n}", {"main": 1}) for n in range(GPUS - 1)]
    for one in plugin:
        bench.node.run(one)
        bench.node.running(one)
        one.started("main")
        if one.environment("main").get(cdi_variable(bench.shared)):
            raise TestError(f"{one.name} has the GPU of the claim")
    for one in plugin:
        bench.node.delete(one)
    bench.claim_pod = pod


def second_waits(bench: Bench) -> str:
    """A second claim waits for the GPU, and runs when the first one is released."""
    create_claim(bench, "second")
    pod = pod_of("waits", "second")
    bench.node.run(pod)
    time.sleep(3)
    if bench.node.cluster.pod(pod.name)["status"]["phase"] != "Pending":
        raise TestError("the GPU of the first claim was given to the second one")
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
    published(bench, {bench.shared})
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
    published(bench, set())
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
        for gpu in sorted(bench.berth.gpus()):
            bench.berth.cli("gpu", "via", gpu, api, "--wait", seconds=3 * CHANGES_SECONDS)
        bench.allocatable({WHOLE: 0 if api == "dra" else GPUS})
        pod = bench.pod(f"unchanged-{round_}", {"main": 1})
        bench.node.run(pod)
        bench.node.running(pod)
        pod.started("main")
        environment = pod.environment("main")
        got = [gpu for gpu in bench.berth.gpus() if environment.get(cdi_variable(gpu)) == "injected"]
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
    for gpu in sorted(bench.berth.gpus()):
        bench.berth.cli("gpu", "via", gpu, "dra", "--wait", seconds=3 * CHANGES_SECONDS)
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
        environment = pod.environment("main")
        got = [gpu for gpu in bench.berth.gpus() if environment.get(cdi_variable(gpu)) == "injected"]
        shown = bench.berth.claims()[f"share-{n}"]
        if got != shown["gpus"] or shown["id"] not in environment.values():
            raise TestError(f"the container has got {got}, and the API shows {shown}")
        seen += shown["devices"]
    if len(set(seen)) != 5:
        raise TestError(f"the claims hold {seen}")
    return f"running_after_s={time.monotonic() - begin:.1f}"


def whole_waits_for_shares(bench: Bench) -> str:
    """A claim for a whole GPU waits until the shares of one are released, and then no share of that GPU is allocated."""
    create_claim(bench, "whole")
    whole = pod_of("whole", "whole")
    bench.node.run(whole)
    time.sleep(3)
    if is_allocated(bench, "whole"):
        raise TestError("a GPU with claims of shares was allocated to another claim whole")
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
    late = pod_of("late", "late")
    bench.node.run(late)
    time.sleep(3)
    held = bench.berth.claims()
    # The other GPU has four shares.
    has_room = 5 - len(fewest) < 4
    if is_allocated(bench, "late") != has_room:
        raise TestError(f"of {held} a further claim was {'not ' if has_room else ''}allocated a share")
    if has_room and held["late"]["gpus"] == held["whole"]["gpus"]:
        raise TestError(f"{held['late']} is on the GPU of {held['whole']}")
    bench.claim_pods = [pod for n, pod in enumerate(bench.claim_pods) if n not in fewest] + [whole, late]
    for pod in bench.claim_pods:
        bench.node.delete(pod)
    bench.node.cluster.kubectl("delete", "resourceclaim", "--all")
    until("all claims are released", CHANGES_SECONDS, lambda: not bench.berth.claims())
    return f"running_after_s={took:.1f}"


def memory_of_shares(bench: Bench) -> None:
    """A claim that requests memory gets as many shares as that takes, and no share is allocated twice."""
    devices = _of_two_kinds(bench)
    shared = next(device for device in devices if device.get("allowMultipleAllocations"))
    share = shared["capacity"]["memory"]["requestPolicy"]["default"]
    mib = int(share.removesuffix("Mi"))
    bench.claim_pods = []
    for name, memory in (("three-a", 3 * mib), ("three-b", 2 * mib + 1)):
        create_claim(bench, name, SHARED_CLASS, f"{memory}Mi")
        pod = pod_of(name, name)
        bench.node.run(pod)
        bench.claim_pods.append(pod)
        bench.node.running(pod)
        if len(bench.berth.claims()[name]["devices"]) != 3:
            raise TestError(f"the claim for {memory} MiB of shares of {share} holds {bench.berth.claims()[name]}")
    create_claim(bench, "two", SHARED_CLASS, f"{2 * mib}Mi")
    waits = pod_of("two", "two")
    bench.node.run(waits)
    bench.claim_pods.append(waits)
    time.sleep(3)
    if is_allocated(bench, "two"):
        raise TestError("two shares were allocated, although each GPU had only one left")
    held = [bench.berth.claims()[name]["gpus"] for name in ("three-a", "three-b")]
    if held[0] == held[1]:
        raise TestError(f"six shares of {held[0]} are held")


def memory_limited(bench: Bench) -> str:
    """The driver limits the memory of a claim's container before it runs, also while Berth is down, and the container finds
    the attributes of its device as Kubernetes' own library reads them."""
    _release_all(bench)
    bench.berth.fake.limits_memory("dmem")
    start_guard(bench)
    create_claim(bench, "limited", SHARED_CLASS)
    pod = pod_of("limited", "limited")
    bench.node.run(pod)
    bench.node.running(pod)
    pod.started("main")
    bench.claim_pods = [pod]
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
    (pod,) = bench.claim_pods
    second = pod_of("second", "limited")
    bench.node.run(second)
    bench.node.running(second)
    second.started("main")
    (gpu,) = bench.berth.claims()["limited"]["gpus"]
    if hard_mib(limit_file(bench, second, gpu)) != hard_mib(limit_file(bench, pod, gpu)):
        raise TestError("the container of the second pod has another limit")
    enforced(bench, pod, "none")
    bench.node.delete(second)
    enforced(bench, pod, "memoryLimits")


def memory_required(bench: Bench) -> None:
    """Under `require` shares have a taint while there is no guard, and a claim of a share is prepared once it can be limited."""
    _release_all(bench)
    guard = bench.shared
    guard.stop()
    bench.berth.stop()
    bench.berth.configure({**bench.berth.settings, "enforce": {"memory": "require"}})
    start_registered(bench)
    until("the shares have a taint without the guard", PUBLISHED_SECONDS, lambda: taints(bench) == [f"{DRIVER}/not-ready"] * SHARED_GPUS)
    guard.start()
    connected(bench)
    until("the taints are gone", PUBLISHED_SECONDS, lambda: not taints(bench))
    create_claim(bench, "required", SHARED_CLASS)
    pod = pod_of("required", "required")
    bench.claim_pods.append(pod)
    bench.node.run(pod)
    bench.node.running(pod)
    pod.started("main")
    enforced(bench, pod, "memoryLimits")
    # The next setup's Berth would adopt the claim.
    _release_all(bench)


def _is_limit(mib: int, shown: dict) -> bool:
    """Whether it is the limit of an allocation, after the driver has rounded it down to its pages of 2 MiB."""
    return shown["limits"]["memoryMiB"] - 2 < mib <= shown["limits"]["memoryMiB"]


def until_registered(bench: Bench) -> None:
    """Waits until the kubelet has registered the driver, of which a Berth that has just started shows nothing yet."""

    def is_registered() -> bool:
        return bench.berth.node().get("dra", {}).get("registered", False)

    until("the kubelet has registered the driver", REGISTERED_SECONDS, is_registered)


def start_registered(bench: Bench) -> None:
    """Starts Berth, all of whose GPUs are granted through DRA."""
    bench.berth.start_unready()
    until_registered(bench)


def _release_all(bench: Bench) -> None:
    for pod in bench.claim_pods:
        bench.node.delete(pod)
    bench.claim_pods = []
    bench.node.cluster.kubectl("delete", "resourceclaim", "--all")
    until("all claims are released", CHANGES_SECONDS, lambda: not bench.berth.claims())


def _read_metadata(pod: Pod, claim: str, shown: dict) -> None:
    """Reads the file of a claim's request in the pod's container."""
    folder = f"var/run/kubernetes.io/dra-device-attributes/resourceclaims/{claim}/gpu"
    file = process_of(pod) / "root" / folder / f"{DRIVER}-metadata.json"
    versions = metadata_versions(file)
    if [one["version"] for one in versions] != ["v1beta1", "v1alpha1"]:
        raise TestError(f"the file has {versions}")
    for one in versions:
        uuids_of = {name: [device["attributes"]["uuid"]["string"] for device in of] for name, of in one["requests"].items()}
        if (one["uid"], uuids_of) != (shown["claim"]["uid"], {"gpu": shown["gpus"]}):
            raise TestError(f"the file has {one}, and the API shows {shown}")


def metadata_versions(file: Path) -> list[dict]:
    """The versions in a file of metadata, as Kubernetes' own library reads them."""
    program = RUN / "device-metadata"
    if not program.exists():
        source = REPO / "tests" / "e2e" / "device-metadata"
        process.run([machine.go(), "build", "-C", source, "-o", program, "."], "build a reader of metadata", seconds=600)
    lines = process.run([program, file], "read the metadata of the claim").splitlines()
    return [json.loads(line) for line in lines]


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


def create_claim(bench: Bench, name: str, device_class: str = DRIVER, memory: str = "", **more) -> None:
    """`more`: further fields of its one request, such as `count`."""
    exactly = {"deviceClassName": device_class, **more}
    if memory:
        exactly["capacity"] = {"requests": {"memory": memory}}
    devices = {"requests": [{"name": "gpu", "exactly": exactly}]}
    create(bench, "ResourceClaim", {"name": name, "namespace": NAMESPACE}, {"devices": devices})


def create_classes(bench: Bench) -> None:
    """Those of the chart, unless an earlier setup has created them."""
    shown = {one["metadata"]["name"] for one in bench.node.cluster.get("/apis/resource.k8s.io/v1/deviceclasses")["items"]}
    classes = ((DRIVER, "gpu", {"extendedResourceName": WHOLE}), (SHARED_CLASS, "shared", {}), (MIG_CLASS, "mig", {}))
    for name, kind, extended in classes:
        expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
        if name not in shown:
            create(bench, "DeviceClass", {"name": name}, {"selectors": [{"cel": {"expression": expression}}], **extended})


def create(bench: Bench, kind: str, metadata: dict, spec: dict) -> None:
    manifest = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
    bench.node.cluster.create(json.dumps(manifest))


def pod_of(name: str, claim: str) -> Pod:
    return Pod(name, [Container("main", {}, claims=(claim,))], claims=(claim,))


def published_devices(bench: Bench) -> list[dict]:
    """The devices of the node's pool, in the order of its slices."""
    return [device for spec in complete_pool(bench) for device in spec.get("devices", [])]


def complete_pool(bench: Bench) -> list[dict]:
    """The specs of its slices, by their names, which must all be of one generation."""
    slices = sorted(bench.node.cluster.get(_SLICES)["items"], key=lambda one: one["metadata"]["name"])
    newest = max((one["spec"]["pool"]["generation"] for one in slices), default=0)
    current = [one["spec"] for one in slices if one["spec"]["pool"]["generation"] == newest]
    if not current or len(current) != current[0]["pool"]["resourceSliceCount"]:
        raise TestError(f"the pool is not complete: {slices}")
    return current


def taints(bench: Bench) -> list[str]:
    return [taint["key"] for device in published_devices(bench) for taint in device.get("taints", [])]


def published(bench: Bench, gpus: set[str]) -> None:
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
