"""Cases of the fleet at a real API server: the node is reported in its GPUNode and activates the stack that it names, and GPUMaintenances
take its GPUs out."""

from __future__ import annotations

import hashlib
import json
import time

from bench import Bench
from berth import SHARED, WHOLE, Setup, slice_of
from drains import DRAINED_SECONDS, no_eviction
from gpus import uuids
from kubelet import NODE_NAME
from places import REPO, RUN
from say import TestError, until
from scenario import Scenario
from wasm import trapping
from workloads import Worker

GPUS = 3
#: Of the setup whose GPUNode names stacks.
STACK_GPUS = 2
#: The shortest soak.
SOAK_SECONDS = 10
#: How long the policies of a gate are shadows: longer than pods take to start on a busy machine.
SHADOW_SECONDS = 45
#: Faults in a row that suspend a policy.
FAULTS = 5
#: Three slices of each GPU.
SLICE_MIB = 20480
#: The longest time from the suspension to the rollback, which calls all policies.
ROLLED_BACK_SECONDS = 10
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
    if header.split() != ["NAME", "GPUS", "AVAILABLE", "OUT", "HELD", "POLICY", "STACK", "WHY", "SEEN", "AGE"]:
        raise TestError(f"kubectl get gn: {header}")
    # Columns without a value are empty.
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
        status = maintenance(bench, "held").get("status", {})
        if (status.get("state"), status.get("holders")) != ("draining", 1):
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


def stack_settles(bench: Bench) -> str:
    """The stack of a GPUNode is activated, soaks and settles; while the GPUNode names one, no caller activates another. A restart of the
    daemon begins no second soak."""
    install(bench)
    bench.node.cluster.kubectl("delete", "gn,gm", "--all")
    bench.berth.start()
    bench.berth.registered(WHOLE)
    until("the GPUNode is reported", REPORTED_SECONDS, lambda: "status" in gpu_node(bench))
    if gpu_node(bench)["status"]["stack"] != {"origin": "file"}:
        raise TestError(f"without a stack it shows {gpu_node(bench)['status']['stack']}")
    begin = time.monotonic()
    name_stack(bench, "a" * 12, [_shares(bench, 2)])
    until_phase(bench, "Soaking", active="a" * 12)
    took = time.monotonic() - begin
    bench.allocatable({SHARED: 2 * STACK_GPUS})
    until_phase(bench, "Settled", good="a" * 12, seconds=SOAK_SECONDS + REPORTED_SECONDS)
    header, row = bench.node.cluster.kubectl("get", "gn").splitlines()
    if row.split()[5:8] != ["team-share", "Settled", "GPUsAvailable"]:
        raise TestError(f"kubectl get gn: {header} / {row}")
    if condition(gpu_node(bench)["status"], "Synced") != ("True", "Settled"):
        raise TestError(f"its conditions are {gpu_node(bench)['status']['conditions']}")
    for command in (["policy", "reset"], ["policy", "rollback"]):
        said = bench.berth.fails(*command)
        if f"kubectl edit gpunode {NODE_NAME}" not in said:
            raise TestError(f"berth {' '.join(command)} says {said}")
    if bench.berth.stack()[1:] != ("fleet", ["timeslice"]):
        raise TestError(f"the active stack is {bench.berth.stack()}")
    revision = bench.berth.stack()[0]
    restart(bench)
    shown = bench.berth.node()["fleet"]["stack"]
    if (shown["phase"], bench.berth.stack()[0]) != ("Settled", revision):
        raise TestError(f"after a restart GET /node shows {shown}, and the stack is {bench.berth.stack()}")
    return f"activated_within_s={took:.1f}"


def stack_rolled_back(bench: Bench) -> str:
    """A revision is activated only once the node has all of its policies. When one of them traps five times in a row, the daemon activates
    the settled revision again. The bad revision is not tried again, also after a restart, until its attempt is raised."""
    # An activation calls `admit` only of policies that offer nothing, so that a trap there shows with the first pod.
    bad = trapping((REPO / "policies-wasm" / "prebuilt" / "memory.wasm").read_bytes(), "admit")
    resource = slice_of(SLICE_MIB)
    parameters = json.dumps({"sizes": [{"resource": resource, "memoryMiB": SLICE_MIB}]})
    digest = hashlib.sha256(bad).hexdigest()
    entry = {"name": "memory", "layer": f"sha256:{digest}", "parameters": parameters, "permissions": {"resources": [resource]}}
    name_stack(bench, "b" * 12, [entry], soak="10m")
    until_phase(bench, "Pulling", active="a" * 12)
    if condition(gpu_node(bench)["status"], "Synced") != ("False", "Pulling"):
        raise TestError(f"its conditions are {gpu_node(bench)['status']['conditions']}")
    path = RUN / "bad.wasm"
    path.write_bytes(bad)
    bench.berth.cli("policy", "push", str(path))
    until_phase(bench, "Soaking", active="b" * 12)
    bench.allocatable({resource: FAULTS + 1})
    bench.start(*[bench.pod(f"calls-{n}", {"main": 1}, resource=resource) for n in range(FAULTS)])
    begin = time.monotonic()
    until("the settled revision is active again", ROLLED_BACK_SECONDS, lambda: bench.berth.stack()[2] == ["timeslice"], every=0.05)
    took = time.monotonic() - begin
    until_phase(bench, "RolledBack", active="a" * 12, good="a" * 12)
    failed = gpu_node(bench)["status"]["stack"]["failed"]
    if (failed["revision"], failed["attempt"]) != ("b" * 12, 1) or "suspended" not in failed["reason"]:
        raise TestError(f"it shows {failed}")
    for pod in bench.running:
        pod.beats("main")
    revision = bench.berth.stack()[0]
    restart(bench)
    until_phase(bench, "RolledBack", active="a" * 12)
    time.sleep(QUIET_SECONDS)
    if bench.berth.stack()[0] != revision:
        raise TestError(f"it was tried again: {bench.berth.stack()}")
    name_stack(bench, "b" * 12, [entry], attempt=2)
    until_phase(bench, "Soaking", active="b" * 12)
    name_stack(bench, "a" * 12, [_shares(bench, 2)])
    until_phase(bench, "Soaking", active="a" * 12)
    until_phase(bench, "Settled", active="a" * 12, seconds=SOAK_SECONDS + REPORTED_SECONDS)
    return f"rolled_back_within_s={took:.1f}"


def stack_gated(bench: Bench) -> str:
    """The gate refuses a policy that denies every pod, both with recorded decisions and with live ones; meanwhile the node grants as
    before. With a gate that allows the denials, the policy is activated."""
    # The pods of the case before hold all GPUs in slices.
    bench.node.cluster.kubectl("delete", "pod", *(pod.name for pod in bench.running), "--grace-period=1")
    bench.running.clear()
    bench.allocatable({SHARED: 2 * STACK_GPUS})
    shares = _shares(bench, 2)
    none = _entry(bench, "quota", {"default": {"devices": 0}})
    name_stack(bench, "d" * 12, [none, shares], gate={"replayDecisions": 100})
    until_phase(bench, "Refused", active="a" * 12)
    replayed = gpu_node(bench)["status"]["stack"]["failed"]["reason"]
    # The pod of an admission may not have been known yet, so that quota allowed it.
    if "recorded admissions, policy quota@" not in replayed:
        raise TestError(f"it shows {replayed}")
    name_stack(bench, "e" * 12, [none, shares], gate={"shadowFor": f"{SHADOW_SECONDS}s"})
    until_phase(bench, "Gating", active="a" * 12)
    if condition(gpu_node(bench)["status"], "Synced") != ("False", "Gating"):
        raise TestError(f"its conditions are {gpu_node(bench)['status']['conditions']}")
    pods = [bench.pod(f"gated-{n}", {"main": 1}, resource=SHARED) for n in range(3)]
    bench.start(*pods)
    until_phase(bench, "Refused", active="a" * 12, seconds=SHADOW_SECONDS + REPORTED_SECONDS)
    shadowed = gpu_node(bench)["status"]["stack"]["failed"]["reason"]
    if "live admissions, policy quota@" not in shadowed:
        raise TestError(f"it shows {shadowed}")
    for pod in pods:
        pod.beats("main")
    name_stack(bench, "e" * 12, [none, shares], gate={"shadowFor": "10s", "replayDecisions": 100, "maxNewDenialsPercent": 100})
    until_phase(bench, "Soaking", active="e" * 12, seconds=10 + REPORTED_SECONDS)
    name_stack(bench, "a" * 12, [shares])
    until_phase(bench, "Settled", active="a" * 12, seconds=SOAK_SECONDS + REPORTED_SECONDS)
    return shadowed


def stack_replaced_by_break_glass(bench: Bench) -> str:
    """A caller activates another stack in place of the GPUNode's for a minute, which survives a restart. Then the stack before it is active again, without
    a new soak; a reset ends another break-glass at once."""
    path = RUN / "break-glass.yaml"
    path.write_text("- policy: exclusive\n", encoding="utf-8")
    order = ["policy", "activate", str(path)]
    said = bench.berth.fails(*order)
    if "--break-glass 2h" not in said:
        raise TestError(f"without --break-glass it says {said}")
    begin = time.monotonic()
    bench.berth.cli(*order, "--break-glass", "1m", "--reason", "an outage", "--yes")
    until_phase(bench, "LocalOverride", origin="breakGlass", good="a" * 12)
    if condition(gpu_node(bench)["status"], "Synced") != ("False", "LocalOverride"):
        raise TestError(f"its conditions are {gpu_node(bench)['status']['conditions']}")
    restart(bench)
    if bench.berth.stack()[1:] != ("breakGlass", ["exclusive"]):
        raise TestError(f"after a restart the active stack is {bench.berth.stack()}")
    until("the stack before it is active again", 60 + ROLLED_BACK_SECONDS, lambda: bench.berth.stack()[2] == ["timeslice"])
    took = time.monotonic() - begin
    if took < 60:
        raise TestError(f"the break-glass of a minute has ended after {took:.1f} s")
    until_phase(bench, "Settled", active="a" * 12, origin="fleet")
    bench.berth.cli(*order, "--break-glass", "24h", "--reason", "another outage", "--yes")
    until_phase(bench, "LocalOverride", origin="breakGlass")
    bench.berth.cli("policy", "reset", "--yes")
    until_phase(bench, "Settled", active="a" * 12, origin="fleet")
    return f"ended_after_s={took:.1f}"


def stack_refused(bench: Bench) -> str:
    """What the definition or the node cannot accept is refused with the reason, and the active stack stays."""
    shares = _shares(bench, 2)
    for changes, words in (
        ({"soak": "9s"}, "from 10s to 24h"),
        ({"gate": {}}, "replayDecisions or shadowFor"),
        ({"gate": {"shadowFor": "9s"}}, "from 10s to 24h"),
        ({"gate": {"replayDecisions": 0}}, "greater than or equal to 1"),
        ({"revision": "a"}, "should match"),
        ({"policy": ""}, "policy"),
        ({"entries": [shares] * 9}, "at most 8 items"),
        ({"entries": [shares | {"layer": "a"}]}, "should match"),
        ({"entries": [shares | {"onFault": "explode"}]}, "Unsupported value"),
        ({"entries": [shares | {"permissions": {"shareMax": 129}}]}, "less than or equal to 128"),
    ):
        try:
            name_stack(bench, **{"revision": "c" * 12, "entries": [shares], **changes})
        except TestError as answer:
            if words not in str(answer):
                raise TestError(f"{changes}: not {words!r}: {answer}") from answer
        else:
            raise TestError(f"{changes} was accepted")
    revision = bench.berth.stack()[0]
    name_stack(bench, "c" * 12, [shares | {"parameters": '{"replicas": "many"}'}])
    until_phase(bench, "Refused", active="a" * 12)
    why = bench.berth.node()["fleet"]["stack"]["why"]
    if "replicas" not in why or bench.berth.stack()[0] != revision:
        raise TestError(f"GET /node says {why}, and the stack is {bench.berth.stack()}")
    bench.node.cluster.kubectl("patch", "gn", NODE_NAME, "--type=merge", "-p", '{"spec": {"stack": null}}')
    until("the GPUNode names no stack", REPORTED_SECONDS, lambda: "phase" not in gpu_node(bench)["status"]["stack"])
    if bench.berth.stack()[0] != revision:
        raise TestError(f"the stack has changed: {bench.berth.stack()}")
    bench.berth.cli("policy", "reset")
    if bench.berth.stack()[1] != "file":
        raise TestError(f"the active stack is {bench.berth.stack()}")
    return why


def restart(bench: Bench) -> None:
    """Kills the daemon, starts it and waits until it has read the GPUNode. The resource of its configuration has no device."""
    bench.berth.crash()
    bench.berth.start_unready()
    until("the daemon has read the GPUNode", REPORTED_SECONDS, lambda: bench.berth.node()["fleet"].get("stack", {}).get("phase"))


def _shares(bench: Bench, replicas: int) -> dict:
    """An entry that divides each GPU."""
    return _entry(bench, "timeslice", {"replicas": replicas, "resource": SHARED})


def _entry(bench: Bench, name: str, parameters: dict) -> dict:
    """An entry of a policy that comes with the daemon."""
    listed = json.loads(bench.berth.cli("policy", "list", "-o", "json"))["items"]
    (digest,) = [one["digest"] for one in listed if one["name"] == name and one["shipped"]]
    return {"name": name, "layer": f"sha256:{digest}", "parameters": json.dumps(parameters)}


def name_stack(bench: Bench, revision: str, entries: list[dict], soak: str = f"{SOAK_SECONDS}s", **more) -> None:
    """Replaces the stack in the specification of the GPUNode."""
    stack = {"policy": "team-share", "revision": revision, "soak": soak, "entries": entries, **more}
    change = [{"op": "add", "path": "/spec/stack", "value": stack}]
    bench.node.cluster.kubectl("patch", "gn", NODE_NAME, "--type=json", "-p", json.dumps(change))


def until_phase(bench: Bench, phase: str, seconds: float = REPORTED_SECONDS, **fields: str) -> None:
    """Waits until the status of the GPUNode shows this phase and these fields of the stack."""

    def look() -> bool:
        shown = gpu_node(bench)["status"]["stack"]
        if shown.get("phase") != phase or any(shown.get(name) != value for name, value in fields.items()):
            raise TestError(f"it shows {shown}")
        return True

    until(f"the GPUNode shows that the stack is {phase}", seconds, look)


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
        status = gpu_node(bench).get("status")
        if not status:
            raise TestError("it has no status yet")
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
    Scenario(
        "fleet stacks",
        Setup(gpus=STACK_GPUS, api_server=True, fleet=True),
        {
            "the stack that a GPUNode names is activated, soaks and settles": stack_settles,
            "a stack of a GPUNode is rolled back when one of its policies is suspended": stack_rolled_back,
            "a stack of a GPUNode that denies too much is stopped by its gate": stack_gated,
            "a caller activates another stack in place of the GPUNode's for a limited time": stack_replaced_by_break_glass,
            "a stack of a GPUNode that cannot be used is refused, and the active one stays": stack_refused,
        },
        cluster=True,
        berth_first=False,
    ),
]
