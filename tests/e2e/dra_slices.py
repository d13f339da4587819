"""Tests of the node's ResourceSlices at a real API server: while feature gates of DRA are off, at an older API server, and with
100 devices. Further tests show that the real scheduler, by the order of the devices, gives claims GPUs that NVLink connects."""

from __future__ import annotations

import time
from pathlib import Path

from bench import Bench
from berth import WHOLE, Setup, write_cdi_spec
from controlplane import MODULE
from dra import (
    CHANGES_SECONDS,
    DRIVER,
    MIG_CLASS,
    PUBLISHED_SECONDS,
    SHARED_CLASS,
    complete_pool,
    create_claim,
    create_classes,
    create_waiting,
    delete_all,
    injected,
    pod_of,
    published_devices,
    start_pod,
    start_registered,
    start_with_claim,
)
from gomodule import GoModule
from gpus import FakeGpus, instance_uuids, uuids
from pods import Container, Pod
from say import TestError, until
from scenario import Scenario

#: An API server that reports the last version whose scheduler can allocate a GPU both whole and in shares.
OLD_VERSION = "v1.36.1"
OLD_SERVER = GoModule("controlplane", MODULE.module, ["cmd/kube-apiserver"], reported_version=OLD_VERSION)
_WHOLE, _BOTH = {"gpu"}, {"gpu", "shared"}

#: The longest wait of a kubelet before it tries to watch its pods again is a minute.
WATCHED_SECONDS = 150

#: Of the setup with NVLink: no pair has neighbouring numbers.
PAIRS = ((0, 5), (1, 4), (2, 7), (3, 6))
#: The order is published again 30 s after the last change; the rest is for a slow machine.
ORDERED_SECONDS = 50

#: Of the setup with 100 devices: GPUs that are both whole and shared, and the MIG instances of each of the others.
MIXED_GPUS = 9
INSTANCES = [7] * 11 + [5]
DEVICES = 2 * MIXED_GPUS + sum(INSTANCES)
OLD_DRIVER = "535.54.03"
LONG_MODEL = "NVIDIA Graphics Device of a Model Whose Name Is Longer Than Attributes"


# Feature gates. In Kubernetes 1.36 none of these is locked; 1.37 locks DRAExtendedResource.


def without_taints(bench: Bench) -> None:
    """Once DRADeviceTaints is turned off, a GPU that was cordoned is left out of the slices, and is back after the cordon."""
    create_classes(bench)
    bench.at_end.append(lambda: _configure(bench))
    first, second = uuids(2)
    bench.berth.cordon(first)
    _shows(bench, {first: _BOTH, second: _BOTH})
    _restart_control_plane(bench, "DRADeviceTaints")
    _shows(bench, {second: _BOTH})
    if not bench.berth.node()["dra"]["dropsTaints"]:
        raise TestError(f"the API shows {bench.berth.node()['dra']}")
    _runs(bench, "uncordoned", {second})
    create_waiting(bench, "cordoned")
    bench.berth.uncordon(first)
    _shows(bench, {first: _BOTH, second: _BOTH})
    delete_all(bench)


def without_counters(bench: Bench) -> None:
    """Once DRAPartitionableDevices is turned off, GPUs are published whole only, and a GPU of which a pod holds a share is not
    published."""
    _restart_control_plane(bench)
    _shows(bench, {gpu: _BOTH for gpu in uuids(2)})
    shared = _runs(bench, "shared", set(uuids(2)), SHARED_CLASS)
    (held,) = bench.berth.claims()["shared"]["gpus"]
    (other,) = set(uuids(2)) - {held}
    _restart_control_plane(bench, "DRAPartitionableDevices")
    _shows(bench, {other: _WHOLE})
    shared.beats("main")
    _says(bench, "noCounters", "DRAPartitionableDevices")
    _runs(bench, "whole", {other})
    create_waiting(bench, "more", SHARED_CLASS)
    delete_all(bench)
    _shows(bench, {gpu: _WHOLE for gpu in uuids(2)})


def without_shares(bench: Bench) -> None:
    """Once DRAConsumableCapacity is turned off, GPUs are published whole only."""
    _restart_control_plane(bench)
    _shows(bench, {gpu: _BOTH for gpu in uuids(2)})
    _restart_control_plane(bench, "DRAConsumableCapacity")
    _whole_only(bench, "DRAConsumableCapacity")


def without_extended_resources(bench: Bench) -> str:
    """Without DRAExtendedResource only claims get a GPU of DRA, and no pod that requests nvidia.com/gpu does."""
    if not MODULE.version.startswith("v1.36."):
        return f"left out: it is locked in {MODULE.version}"
    _restart(bench, "DRAExtendedResource")
    _shows(bench, {gpu: _BOTH for gpu in uuids(2)})
    _runs(bench, "claims", set(uuids(2)))
    pod = bench.pod("requests", {"main": 1}, resource=WHOLE)
    bench.waits(pod)
    bench.node.cluster.kubectl("delete", "pod", pod.name)
    delete_all(bench)
    return ""


def without_health(bench: Bench) -> None:
    """Without ResourceHealthStatus, and the gate that needs it, the pod's status shows no health of its GPU."""
    _restart(bench, "ResourceHealthStatus", "ResourceHealthStatusMessage")
    pod = _runs(bench, "unknown", set(uuids(2)))
    if _health(bench, pod):
        raise TestError(f"the status shows {_health(bench, pod)}")
    delete_all(bench)


def at_old_version(bench: Bench) -> None:
    """At an API server of Kubernetes 1.36.1 GPUs are published whole only, without counters."""
    _restart(bench, server=OLD_SERVER.build())
    shown = bench.node.cluster.get("/version")["gitVersion"]
    if shown != OLD_VERSION:
        raise TestError(f"the API server shows the version {shown}")
    _whole_only(bench, OLD_VERSION)


def with_all_gates(bench: Bench) -> None:
    """With all gates GPUs are published both ways again, and a pod's status shows the GPU's health."""
    _restart(bench)
    _shows(bench, {gpu: _BOTH for gpu in uuids(2)})
    dra = bench.berth.node()["dra"]
    if dra["dropsTaints"] or "noShares" in dra or "noCounters" in dra:
        raise TestError(f"the API shows {dra}")
    pod = _runs(bench, "known", set(uuids(2)))
    until("the pod's status shows a healthy GPU", CHANGES_SECONDS, lambda: _health(bench, pod) == ["Healthy"])
    delete_all(bench)


# NVLink.


def pairs_before_order(bench: Bench) -> None:
    """Two claims for two GPUs each, created at once, get a pair each."""
    create_classes(bench)
    _ordered(bench)
    for name in ("first", "second"):
        create_claim(bench, name, count=2)
    for name in ("first", "second"):
        _runs_on_pair(bench, name)


def pairs_after_order(bench: Bench) -> str:
    """Two more claims get a pair each once the slices have the order of the GPUs that are left."""
    begin = time.monotonic()
    _ordered(bench)
    took = time.monotonic() - begin
    for name in ("third", "fourth"):
        create_claim(bench, name, count=2)
        _runs_on_pair(bench, name)
    return f"ordered_within_s={took:.0f}"


def pairs_again(bench: Bench) -> str:
    """GPUs that claims of two pairs have released are given as pairs again."""
    for name in ("second", "third"):
        _release(bench, name)
    begin = time.monotonic()
    _ordered(bench)
    took = time.monotonic() - begin
    create_claim(bench, "again", count=2)
    _runs_on_pair(bench, "again")
    delete_all(bench)
    return f"ordered_within_s={took:.0f}"


def pairs_by_constraint(bench: Bench) -> None:
    """A claim for GPUs of one pair gets the only pair that is left, and waits when none is left."""
    gpus = uuids(8)
    broken = [pair[0] for pair in PAIRS[:3]]
    for gpu in broken:
        start_with_claim(bench, f"single-{gpu}", uuid=gpus[gpu])
    create_claim(bench, "whole-pair", count=2, same_attribute="nvlinkPair")
    _runs_on_pair(bench, "whole-pair")
    create_waiting(bench, "no-pair", count=2, same_attribute="nvlinkPair")
    delete_all(bench)


# A hundred devices.


def hundred_devices(bench: Bench) -> str:
    """A hundred devices, 18 of them with 9 sets of counters, are one complete pool."""
    create_classes(bench)
    begin = time.monotonic()

    def look() -> list[dict]:
        pool = complete_pool(bench)
        devices = sum(len(spec.get("devices", [])) for spec in pool)
        if devices != DEVICES:
            raise TestError(f"it has {devices} devices")
        return pool

    pool = until(f"the pool has {DEVICES} devices", 3 * PUBLISHED_SECONDS, look)
    counters = [len(spec["sharedCounters"]) for spec in pool if "sharedCounters" in spec]
    consumers = [device["name"] for device in published_devices(bench) if "consumesCounters" in device]
    if (counters, len(consumers)) != ([8, 1], 2 * MIXED_GPUS):
        raise TestError(f"the slices have {counters} sets of counters, and {consumers} take some")
    if bench.berth.node()["dra"]["devices"] != DEVICES:
        raise TestError(f"the API shows {bench.berth.node()['dra']}")
    return f"devices={DEVICES} slices={len(pool)} published_within_s={time.monotonic() - begin:.1f}"


def claims_of_hundred(bench: Bench) -> None:
    """Claims get a whole GPU, a share of one, and the last instance of the last slice."""
    mixed = set(uuids(MIXED_GPUS))
    _runs(bench, "whole", mixed)
    _runs(bench, "shared", mixed, SHARED_CLASS)
    attributes = [device["attributes"] for device in complete_pool(bench)[-1]["devices"]]
    last = [one["uuid"]["string"] for one in attributes if one["type"]["string"] == "mig"][-1]
    _runs(bench, "instance", {last}, MIG_CLASS, uuid=last)
    delete_all(bench)


def old_driver_and_long_model(bench: Bench) -> None:
    """The API server takes the driver version 535.54.03 as a semantic version, and the first 64 characters of a model's name."""
    for device in published_devices(bench):
        attributes = device["attributes"]
        shown = attributes["driverVersion"]["version"], attributes["productName"]["string"]
        if shown != ("535.54.3", LONG_MODEL[:64]):
            raise TestError(f"{device['name']} has {shown}")


# What the cases share.


def _restart(bench: Bench, *off: str, server: Path | None = None) -> None:
    """Restarts Berth, the kubelet and the control plane, with these feature gates off and all others on."""
    bench.berth.stop()
    _configure(bench, *off, server=server)
    start_registered(bench)


def _restart_control_plane(bench: Bench, *off: str) -> None:
    """Restarts only the control plane, with these feature gates off and all others on. The kubelet, Berth and the slices stay."""
    bench.node.cluster.restart({name: False for name in off})
    bench.node.cluster.ready()
    # The kubelet waits longer and longer before it watches its pods again.
    watched = bench.node.run(Pod("watched", [Container("main", {})]))
    bench.node.running(watched, WATCHED_SECONDS)
    bench.node.cluster.kubectl("delete", "pod", watched.name)


def _configure(bench: Bench, *off: str, server: Path | None = None) -> None:
    """Restarts control plane and kubelet without these feature gates."""
    gates = {name: False for name in off}
    bench.node.kubelet.stop()
    bench.node.cluster.restart(gates, server)
    bench.node.kubelet.feature_gates = gates
    bench.node.kubelet.start()
    bench.node.cluster.ready()


def _shows(bench: Bench, wanted: dict[str, set[str]]) -> None:
    """Waits until the slices have exactly these kinds of devices of each GPU."""

    def look() -> bool:
        shown: dict[str, set[str]] = {}
        for device in published_devices(bench):
            attributes = device["attributes"]
            shown.setdefault(attributes["uuid"]["string"], set()).add(attributes["type"]["string"])
        if shown != wanted:
            raise TestError(f"they have {shown}")
        return True

    until(f"the slices have {wanted}", 3 * PUBLISHED_SECONDS, look)


def _whole_only(bench: Bench, why: str) -> None:
    """The GPUs are published whole, without counters, Berth says why, and claims get whole GPUs only."""
    _shows(bench, {gpu: _WHOLE for gpu in uuids(2)})
    if any("sharedCounters" in spec for spec in complete_pool(bench)):
        raise TestError(f"the slices have counters: {complete_pool(bench)}")
    if any("consumesCounters" in device for device in published_devices(bench)):
        raise TestError(f"devices take counters: {published_devices(bench)}")
    _says(bench, "noShares", why)
    _runs(bench, "whole", set(uuids(2)))
    create_waiting(bench, "shared", SHARED_CLASS)
    delete_all(bench)


def _says(bench: Bench, field: str, text: str) -> None:
    """The API and `berth node show` say why something is not published."""

    def look() -> bool:
        shown = bench.berth.node()["dra"]
        if text not in shown.get(field, ""):
            raise TestError(f"the API shows {shown}")
        return True

    until(f"{field} names {text}", PUBLISHED_SECONDS, look)
    if text not in bench.berth.cli("node", "show"):
        raise TestError(f"berth node show says {bench.berth.cli('node', 'show')}")


def _runs(bench: Bench, name: str, of: set[str], device_class: str = DRIVER, **more) -> Pod:
    """A pod with a new claim for a device runs, and sees one of these GPUs or instances, the one that the API shows."""
    pod = start_with_claim(bench, name, device_class, **more)
    seen = injected(pod, sorted(of))
    shown = bench.berth.claims()[name]
    if len(seen) != 1 or shown["id"] not in pod.environment("main").values():
        raise TestError(f"of {of} the container has got {seen}, and the API shows {shown}")
    return pod


def _release(bench: Bench, name: str) -> None:
    bench.node.cluster.kubectl("delete", f"pod/{name}", f"resourceclaim/{name}", "--wait=false")
    until(f"the claim {name} is released", CHANGES_SECONDS, lambda: name not in bench.berth.claims())


def _health(bench: Bench, pod: Pod) -> list[str]:
    """The health of the devices of a pod's container, as the pod's status shows it."""
    (container,) = bench.node.cluster.pod(pod.name)["status"]["containerStatuses"]
    resources = container.get("allocatedResourcesStatus", [])
    return [device["health"] for one in resources for device in one.get("resources", [])]


def _ordered(bench: Bench) -> None:
    """Waits until the first two GPUs of the slices that no claim holds are a pair, and the next two."""

    def look() -> bool:
        held = {gpu for claim in bench.berth.claims().values() for gpu in claim["gpus"]}
        order = [device["attributes"]["uuid"]["string"] for device in published_devices(bench)]
        free = [uuids(8).index(gpu) for gpu in order if gpu not in held]
        if not all(_is_pair(free[at : at + 2]) for at in (0, 2)):
            raise TestError(f"their order is {free}")
        return True

    until("the slices begin with pairs", ORDERED_SECONDS, look)


def _runs_on_pair(bench: Bench, name: str) -> None:
    pod = start_pod(bench, pod_of(name, name))
    seen = [uuids(8).index(gpu) for gpu in injected(pod, uuids(8))]
    if not _is_pair(seen):
        raise TestError(f"the claim {name} has got the GPUs {seen}, which NVLink does not connect")


def _is_pair(gpus: list[int]) -> bool:
    return tuple(sorted(gpus)) in PAIRS


def _with_instances(fake: FakeGpus) -> None:
    for n, count in enumerate(INSTANCES):
        fake.split(MIXED_GPUS + n, count)
    fake.report(OLD_DRIVER, LONG_MODEL)


def _parts() -> list[str]:
    """The GPUs and instances of the setup with 100 devices."""
    return uuids(MIXED_GPUS) + [one for n, count in enumerate(INSTANCES) for one in instance_uuids(MIXED_GPUS + n, count)]


SCENARIOS = [
    Scenario(
        "slices-without-gates",
        Setup(gpus=2, mixed="both", cdi=True, api_server=True, claims=True),
        {
            "slices: without DRADeviceTaints a cordoned GPU is left out": without_taints,
            "slices: without DRAPartitionableDevices GPUs are published whole, and a GPU with held shares is left out": (
                without_counters
            ),
            "slices: without DRAConsumableCapacity GPUs are published whole": without_shares,
            "slices: without DRAExtendedResource only claims get GPUs": without_extended_resources,
            "slices: without ResourceHealthStatus claims run": without_health,
            "slices: at Kubernetes 1.36.1 GPUs are published whole": at_old_version,
            "slices: with all gates again GPUs are published whole and in shares": with_all_gates,
        },
        before=lambda: write_cdi_spec(uuids(2)),
        cluster=True,
        modules=(OLD_SERVER,),
    ),
    Scenario(
        "slices-by-nvlink",
        Setup(gpus=8, cdi=True, api_server=True, claims=True, more_policies=("topology",)),
        {
            "slices: claims for two GPUs get those that NVLink connects": pairs_before_order,
            "slices: further claims for two GPUs get linked pairs once the order was published again": pairs_after_order,
            "slices: a claim for two GPUs gets a linked pair of GPUs that were released": pairs_again,
            "slices: a claim that demands a pair gets one or nothing": pairs_by_constraint,
        },
        before=lambda: write_cdi_spec(uuids(8)),
        change_gpus=lambda fake: fake.connect(*PAIRS),
        cluster=True,
    ),
    Scenario(
        "slices-of-100-devices",
        Setup(
            gpus=MIXED_GPUS + len(INSTANCES),
            mixed="both",
            cdi=True,
            api_server=True,
            claims=True,
            more_policies=("exclusive",),
        ),
        {
            "slices: 100 devices with 9 sets of counters are a complete pool": hundred_devices,
            "slices: claims get a whole GPU, a share, and the last MIG instance of 100 devices": claims_of_hundred,
            "slices: an old driver's version and a model of 70 characters are accepted": old_driver_and_long_model,
        },
        before=lambda: write_cdi_spec(_parts()),
        change_gpus=_with_instances,
        cluster=True,
    ),
]
