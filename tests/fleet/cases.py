"""Cases of rollouts, in the order in which they run: each begins with what the one before has left."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime, timezone

from cluster import CONTROLLERS, FOLDER, Fleet, steps, timeslice
from registry import Registry
from say import TestError, until

#: A node that fails halts the rollout within this time of being assigned the revision (docs/fleet.md has no number; this is the goal).
HALTED_SECONDS = 60
#: The longest time for a rollout of three steps with soaks of 10 s, on a busy machine.
COMPLETE_SECONDS = 240
#: How long the leader is frozen, and nothing of it may land after that.
FROZEN_SECONDS = 60
#: How long the test checks that nothing is assigned.
QUIET_SECONDS = 15
#: A daemon reports a change of its stack within seconds, and at most every 10 s after three of them.
REPORTED_SECONDS = 30

POLICY = "team-share"
#: On loopback.
REGISTRY = "localhost:5000"

#: Each rule of SharingPolicy, with a change of the specification that it refuses and words of its message.
REFUSED = (
    ({"stack": [{"name": "a"}]}, "either ref or shipped"),
    ({"stack": [{"name": "a", "ref": "registry.example/a:1", "shipped": True}]}, "either ref or shipped"),
    ({"stack": [{"name": "a", "ref": "registry.example/a"}]}, "should match"),
    ({"stack": [{"name": "a", "ref": "registry.example/a@sha256:12"}]}, "should match"),
    ({"stack": [{"name": "a", "shipped": True}] * 9}, "at most 8 items"),
    ({"priority": 1_000_001}, "less than or equal to"),
    ({"selector": {"pool": 1}}, "expected string"),
    ({"rollout": {"steps": []}}, "at least 1 item"),
    ({"rollout": {"steps": [{"percent": 100}] * 7}}, "at most 6 items"),
    ({"rollout": {"steps": [{"percent": 10, "nodesPerModel": 1}, {"percent": 100}]}}, "either percent or nodesPerModel"),
    ({"rollout": {"steps": [{}, {"percent": 100}]}}, "either percent or nodesPerModel"),
    ({"rollout": {"steps": [{"percent": 50}, {"percent": 10}, {"percent": 100}]}}, "must not decrease"),
    ({"rollout": {"steps": [{"percent": 50}]}}, "must have percent: 100"),
    ({"rollout": {"steps": [{"nodesPerModel": 1}]}}, "must have percent: 100"),
    ({"rollout": {"steps": [{"percent": 100, "soak": "9s"}]}}, "from 10s to 24h"),
    ({"rollout": {"steps": [{"percent": 100}], "perSecond": 51}}, "less than or equal to 50"),
    ({"rollout": {"steps": [{"percent": 100}], "haltAt": {"percent": 0}}}, "greater than or equal to 1"),
    ({"rollout": {"steps": [{"percent": 100}], "onHalt": "stop"}}, "Unsupported value"),
    ({"gate": {}}, "replayDecisions or shadowFor"),
)


def refused(fleet: Fleet) -> str:
    """Each rule of the definition refuses its example."""
    whole = [{"name": "exclusive", "shipped": True}]
    for changes, words in REFUSED:
        try:
            fleet.apply("bad", **{"stack": whole, **changes})
        except TestError as answer:
            if words not in str(answer):
                raise TestError(f"{changes}: not {words!r}: {answer}") from answer
        else:
            raise TestError(f"{changes} was accepted")
    return f"examples={len(REFUSED)}"


def complete(fleet: Fleet) -> str:
    """A rollout reaches one node a model, then a share of the nodes, then all. kubectl shows its columns."""
    good = fleet.pack("timeslice", "good")
    begin = time.monotonic()
    fleet.apply(POLICY, [timeslice(good, 2)], rollout=steps(25, 100))
    canaries = fleet.until_rollout(POLICY, REPORTED_SECONDS, step=1, phase="Soaking", assigned=2)
    models = {one["status"]["models"][0] for one in fleet.gpu_nodes() if one["metadata"]["name"] in fleet.assigned(canaries["revision"])}
    if len(models) != 2:
        raise TestError(f"the first nodes have the models {models}")
    if fleet.health(POLICY) != ["InProgress", "Progressing"]:
        raise TestError(f"under way, kstatus and Argo CD see {fleet.health(POLICY)}")
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, step=2, phase="Soaking", assigned=-(-fleet.size // 4))
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, phase="Complete", settled=fleet.size)
    took = time.monotonic() - begin
    header, row = fleet.cluster.kubectl("get", "gsp").splitlines()
    if header.split() != ["NAME", "PRIORITY", "STEP", "TOTAL", "ASSIGNED", "SETTLED", "FAILED", "READY", "WHY", "AGE"]:
        raise TestError(f"kubectl get gsp: {header}")
    size = str(fleet.size)
    if row.split()[:8] != [POLICY, "3", size, size, size, "0", "True", "Settled"]:
        raise TestError(f"kubectl get gsp: {row}")
    if fleet.health(POLICY) != ["Current", "Healthy"]:
        raise TestError(f"at the end, kstatus and Argo CD see {fleet.health(POLICY)}")
    if fleet.has_difference(POLICY):
        raise TestError("the object differs from what was applied")
    if set(fleet.active().values()) != {canaries["revision"]}:
        raise TestError(f"active are {fleet.active()}")
    return f"nodes={fleet.size} complete_after_s={took:.0f}"


def halted(fleet: Fleet) -> str:
    """A policy that traps in `admit`, without a gate: the rollout is halted on one node a model, and undone."""
    good = fleet.rollout(POLICY)["revision"]
    bad = fleet.pack("timeslice", "traps", trap="admit")
    fleet.apply(POLICY, [timeslice(bad, 3)], rollout=steps(25, 100, soak="60s"))
    begin = until("nodes are assigned it", REPORTED_SECONDS, lambda: fleet.rollout(POLICY).get("assigned") and time.monotonic(), every=0.1)
    shown = fleet.until_rollout(POLICY, HALTED_SECONDS, revision_not=good, phase="Halted", step=1)
    took = time.monotonic() - begin
    message = fleet.until_reason(POLICY, "Halted", REPORTED_SECONDS, "Stalled")
    if "was suspended" not in message:
        raise TestError(f"it says {message}")
    if fleet.health(POLICY) != ["Failed", "Degraded"]:
        raise TestError(f"kstatus and Argo CD see {fleet.health(POLICY)}")
    settled_again(fleet, good)
    assigned = {event["objectRef"]["name"] for event in writes(fleet, "gpunodes", since=begin)}
    if len(assigned) > 2:
        raise TestError(f"{assigned} were assigned it")
    quiet(fleet)
    return f"revision={shown['revision']} halted_after_s={took:.1f} nodes_assigned={len(assigned)}"


def not_assigned_again(fleet: Fleet) -> None:
    """The halted revision is not assigned again: neither when the specification comes back, nor after a restart of the controller. With
    another attempt it is."""
    good, bad = fleet.policy(POLICY)["status"]["good"]["revision"], fleet.rollout(POLICY)["revision"]
    spec = fleet.policy(POLICY)["spec"]
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 2)], rollout=spec["rollout"])
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, phase="Complete", revision=good)
    fleet.apply(POLICY, spec["stack"], rollout=spec["rollout"])
    fleet.until_rollout(POLICY, REPORTED_SECONDS, phase="Halted", revision=bad)
    leader = fleet.controllers[CONTROLLERS[0]]
    leader.kill()
    leader.start()
    quiet(fleet)
    if fleet.assigned(bad):
        raise TestError(f"{fleet.assigned(bad)} were assigned it again")
    fleet.annotate(POLICY, f"attempt={bad}/2")
    fleet.until_rollout(POLICY, REPORTED_SECONDS + HALTED_SECONDS, phase="Halted", revision=bad, attempt=2)
    settled_again(fleet, good)


def controller_dead(fleet: Fleet) -> str:
    """The controller is killed once it has assigned the bad revision: each of these nodes rolls back by itself, and no other is assigned it."""
    good = fleet.policy(POLICY)["status"]["good"]["revision"]
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "traps", trap="admit"), 4)], rollout=steps(25, 100, soak="60s"))
    shown = fleet.until_rollout(POLICY, REPORTED_SECONDS, revision_not=fleet.rollout(POLICY)["revision"], step=1)
    until("two nodes are assigned it", REPORTED_SECONDS, lambda: len(fleet.assigned(shown["revision"])) == 2, every=0.05)
    fleet.controllers[CONTROLLERS[0]].kill()
    begin = time.monotonic()

    def rolled_back() -> bool:
        stacks = {one["metadata"]["name"]: one["status"]["stack"] for one in fleet.gpu_nodes()}
        assigned = fleet.assigned(shown["revision"])
        waiting = {name: stacks[name] for name in assigned if stacks[name].get("phase") != "RolledBack"}
        if waiting or set(fleet.active().values()) != {good}:
            raise TestError(f"{waiting}")
        return True

    until("these nodes have rolled back", HALTED_SECONDS + REPORTED_SECONDS, rolled_back)
    took = time.monotonic() - begin
    time.sleep(QUIET_SECONDS)
    if len(fleet.assigned(shown["revision"])) != 2:
        raise TestError(f"assigned are {fleet.assigned(shown['revision'])}")
    fleet.controllers[CONTROLLERS[0]].start()
    fleet.until_rollout(POLICY, REPORTED_SECONDS, phase="Halted", revision=shown["revision"])
    settled_again(fleet, good)
    return f"rolled_back_within_s={took:.0f}"


def gated(fleet: Fleet) -> str:
    """A policy whose calls all fail is stopped by the gate on one node a model; it is active nowhere. (One that denies is in the e2e.)"""
    good, before = fleet.policy(POLICY)["status"]["good"]["revision"], fleet.rollout(POLICY)["revision"]
    bad = [timeslice(fleet.pack("timeslice", "traps", trap="admit"), 11)]
    fleet.apply(POLICY, bad, rollout=steps(25, 100), gate={"shadowFor": "20s"})
    shown = fleet.until_rollout(POLICY, 20 + HALTED_SECONDS, revision_not=before, phase="Halted", step=1)
    if shown["revision"] in fleet.active().values():
        raise TestError(f"it was activated: {fleet.active()}")
    message = fleet.reason(POLICY, "Stalled")[2]
    if "live admissions, policy timeslice@" not in message:
        raise TestError(f"it says {message}")
    settled_again(fleet, good)
    return message


def away(fleet: Fleet) -> str:
    """Nodes that are away neither count nor block: the rollout completes without them, and they follow when they are back."""
    gone = [one["metadata"]["name"] for one in fleet.gpu_nodes()][: max(1, fleet.size // 20)]
    for name in gone:
        fleet.set_ready(name, False)
    os.kill(fleet.nodes.pid, 0)
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 5)], rollout=steps(25, 100))
    before = fleet.rollout(POLICY).get("revision")
    shown = fleet.until_rollout(POLICY, COMPLETE_SECONDS, revision_not=before, phase="Complete", away=len(gone))
    if fleet.reason(POLICY)[:2] != ("True", "Settled"):
        raise TestError(f"it shows {fleet.reason(POLICY)}")
    for name in gone:
        fleet.set_ready(name, True)
    fleet.until_rollout(POLICY, REPORTED_SECONDS + 30, settled=fleet.size, away=0)
    settled_again(fleet, shown["revision"])
    return f"away={len(gone)} of {fleet.size}"


def frozen(fleet: Fleet) -> str:
    """The leader is frozen for a minute in the middle of a rollout. Another controller takes the lease and goes on; nothing that the
    first one writes lands afterwards."""
    first, second = (fleet.controllers[user] for user in CONTROLLERS)
    second.start()
    time.sleep(3)
    before = fleet.rollout(POLICY)["revision"]
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 6)], rollout={**steps(25, 100), "perSecond": 1})
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, revision_not=before, step=3)
    os.kill(first.pid, signal.SIGSTOP)
    at = datetime.now(timezone.utc)
    time.sleep(FROZEN_SECONDS)
    os.kill(first.pid, signal.SIGCONT)
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 7)], rollout=steps(25, 100))
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, phase="Complete", settled=fleet.size)
    landed = [event for event in fleet.cluster.writes_of(CONTROLLERS[0]) if received(event) > at]
    if landed:
        raise TestError(f"{len(landed)} writes of the frozen controller landed: {landed[0]}")
    others = [event for event in fleet.cluster.writes_of(CONTROLLERS[1]) if received(event) > at]
    if not others:
        raise TestError("the other controller has written nothing")
    took = min(map(received, others)) - at
    second.stop()
    return f"taken_over_after_s={took.total_seconds():.0f} writes_of_the_second={len(others)}"


def api_server_away(fleet: Fleet) -> None:
    """The API server is away for 20 s in the middle of a rollout, which then goes on."""
    before = fleet.rollout(POLICY)["revision"]
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 8)], rollout=steps(25, 100))
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, revision_not=before, step=2)
    fleet.cluster.restart_api_server(20)
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, phase="Complete", settled=fleet.size)


def paused_and_undone(fleet: Fleet) -> None:
    """A rollout is paused, resumed and undone with kubectl."""
    good = fleet.rollout(POLICY)["revision"]
    fleet.annotate(POLICY, "paused=true")
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 9)], rollout=steps(25, 100))
    shown = fleet.until_rollout(POLICY, REPORTED_SECONDS, revision_not=good, assigned=0)
    fleet.until_reason(POLICY, "Paused", REPORTED_SECONDS)
    quiet(fleet)
    fleet.annotate(POLICY, "paused-")
    fleet.until_rollout(POLICY, REPORTED_SECONDS, assigned=2)
    fleet.annotate(POLICY, f"undo={shown['revision']}/1")
    fleet.until_rollout(POLICY, REPORTED_SECONDS, phase="Halted")
    settled_again(fleet, good)
    fleet.annotate(POLICY, "undo-")


def tags(fleet: Fleet) -> None:
    """A tag of a registry is resolved once. When it is moved, nothing happens until it is to be resolved again. While the registry is away,
    a change waits, and the nodes keep their stack."""
    server = Registry("fleet", int(REGISTRY.rpartition(":")[2]), secured=False)
    server.start()
    try:
        target, file = f"oci+http://{REGISTRY}/gpu/timeslice:stable", FOLDER / "timeslice-good.wasm"
        fleet.pack("timeslice", "good")
        fleet.run("policy", "pack", str(file), target)
        before = fleet.rollout(POLICY)["revision"]
        stack = [timeslice(f"{REGISTRY}/gpu/timeslice:stable", 12)]
        fleet.apply(POLICY, stack, rollout=steps(100))
        first = fleet.until_rollout(POLICY, COMPLETE_SECONDS, revision_not=before, phase="Complete", settled=fleet.size)["revision"]
        # A custom section at the end makes it another policy with the same effect.
        file.write_bytes(file.read_bytes() + b"\x00\x05\x04test")
        fleet.run("policy", "pack", str(file), target)
        quiet(fleet)
        fleet.annotate(POLICY, "resolve=again")
        fleet.until_rollout(POLICY, COMPLETE_SECONDS, revision_not=first, phase="Complete", settled=fleet.size)
    finally:
        server.stop()
    good = fleet.policy(POLICY)["status"]["good"]["revision"]
    fleet.apply(POLICY, [timeslice(f"{REGISTRY}/gpu/timeslice:other", 12)], rollout=steps(100))
    message = fleet.until_reason(POLICY, "Unresolved", REPORTED_SECONDS)
    if f"{REGISTRY}/gpu/timeslice:other" not in message:
        raise TestError(f"it says {message}")
    settled_again(fleet, good)
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 8)], rollout=steps(100))
    fleet.until_rollout(POLICY, COMPLETE_SECONDS, revision_not=good, phase="Complete", settled=fleet.size)


def priorities(fleet: Fleet) -> None:
    """The SharingPolicy with the highest priority decides; of two with the same priority the first by name, and the other says so. When one is
    deleted, the other takes its nodes over."""
    good = fleet.pack("timeslice", "good")
    named = {"kubernetes.io/hostname-of-test": "a"}
    name = fleet.gpu_nodes()[0]["metadata"]["name"]
    fleet.cluster.kubectl("label", "node", name, *(f"{key}={value}" for key, value in named.items()))
    fleet.apply("special", [timeslice(good, 10)], selector=named, priority=10, rollout=steps(100))
    shown = fleet.until_rollout("special", COMPLETE_SECONDS, phase="Complete", total=1, settled=1)
    if fleet.assigned(shown["revision"]) != [name]:
        raise TestError(f"assigned are {fleet.assigned(shown['revision'])}")
    fleet.apply("special", [timeslice(good, 10)], selector=named, priority=0, rollout=steps(100))
    message = fleet.until_reason(POLICY, "Overlapped", REPORTED_SECONDS) if "special" < POLICY else fleet.until_reason("special", "Overlapped", REPORTED_SECONDS)
    if "set different priorities" not in message:
        raise TestError(f"it says {message}")
    fleet.cluster.kubectl("delete", "gsp", "special")
    expected = fleet.policy(POLICY)["status"]["good"]["revision"]
    settled_again(fleet, expected)


def deleted(fleet: Fleet) -> None:
    """The deletion of a SharingPolicy changes no node."""
    before = {one["metadata"]["name"]: one["spec"] for one in fleet.gpu_nodes()}
    fleet.cluster.kubectl("delete", "gsp", POLICY)
    time.sleep(QUIET_SECONDS)
    if {one["metadata"]["name"]: one["spec"] for one in fleet.gpu_nodes()} != before:
        raise TestError("the GPUNodes have changed")


def settled_again(fleet: Fleet, revision: str) -> None:
    """Waits until all nodes are assigned this revision, and it is active on them."""

    def look() -> bool:
        others = {one["metadata"]["name"] for one in fleet.gpu_nodes() if one["spec"].get("stack", {}).get("revision") != revision}
        active = {name: active for name, active in fleet.active().items() if active != revision}
        if others or active:
            raise TestError(f"others are assigned to {sorted(others)} and active {active}")
        return True

    until(f"all nodes have revision {revision}", COMPLETE_SECONDS, look, every=0.5)


def quiet(fleet: Fleet) -> None:
    """Checks that nothing is assigned for a while."""
    before = {one["metadata"]["name"]: one["metadata"]["generation"] for one in fleet.gpu_nodes()}
    time.sleep(QUIET_SECONDS)
    after = {one["metadata"]["name"]: one["metadata"]["generation"] for one in fleet.gpu_nodes()}
    if before != after:
        raise TestError(f"GPUNodes have changed: {before}, {after}")


def writes(fleet: Fleet, resource: str, since: float) -> list[dict]:
    """What the controllers have written since then, by the monotonic clock."""
    begin = datetime.now(timezone.utc).timestamp() - (time.monotonic() - since) - 2
    events = [event for user in CONTROLLERS for event in fleet.cluster.writes_of(user)]
    return [event for event in events if event["objectRef"]["resource"] == resource and received(event).timestamp() > begin]


def received(event: dict) -> datetime:
    return datetime.fromisoformat(event["requestReceivedTimestamp"].replace("Z", "+00:00"))


CASES = {
    "each rule of SharingPolicy refuses its example": refused,
    "a rollout reaches one node a model, then a share, then all": complete,
    "a policy that traps is halted on one node a model, and undone": halted,
    "a halted revision is not assigned again without another attempt": not_assigned_again,
    "nodes roll back by themselves while the controller is dead": controller_dead,
    "a policy that fails on live admissions is stopped by the gate": gated,
    "nodes that are away neither count nor block, and follow": away,
    "nothing of a leader that was frozen lands": frozen,
    "a rollout goes on after the API server was away": api_server_away,
    "a rollout is paused, resumed and undone": paused_and_undone,
    "a tag is resolved once, and the nodes need no registry for what they have": tags,
    "priorities decide, and an overlap is named": priorities,
    "the deletion of a SharingPolicy changes no node": deleted,
}
