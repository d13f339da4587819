"""Cases of the fleet at a real API server: the node is reported in its GPUNode, and GPUMaintenances take its GPUs out."""

from __future__ import annotations

import json
import time

from bench import Bench
from berth import WHOLE, Setup
from drains import DRAINED_SECONDS, no_eviction
from gpus import uuids
from kubelet import NODE_NAME
from places import REPO, RUN
from say import TestError, until
from scenario import Scenario
from workloads import Worker

GPUS = 3
KINDS = REPO / "deploy" / "helm" / "berth" / "files" / "crds"
DEFINITION = "gpumaintenances.fleet.berth.dev"
#: A change is written within 5 s, and at most every 10 s after three of them.
REPORTED_SECONDS = 20
#: A list or an event of the watch, and a command to the keeper.
ORDERED_SECONDS = 10
#: How long the test checks that nothing changes.
QUIET_SECONDS = 5

#: Of no GPU here.
_UUID = "GPU-00000000-0000-0000-0000-000000000000"

#: Each rule of the definitions, with a specification that it refuses and words of its message.
REFUSED = (
    ({"uuids": ["*", _UUID]}, "remove the other UUIDs"),
    ({"uuids": []}, "at least 1 item"),
    ({"uuids": [_UUID, _UUID]}, "Duplicate value"),
    ({"uuids": ["2"]}, "should match"),
    ({"uuids": [_UUID[:-1]]}, "should match"),
    ({"mode": "cordon", "evict": True}, "only with mode: drain"),
    ({"mode": "cordon", "deadline": "1m"}, "only with mode: drain"),
    ({"atDeadline": "wait"}, "only with a deadline"),
    ({"deadline": "1m", "atDeadline": "delete"}, "only with evict: true"),
    ({"deadline": "9s"}, "from 10s to 24h"),
    ({"deadline": "25h"}, "from 10s to 24h"),
    ({"deadline": "soon"}, "deadline"),
    ({"mode": "reset"}, "Unsupported value"),
    ({"reason": "two\nlines"}, "should match"),
    ({"nodeName": ""}, "nodeName"),
)


def node_reported(bench: Bench) -> str:
    """The daemon creates a GPUNode that the node owns, and kubectl shows its columns."""
    install(bench)
    begin = time.monotonic()
    bench.berth.start()
    bench.berth.registered(WHOLE)
    until("the GPUNode is reported", REPORTED_SECONDS, lambda: "status" in gpu_node(bench))
    took = time.monotonic() - begin
    shown = gpu_node(bench)
    (owner,) = shown["metadata"]["ownerReferences"]
    node = bench.node.cluster.node()
    if (owner["kind"], owner["name"], owner["uid"]) != ("Node", NODE_NAME, node["metadata"]["uid"]):
        raise TestError(f"its owner is {owner}")
    header, row = bench.node.cluster.kubectl("get", "gn").splitlines()
    if header.split() != ["NAME", "GPUS", "AVAILABLE", "OUT", "HELD", "WHY", "SEEN", "AGE"]:
        raise TestError(f"kubectl get gn: {header}")
    if row.split()[:6] != [NODE_NAME, str(GPUS), str(GPUS), "0", "0", "GPUsAvailable"]:
        raise TestError(f"kubectl get gn: {row}")
    until("GET /node shows no error", ORDERED_SECONDS, lambda: bench.berth.node()["fleet"] == {})
    return f"reported_within_s={took:.1f}"


def changes_reported(bench: Bench) -> str:
    """A cordon and an XID are in the GPUNode within seconds, and leave it again."""
    first, second, _ = uuids(GPUS)
    begin = time.monotonic()
    bench.berth.cordon(first)
    until_out(bench, 1, "GPUCordoned")
    took = time.monotonic() - begin
    (shown,) = [gpu for gpu in gpu_node(bench)["status"]["gpus"] if gpu["uuid"] == first]
    if shown["drain"] != "cordoned" or len(shown["marks"]) != 1:
        raise TestError(f"the GPUNode shows {shown}")
    bench.berth.fake.xid(second, 79)
    until_out(bench, 2, "GPUsUnavailable")
    bench.berth.uncordon(first)
    bench.berth.cli("gpu", "mark-healthy", second, "--reason", "reseated")
    until_out(bench, 0, "GPUsAvailable")
    return f"reported_within_s={took:.1f}"


def maintenance_drains(bench: Bench) -> str:
    """A GPUMaintenance evicts the GPU's pod and drains the GPU; once it is deleted, the GPU is granted again."""
    bench.shared = worker = Worker(bench, "worker")
    pod = worker.runs()
    (gpu,) = bench.gpus_seen(pod, "main")
    begin = time.monotonic()
    create(bench, "fan", uuids=[gpu], evict=True, deadline="10m", reason="new fan")
    bench.node.cluster.kubectl("wait", "--for=condition=Drained", "gm/fan", f"--timeout={DRAINED_SECONDS}s", seconds=DRAINED_SECONDS + 10)
    took = time.monotonic() - begin
    if bench.berth.drain(gpu) != "drained":
        raise TestError(f"the object says drained, and the GPU is {bench.berth.drain(gpu)}")
    header, row = bench.node.cluster.kubectl("get", "gm").splitlines()
    if header.split() != ["NAME", "NODE", "MODE", "STATE", "HOLDERS", "WHY", "AGE"]:
        raise TestError(f"kubectl get gm: {header}")
    if row.split()[:6] != ["fan", NODE_NAME, "drain", "drained", "0", "Drained"]:
        raise TestError(f"kubectl get gm: {row}")
    moved = worker.runs(other_than=pod)
    if gpu in bench.gpus_seen(moved, "main"):
        raise TestError(f"the new pod is on the drained GPU {gpu}")
    until_out(bench, 1, "GPUDrained")
    delete(bench, "fan")
    until("the GPU is granted again", ORDERED_SECONDS, lambda: bench.berth.drain(gpu) == "active")
    bench.allocatable({WHOLE: GPUS})
    return f"drained_within_s={took:.0f}"


def blockers_named(bench: Bench) -> None:
    """While a disruption budget allows no eviction, the object names the pod and reconciles; a deadline that passes is Late."""
    worker: Worker = bench.shared
    pod = bench.running[-1]
    (gpu,) = bench.gpus_seen(pod, "main")
    no_eviction(bench, worker)
    create(bench, "held", uuids=[gpu], evict=True, deadline="15s")

    def waits() -> bool:
        status = maintenance(bench, "held").get("status", {"state": "", "holders": 0})
        if status["state"] != "draining" or status["holders"] != 1:
            raise TestError(f"its status is {status}")
        (reconciling,) = [one for one in status["conditions"] if one["type"] == "Reconciling"]
        if reconciling["status"] != "True" or "waits for its disruption budget" not in reconciling["message"]:
            raise TestError(f"its condition is {reconciling}")
        return [one.split("/")[1] for one in status["blockers"]] == [pod.name]

    until("the object names its blocker", 2 * ORDERED_SECONDS, waits)
    until("the object is late", 40, lambda: condition(maintenance(bench, "held")["status"], "Stalled") == ("True", "Late"))
    pod.beats("main")
    bench.node.cluster.kubectl("delete", "poddisruptionbudget", "keep")
    bench.node.cluster.kubectl("wait", "--for=condition=Drained", "gm/held", f"--timeout={DRAINED_SECONDS}s", seconds=DRAINED_SECONDS + 10)
    worker.runs(other_than=pod)
    delete(bench, "held")
    until("the GPU is granted again", ORDERED_SECONDS, lambda: bench.berth.drain(gpu) == "active")


def each_owner_its_own(bench: Bench) -> None:
    """A caller and an object both cordon: each removes its own mark, over a restart, and no caller removes that of the object."""
    (gpu,) = uuids(1)
    bench.berth.cordon(gpu)
    create(bench, "inspect", uuids=[gpu], mode="cordon")
    until("the object has its mark", ORDERED_SECONDS, lambda: len(marks(bench, gpu)) == 2)
    bench.berth.crash()
    bench.berth.start()
    said = bench.berth.cli("gpu", "uncordon", gpu, "--owner", "all")
    (left,) = marks(bench, gpu)
    if left["by"] != "GPUMaintenance/inspect" or "kubectl delete gpumaintenance inspect" not in said:
        raise TestError(f"left is {left}, and the command says {said}")
    refused = bench.berth.fails("gpu", "uncordon", gpu, "--owner", left["owner"])
    if "GPUMaintenance" not in refused:
        raise TestError(f"the command says {refused}")
    bench.berth.cordon(gpu)
    delete(bench, "inspect")
    until("the mark of the object is gone", ORDERED_SECONDS, lambda: len(marks(bench, gpu)) == 1)
    if bench.berth.drain(gpu) != "cordoned":
        raise TestError(f"the GPU is {bench.berth.drain(gpu)}")
    bench.berth.uncordon(gpu)


def deleted_while_down(bench: Bench) -> None:
    """The object is deleted while no daemon runs: the daemon that starts removes the marks. An object of another node changes nothing."""
    create(bench, "all", uuids=["*"], mode="cordon")
    until("all GPUs are cordoned", ORDERED_SECONDS, lambda: len(bench.berth.drains("cordoned")) == GPUS)
    bench.berth.stop()
    delete(bench, "all")
    create(bench, "elsewhere", nodeName="another", uuids=["*"], mode="cordon")
    bench.berth.start()
    until("all GPUs are granted", 2 * ORDERED_SECONDS, lambda: len(bench.berth.drains("active")) == GPUS)
    delete(bench, "elsewhere")


def unknown_gpu(bench: Bench) -> None:
    """The object names a GPU that the node does not have: it says so, and the other GPU is cordoned."""
    (gpu,) = uuids(1)
    create(bench, "gone", uuids=[_UUID, gpu], mode="cordon")

    def stalled() -> bool:
        status = maintenance(bench, "gone").get("status", {})
        return "state" in status and condition(status, "Stalled") == ("True", "NoSuchGPU") and status["state"] == "cordoned"

    until("the object is stalled", ORDERED_SECONDS, stalled)
    delete(bench, "gone")
    until("the GPU is granted again", ORDERED_SECONDS, lambda: bench.berth.drain(gpu) == "active")


def refused(bench: Bench) -> str:
    """Each rule of the definition refuses its example, and a specification cannot be changed."""
    for changes, words in REFUSED:
        try:
            create(bench, "bad", **{"uuids": [_UUID], **changes})
        except TestError as answer:
            if words not in str(answer):
                raise TestError(f"{changes}: not {words!r}: {answer}") from answer
        else:
            raise TestError(f"{changes} was accepted")
    create(bench, "fixed", nodeName="another", uuids=[_UUID], mode="cordon")
    try:
        bench.node.cluster.kubectl("patch", "gm", "fixed", "--type=merge", "-p", '{"spec": {"mode": "drain"}}')
    except TestError as answer:
        if "cannot be changed" not in str(answer):
            raise
    else:
        raise TestError("the specification was changed")
    delete(bench, "fixed")
    return f"examples={len(REFUSED) + 1}"


def definition_deleted(bench: Bench) -> None:
    """Deleting the definition deletes all objects. No GPU is granted again because of that, neither after a restart of the daemon nor
    once the definition is there again; the daemon names the command that removes the mark."""
    (gpu,) = uuids(1)
    create(bench, "kept", uuids=[gpu], mode="cordon")
    until("the GPU is cordoned", ORDERED_SECONDS, lambda: bench.berth.drain(gpu) == "cordoned")
    bench.node.cluster.kubectl("delete", "crd", DEFINITION)
    for _ in range(2):
        end = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < end:
            if bench.berth.drain(gpu) != "cordoned":
                raise TestError("the GPU is granted again")
            time.sleep(0.5)
        bench.berth.crash()
        bench.berth.start()
    why = until("GET /node says why", REPORTED_SECONDS, lambda: bench.berth.node()["fleet"].get("maintenancesError"))
    if "kubectl apply -f" not in why:
        raise TestError(f"GET /node says {why}")
    install(bench)
    bench.berth.crash()
    bench.berth.start()
    why = until("GET /node says why", REPORTED_SECONDS, lambda: bench.berth.node()["fleet"].get("removalError"))
    if bench.berth.drain(gpu) != "cordoned":
        raise TestError("the GPU is granted again")
    bench.berth.cli(*why.partition("`berth ")[2].partition("`")[0].split())
    if bench.berth.drain(gpu) != "active":
        raise TestError(f"after the command of {why!r} the GPU is {bench.berth.drain(gpu)}")
    until("no mark is kept", REPORTED_SECONDS, lambda: bench.berth.node()["fleet"] == {})


def gpu_node_recreated(bench: Bench) -> None:
    """A GPUNode that is deleted is back with the next change."""
    (gpu,) = uuids(1)
    bench.node.cluster.kubectl("delete", "gn", NODE_NAME)
    bench.berth.cordon(gpu)
    until_out(bench, 1, "GPUCordoned", 2 * REPORTED_SECONDS)
    bench.berth.uncordon(gpu)
    until_out(bench, 0, "GPUsAvailable", 2 * REPORTED_SECONDS)


def install(bench: Bench) -> None:
    """Installs the kinds, and waits until the API server serves them."""
    bench.node.cluster.kubectl("apply", "-f", KINDS)
    bench.node.cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", KINDS)


def create(bench: Bench, name: str, **spec) -> None:
    whole = {"nodeName": NODE_NAME, "mode": "drain", **spec}
    shown = {"apiVersion": "fleet.berth.dev/v1alpha1", "kind": "GPUMaintenance", "metadata": {"name": name}, "spec": whole}
    path = RUN / "maintenance.json"
    path.write_text(json.dumps(shown), encoding="utf-8")
    bench.node.cluster.kubectl("create", "-f", path)


def delete(bench: Bench, name: str) -> None:
    bench.node.cluster.kubectl("delete", "gm", name)


def maintenance(bench: Bench, name: str) -> dict:
    return bench.node.cluster.get(f"/apis/fleet.berth.dev/v1alpha1/gpumaintenances/{name}")


def gpu_node(bench: Bench) -> dict:
    return bench.node.cluster.get(f"/apis/fleet.berth.dev/v1alpha1/gpunodes/{NODE_NAME}")


def condition(status: dict, kind: str) -> tuple[str, str]:
    (one,) = [one for one in status.get("conditions", []) if one["type"] == kind]
    return one["status"], one["reason"]


def until_out(bench: Bench, out: int, reason: str, seconds: float = REPORTED_SECONDS) -> None:
    """Waits until the GPUNode shows so many GPUs out of use, with this reason."""

    def look() -> bool:
        status = gpu_node(bench)["status"]
        now = status["summary"]["out"], condition(status, "GPUsAvailable")[1]
        if now != (out, reason):
            raise TestError(f"it shows {now}")
        return True

    until(f"the GPUNode shows {out} GPUs out: {reason}", seconds, look)


def marks(bench: Bench, gpu: str) -> list[dict]:
    return json.loads(bench.berth.cli("gpu", "show", gpu, "-o", "json"))["drain"]["marks"]


SCENARIOS = [
    Scenario(
        "fleet",
        Setup(gpus=GPUS, api_server=True, fleet=True),
        {
            "a GPUNode shows the node's GPUs, and kubectl its columns": node_reported,
            "a GPUNode shows a cordon and an XID within seconds": changes_reported,
            "a GPUMaintenance drains a GPU and evicts its pod; deleted, the GPU is granted again": maintenance_drains,
            "a GPUMaintenance names the pods that block it, and a missed deadline": blockers_named,
            "a caller and a GPUMaintenance each remove their own mark, over a restart": each_owner_its_own,
            "a GPUMaintenance of all GPUs that is deleted while no daemon runs": deleted_while_down,
            "a GPUMaintenance names a GPU that the node does not have": unknown_gpu,
            "each rule of the definitions refuses its example": refused,
            "no cordon is removed when the definition of the kind is deleted": definition_deleted,
            "a GPUNode that was deleted is created again": gpu_node_recreated,
        },
        cluster=True,
        berth_first=False,
    ),
]
