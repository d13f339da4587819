"""Cases of `berth guard` at a real containerd: a holder is known before its container runs, an end is seen at once, and
neither the guard nor its restarts delay a pod."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import machine
import process
from bench import RELEASE_SECONDS_WITH_API_SERVER, Bench
from berth import Setup
from kubelet import SOCKET
from places import NRI_SOCKET, REPO, RUN
from pods import NAMESPACE, Container, Pod
from process import Process
from say import TestError, until
from scenario import Scenario

#: From the start of a guard, or of containerd, to the connection: its second try is after one second, its third after
#: five more.
CONNECTED_SECONDS = 30
#: From the moment at which the kubelet no longer shows a pod; without the guard it is 45 s.
RELEASE_SECONDS = 3
#: A kubelet that has just started has not read all of its pods, so nothing ends before.
KUBELET_SECONDS = 31
#: How long an allocation of a container that exists must live on: longer than the rules without the guard need.
KEPT_SECONDS = 40
#: A pod that stays in its grace period for the whole case.
GRACE_SECONDS = 60
#: From a deletion to the runtime's stop of the containers.
STOPPING_SECONDS = 3
#: After this long a heartbeat is not counted any more.
BEAT_SECONDS = 2
#: How much longer than before a pod may take while the guard waits.
DELAY_SECONDS = 1

_IGNORES_SIGTERM = "trap '' TERM"


def connects(bench: Bench) -> str:
    """The guard before the pods, at a daemon that cannot read the kubelet's `List`, which alone has names without it."""
    settings = dict(bench.berth.settings)
    settings.pop("kubeletRootDir")
    bench.berth.stop()
    bench.berth.configure(settings)
    bench.berth.start_unready()
    bench.berth.registered(bench.resource)
    start_guard(bench)
    pod = bench.pod("named", {"main": 1})
    bench.node.run(pod)
    pod.started("main")
    wanted = (NAMESPACE, pod.name, "main", pod.uid)
    holders = [allocation.holder for allocation in bench.berth.allocations()]
    if holders != [wanted]:
        raise TestError(f"the container runs, and the API shows the holders {holders}; it should be {wanted}")
    bench.node.delete(pod)
    bench.berth.stop()
    bench.berth.configure(bench.berth.settings)
    bench.berth.start()
    connected(bench)
    said = bench.berth.guard_status()["runtime"]
    return f"runtime={said.replace(' ', '-')}"


def forged(bench: Bench) -> None:
    """A pod that names another one's allocation, by an annotation of its own and by the variable, is not its holder."""
    owner = bench.pod("owner", {"main": 1})
    bench.start(owner)
    held = bench.allocation(owner, "main")
    key = "BERTH_ALLOCATION_ID_" + "".join(c if c.isalnum() else "_" for c in bench.resource.upper())
    annotation = "berth.dev/grant." + bench.resource.replace("/", "_")
    forger = Pod(
        "forger", [Container("main", {}, env={key: held.id})], annotations={annotation: f"{held.id} {min(held.gpus)}"}
    )
    bench.node.run(forger)
    forger.started("main")
    _kubelet_settles(bench)
    if bench.allocation(owner, "main").same() != held.same():
        raise TestError(f"the allocation of {owner.name} changed: {held.same()}")
    bench.node.delete(owner)
    bench.running.remove(owner)
    _ends(bench, held.id, RELEASE_SECONDS)
    forger.beats("main")
    bench.node.delete(forger)


def ends_at_once(bench: Bench) -> str:
    """Without an API server, the GPU of a pod that is gone can be allocated within seconds."""
    stays, goes = bench.pod("stays", {"main": 1}), bench.pod("goes", {"main": 1})
    bench.start(stays, goes)
    _kubelet_settles(bench)
    gone, kept = bench.allocation(goes, "main"), bench.allocation(stays, "main")
    bench.node.delete(goes)
    bench.running.remove(goes)
    took = _ends(bench, gone.id, RELEASE_SECONDS)
    if bench.allocation(stays, "main").same() != kept.same():
        raise TestError(f"the allocation of {stays.name} changed: {kept.same()}")
    return f"release_seen_within_s={took:.1f}"


def exits(bench: Bench) -> None:
    """A container that exits and starts again keeps its allocation."""
    pod = bench.running[0]
    held = bench.allocation(pod, "main")
    bench.crash(pod, "main")
    if bench.allocation(pod, "main").same() != held.same():
        raise TestError(f"the allocation of {pod.name} changed: {held.same()}")


def runtime_restarted(bench: Bench) -> None:
    """Nothing ends while containerd is away or after it, and the guard connects again."""
    before = bench.picture()
    bench.node.containerd.stop()
    until("the guard is not connected", 10, lambda: not bench.berth.guard_status()["connected"])
    bench.node.containerd.restart()
    connected(bench)
    bench.unchanged(before)


def guard_killed(bench: Bench) -> None:
    """Pods come and go without the guard, and the next one finds what it missed."""
    guard: Process = bench.shared
    goes = bench.pod("goes-too", {"main": 1})
    bench.start(goes)
    before = bench.picture()
    guard.kill()
    until("the API shows that the guard is away", 10, lambda: not bench.berth.guard_status()["connected"])
    late = bench.pod("late", {"main": 1})
    bench.start(late)
    bench.node.delete(goes)
    bench.running.remove(goes)
    guard.start()
    connected(bench)
    bench.ends(goes)
    for pod in (*bench.running, late):
        pod.beats("main")
    # An allocation of a pod that an earlier case deleted may end meanwhile.
    running = {pod.name for pod in bench.running}
    kept = {id: same for id, same in before[1].items() if same[3][1] in running}
    if not kept:
        raise TestError(f"no pod runs on: {before}")
    now = {a.id: a.same() for a in bench.berth.allocations()}
    if any(now.get(id) != same for id, same in kept.items()):
        raise TestError(f"before {kept}, now {now}")


def in_grace(bench: Bench) -> str:
    """A registration while a container is being stopped would hold up every call of the runtime, so it waits."""
    start_guard(bench)
    first = bench.pod("first", {"main": 1})
    usual = seconds_to_run(bench, first)
    guard: Process = bench.shared
    slow = Pod("slow", [Container("main", {bench.resource: 1}, extra=_IGNORES_SIGTERM)], grace=GRACE_SECONDS)
    bench.start(slow)
    cluster = bench.node.cluster
    cluster.kubectl("delete", "pod", slow.name, "--wait=false")
    guard.kill()
    guard.start()

    def waits() -> bool:
        status = bench.berth.guard_status()
        return not status["connected"] and "being deleted" in status.get("why", "")

    until("the guard waits, and says for what", 20, waits)
    took = seconds_to_run(bench, bench.pod("beside", {"main": 1}))
    if took > usual + DELAY_SECONDS:
        raise TestError(f"a pod took {took:.1f} s beside the one in its grace period, and {usual:.1f} s before")
    if not waits():
        raise TestError(f"the guard did not wait: {bench.berth.guard_status()}")
    until("the guard is connected", GRACE_SECONDS + CONNECTED_SECONDS, lambda: bench.berth.guard_status()["connected"])
    bench.node.gone(slow)
    bench.running.remove(slow)
    bench.equals_truth(RELEASE_SECONDS_WITH_API_SERVER)
    return f"usual_s={usual:.1f} beside_s={took:.1f}"


def deleted_by_force(bench: Bench) -> str:
    """The API server forgets a pod that is deleted by force, and its container goes on in its grace period. Its allocation
    lives as long as the container."""
    pod = Pod("outlives", [Container("main", {bench.resource: 1}, extra=_IGNORES_SIGTERM)], grace=GRACE_SECONDS)
    bench.start(pod)
    held = bench.allocation(pod, "main")
    begin = time.monotonic()
    bench.node.cluster.kubectl("delete", "pod", pod.name, "--wait=false")
    # The runtime waits for the container by now, up to the end of its grace period.
    time.sleep(STOPPING_SECONDS)
    bench.node.cluster.kubectl("delete", "pod", pod.name, "--force", "--grace-period=0")
    bench.running.remove(pod)
    while pod.alive("main"):
        if held.id not in [a.id for a in bench.berth.allocations()]:
            # Its last heartbeat may be older than its end.
            time.sleep(BEAT_SECONDS)
            if pod.alive("main"):
                raise TestError(f"allocation {held.id} ended although its container runs")
        time.sleep(0.2)
    lived = time.monotonic() - begin
    if lived < KEPT_SECONDS:
        raise TestError(f"the container lived {lived:.0f} s, which is too short for this case")
    took = _ends(bench, held.id, RELEASE_SECONDS_WITH_API_SERVER)
    return f"kept_s={lived:.0f} release_seen_within_s={took:.1f}"


def _kubelet_settles(bench: Bench) -> None:
    """Waits until the kubelet is old enough; one that is older than Berth's process counts from the start of that."""
    berth = datetime.fromisoformat(bench.berth.node()["startedAt"].replace("Z", "+00:00")).timestamp()
    time.sleep(max(0.0, max(SOCKET.stat().st_ctime, berth) + KUBELET_SECONDS - time.time()))


def start_guard(bench: Bench, drivers: Path | None = None) -> None:
    guard = bench.berth.guard(bench.logs / "guard.log", drivers)
    guard.start()
    bench.shared = guard
    bench.at_end.append(guard.stop)
    connected(bench)


def start_other_plugin(bench: Bench) -> Process:
    """Another plugin of the runtime, by containerd's own library. It changes the same containers before the guard does."""
    program = RUN / "beside"
    if not program.exists():
        source = REPO / "tests" / "nri"
        process.run([machine.go(), "build", "-C", source, "-o", program, "./beside"], "build a plugin", seconds=600)
    log = bench.logs / "beside.log"
    other = Process("beside", [program, NRI_SOCKET], log)
    other.start()
    bench.at_end.append(other.stop)

    def is_registered() -> bool:
        other.check()
        since_start = log.read_text(encoding="utf-8", errors="replace").rpartition("\n--- ")[2]
        return "synchronized" in since_start

    until("the other plugin is registered", CONNECTED_SECONDS, is_registered)
    return other


def connected(bench: Bench) -> None:
    def look() -> bool:
        bench.shared.check()
        status = bench.berth.guard_status()
        if not status["connected"]:
            raise TestError(status.get("why", "no reason is given"))
        return True

    until("the guard is connected", CONNECTED_SECONDS, look)


def _ends(bench: Bench, allocation: str, seconds: float) -> float:
    """Waits until an allocation is no longer live, and returns how many seconds that took."""
    begin = time.monotonic()
    until(
        f"allocation {allocation} ends",
        seconds,
        lambda: allocation not in [a.id for a in bench.berth.allocations()],
    )
    return time.monotonic() - begin


def seconds_to_run(bench: Bench, pod: Pod) -> float:
    begin = time.monotonic()
    bench.node.run(pod)
    pod.started("main")
    took = time.monotonic() - begin
    bench.start_known(pod)
    return took


SCENARIOS = [
    Scenario(
        "guard",
        Setup(gpus=4, other_root=True),
        {
            "guard: the holder is known before the container runs, without the kubelet's List": connects,
            "guard: a pod that names another pod's allocation is not its holder": forged,
            "guard: without an API server the GPU of a pod that is gone is free within seconds": ends_at_once,
            "guard: a container that exits and starts again keeps its allocation": exits,
            "guard: a restart of containerd ends nothing, and the guard connects again": runtime_restarted,
            "guard: pods come and go while the guard is away": guard_killed,
        },
    ),
    Scenario(
        "guard on a full node",
        Setup(gpus=4, api_server=True),
        {
            "guard: a registration waits for a pod in its grace period, and delays no other": in_grace,
            "guard: a container that outlives the deletion of its pod by force keeps its allocation": deleted_by_force,
        },
        cluster=True,
    ),
]
