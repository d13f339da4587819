"""Cases of a drain that evicts: Berth asks the API server, disruption budgets hold, and the node says what goes on."""

from __future__ import annotations

import time

import process
from bench import Bench
from berth import WHOLE, Setup
from pods import NAMESPACE
from say import TestError, until
from scenario import Scenario
from workloads import Worker

#: The node's condition that Berth keeps.
CONDITION = "GPUUnavailable"
#: As docs/operations.md has it.
DRAIN = ("--evict", "--deadline", "10m", "--wait")
#: Two scans ten seconds apart find no process, after the pod's allocation has ended.
DRAINED_SECONDS = 120
#: How long the test watches that a budget holds.
BUDGET_SECONDS = 8
#: Of the orders that end at their deadline.
DEADLINE_SECONDS = 5
GPUS = 3


def evicts(bench: Bench) -> str:
    """A deployment's pod moves to another GPU; a bare pod is not recreated."""
    bench.shared = worker = Worker(bench, "worker")
    pod = worker.runs()
    (gpu,) = bench.gpus_seen(pod, "main")
    bench.equals_truth(20)
    begin = time.monotonic()
    said = bench.berth.cli("gpu", "drain", gpu, *DRAIN, seconds=DRAINED_SECONDS)
    took = time.monotonic() - begin
    if bench.berth.drain(gpu) != "drained":
        raise TestError(f"the command ended, and the GPU is {bench.berth.drain(gpu)}: {said.strip()}")
    moved = worker.runs(other_than=pod)
    if gpu in bench.gpus_seen(moved, "main"):
        raise TestError(f"the new pod is on the drained GPU {gpu}")
    bench.equals_truth(10)
    bench.allocatable({WHOLE: GPUS - 1})
    bench.no_pod_failed()
    return f"drained_within_s={took:.0f}"


def shows_event_and_condition(bench: Bench) -> str:
    """`kubectl describe node` shows the drain: an event, and a condition."""
    (gpu,) = bench.berth.drains("drained")
    events = described(bench, gpu, "True", "drained")
    if not [line for line in events if "drain" in line.lower()]:
        raise TestError(f"no event tells of the drain of {gpu}: {events}")
    return f"condition={CONDITION}"


def back_in_use(bench: Bench) -> None:
    """Uncordoned, its devices are to be had, and the condition says so."""
    (gpu,) = bench.berth.drains("drained")
    bench.berth.cli("gpu", "uncordon", gpu)
    bench.allocatable({WHOLE: GPUS})
    described(bench, gpu, "False", "available")


def unhealthy(bench: Bench) -> None:
    """The same for a GPU that fails: an event with the XID, and the condition until it works again."""
    (gpu,) = bench.gpus_seen(bench.running[-1], "main")
    bench.berth.fake.xid(gpu, 79)
    events = described(bench, gpu, "True", "unhealthy")
    if not [line for line in events if "79" in line]:
        raise TestError(f"no event tells of the XID: {events}")
    bench.berth.cli("gpu", "mark-healthy", gpu, "--reason", "reseated")
    described(bench, gpu, "False", "available")
    bench.allocatable({WHOLE: GPUS})


def described(bench: Bench, gpu: str, status: str, words: str) -> list[str]:
    """Waits until `kubectl describe node` shows the condition so. Returns the lines of the node's events that name the GPU."""
    cluster = bench.node.cluster

    def look() -> list[str]:
        text = cluster.kubectl("describe", "node", cluster.name)
        conditions = text.partition("\nConditions:\n")[2].partition("\nAddresses:")[0].splitlines()
        mine = [line.split(maxsplit=1)[1] for line in conditions if line.split()[:1] == [CONDITION]]
        if len(mine) != 1 or not mine[0].startswith(status) or words not in mine[0]:
            raise TestError(f"the conditions are {conditions}")
        if status == "True" and gpu not in mine[0]:
            raise TestError(f"it does not name {gpu}: {mine[0]}")
        events = [line for line in text.partition("\nEvents:\n")[2].splitlines() if gpu in line]
        if not events:
            raise TestError(f"no event names {gpu}")
        return events

    return until(f"kubectl describe node shows {CONDITION} {status}: {words}", 30, look)


def budget(bench: Bench) -> str:
    """A disruption budget that allows no eviction holds the drain up, until it does."""
    worker: Worker = bench.shared
    pod = bench.running[-1]
    (gpu,) = bench.gpus_seen(pod, "main")
    no_eviction(bench, worker)
    drain = bench.berth.cli_process(bench.logs / "drain.log", "gpu", "drain", gpu, *DRAIN)
    drain.start()
    bench.at_end.append(drain.stop)
    end = time.monotonic() + BUDGET_SECONDS
    while time.monotonic() < end:
        pod.beats("main")
        if bench.berth.drain(gpu) != "draining" or not drain.running():
            raise TestError(
                f"the budget allows no eviction, and the drain is {bench.berth.drain(gpu)}: {drain.last_words()}"
            )
    if "waits for its disruption budget" not in drain.log.read_text(encoding="utf-8"):
        raise TestError(f"the command says nothing of a budget: {drain.last_words()}")
    bench.node.cluster.kubectl("delete", "poddisruptionbudget", "keep")
    begin = time.monotonic()
    _ended_well(drain)
    took = time.monotonic() - begin
    worker.runs(other_than=pod)
    bench.equals_truth(10)
    bench.berth.cli("gpu", "uncordon", gpu)
    bench.allocatable({WHOLE: GPUS})
    bench.no_pod_failed()
    return f"drained_after_budget_s={took:.0f}"


def deleted_at_deadline(bench: Bench) -> str:
    """An order may say that at its deadline pods are deleted, whatever their budgets say."""
    worker: Worker = bench.shared
    pod = bench.running[-1]
    (gpu,) = bench.gpus_seen(pod, "main")
    no_eviction(bench, worker)
    begin = time.monotonic()
    order = ("--evict", "--deadline", f"{DEADLINE_SECONDS}s", "--at-deadline", "delete", "--wait")
    bench.berth.cli("gpu", "drain", gpu, *order, seconds=DRAINED_SECONDS)
    took = time.monotonic() - begin
    if took < DEADLINE_SECONDS or bench.berth.drain(gpu) != "drained":
        raise TestError(f"after {took:.1f} s the GPU is {bench.berth.drain(gpu)}")
    bench.node.cluster.kubectl("delete", "poddisruptionbudget", "keep")
    worker.runs(other_than=pod)
    bench.equals_truth(10)
    bench.berth.cli("gpu", "uncordon", gpu)
    bench.allocatable({WHOLE: GPUS})
    return f"drained_within_s={took:.0f}"


def no_eviction(bench: Bench, worker: Worker) -> None:
    """A budget under which the worker's one pod may not be evicted."""
    cluster = bench.node.cluster
    cluster.kubectl("create", "poddisruptionbudget", "keep", f"--selector=app={worker.name}", "--min-available=1")

    def counted() -> bool:
        path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/keep"
        return cluster.get(path).get("status", {}).get("currentHealthy") == 1

    until("the budget counts its pod", 30, counted)


def static_pod(bench: Bench) -> None:
    """A static pod cannot be evicted: the drain names it, and goes on once its file is gone."""
    pod = bench.node.run(bench.pod("static", {"main": 1}), static=True)
    bench.node.running(pod)
    bench.running.append(pod)
    (gpu,) = bench.gpus_seen(pod, "main")
    drain = bench.berth.cli_process(bench.logs / "drain-static.log", "gpu", "drain", gpu, *DRAIN)
    drain.start()
    bench.at_end.append(drain.stop)

    def named() -> bool:
        drain.check()
        said = drain.log.read_text(encoding="utf-8").splitlines()
        return any(pod.name in line and "blocker" in line for line in said)

    until("the drain names the static pod", 30, named)
    pod.beats("main")
    bench.node.delete(pod)
    bench.running.remove(pod)
    _ended_well(drain)
    bench.berth.cli("gpu", "uncordon", gpu)


def deadline(bench: Bench) -> str:
    """At its deadline a drain with `give-up` is given up: the pod stays, and so does the cordon."""
    pod = bench.node.run(bench.pod("static", {"main": 1}), static=True)
    bench.node.running(pod)
    bench.running.append(pod)
    (gpu,) = bench.gpus_seen(pod, "main")
    begin = time.monotonic()
    try:
        bench.berth.cli(
            "gpu", "drain", gpu, "--evict", "--deadline", f"{DEADLINE_SECONDS}s", "--at-deadline", "give-up", "--wait"
        )
    except TestError as said:
        took = time.monotonic() - begin
        if "given up" not in str(said):
            raise
    else:
        raise TestError("the command says that the GPU is drained, which a static pod holds")
    pod.beats("main")
    if took < DEADLINE_SECONDS or bench.berth.drain(gpu) != "cordoned":
        raise TestError(f"the drain was given up, and the GPU is {bench.berth.drain(gpu)}")
    bench.berth.cli("gpu", "uncordon", gpu)
    return f"given_up_after_s={took:.1f}"


def _ended_well(drain: process.Process) -> None:
    until("the drain ends", DRAINED_SECONDS, lambda: not drain.running())
    code, _ = drain.stop()
    if code != 0:
        raise TestError(f"berth gpu drain: exit {code}: {drain.last_words()}")


SCENARIOS = [
    Scenario(
        "drain",
        Setup(gpus=GPUS, api_server=True),
        {
            "drain --evict: a deployment's pod moves to another GPU, and the command ends": evicts,
            "drain: kubectl describe node shows an event and a condition": shows_event_and_condition,
            "drain: uncordoned, the GPU is in use again and the condition is gone": back_in_use,
            "an XID shows in kubectl describe node, until the GPU works again": unhealthy,
            "drain --evict: a disruption budget is respected": budget,
            "drain --evict --at-deadline delete: the budget is respected until then": deleted_at_deadline,
            "drain --evict: a static pod is named as the blocker": static_pod,
            "drain --evict: given up at the deadline, the pod keeps running": deadline,
        },
        cluster=True,
    ),
]
