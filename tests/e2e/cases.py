"""The cases. Each is a function of a bench; it raises `TestError` where something is not as it must be.

Cases of one setup run in the order written and share their pods: later ones ask what
becomes of pods that run already.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path

from bench import Bench
from berth import CONFIG_FOR_READERS, LIBRARY_IN_POD, LIBRARY_ON_HOST, SHARED, Setup, cdi_variable, gpu_of, write_cdi_spec
from foreign import ForeignStream
from gpus import DEVICE_NODE, uuids
from kubelet import CHECKPOINT, PLUGINS, SOCKET, healthy
from pods import Container, Pod
from say import TestError, until
from scenario import Scenario

#: Berth ends an allocation after two rounds 5 s apart, both 30 s after the kubelet's start and after the grant.
RELEASE_SECONDS = 120
#: A bound for a busy machine; Berth's own budget is 10 ms. A pod that comes before the registration is refused for good.
REGISTER_MS = 1000
#: Longer than the times after which an allocation may end, see above.
INIT_SECONDS = 45
#: A changed device list is on its way to the kubelet at once.
LIST_SECONDS = 5
#: SIGTERM to exit.
END_SECONDS = 1.0
#: How long a Berth that cannot see pods end must stay not ready after its pod has gone.
UNREADY_SECONDS = 10
#: A user without any rights.
_NO_ONE = 65534


def one_gpu(bench: Bench) -> None:
    pod = bench.pod("one", {"main": 1})
    bench.start(pod)
    seen = bench.gpus_seen(pod, "main")
    if len(seen) != 1:
        raise TestError(f"asked for one GPU, sees {seen}")


def two_containers(bench: Bench) -> None:
    pod = bench.pod("pair", {"left": 2, "right": 2})
    bench.start(pod)
    left, right = bench.gpus_seen(pod, "left"), bench.gpus_seen(pod, "right")
    if len(left) != 2 or len(right) != 2 or set(left) & set(right):
        raise TestError(f"asked for two GPUs each; left sees {left}, right sees {right}")
    if sum(Counter(g for a in bench.berth.allocations() for g in a.gpus).values()) != 5:
        raise TestError("five GPUs are held by now, and the API shows another number")


def library_mount(bench: Bench) -> None:
    greeting = f"a library of {time.time_ns()}"
    (LIBRARY_ON_HOST / "libe2e.so").write_text(greeting, encoding="utf-8")
    look = (
        f"cat {LIBRARY_IN_POD}/libe2e.so > /e2e/library\n"
        f"if touch {LIBRARY_IN_POD}/new 2>/dev/null; then echo writable; else echo read-only; fi > /e2e/rights"
    )
    pod = bench.pod("library", {"main": 1}, extra=look)
    bench.start(pod)
    bench.gpus_seen(pod, "main")
    if pod.wrote("library") != greeting:
        raise TestError(f"{LIBRARY_IN_POD}/libe2e.so reads {pod.wrote('library')!r} inside, {greeting!r} outside")
    if pod.wrote("rights").strip() != "read-only":
        raise TestError(f"{LIBRARY_IN_POD} is to be read-only, and a container could write into it")


def berth_killed(bench: Bench) -> None:
    before = bench.picture()
    bench.berth.crash()
    bench.berth.start()
    bench.unchanged(before)
    _newcomer(bench, "after-crash")


def kubelet_restarted(bench: Bench) -> str:
    before = bench.picture()
    kubelet = bench.node.kubelet
    kubelet.stop()
    kubelet.start()
    took = until("berth registers again", 30, lambda: kubelet.registrations_ms(bench.resource), every=0.02)[0]
    bench.unchanged(before)
    _newcomer(bench, "after-kubelet")
    if took > REGISTER_MS:
        raise TestError(f"berth registered {took:.0f} ms after kubelet.sock appeared; the limit is {REGISTER_MS} ms")
    return f"registered_after_ms={took:.0f}"


def foreign_stream(bench: Bench) -> str:
    """Another program holds a stream of devices open, and opens it again whenever it ends, while the kubelet restarts."""
    bench.start(bench.pod("before", {"main": 1}))
    before = bench.picture()
    kubelet = bench.node.kubelet
    times = []
    with ForeignStream(PLUGINS, bench.resource) as stream:
        stream.next_list()
        for _ in range(3):
            kubelet.stop()
            kubelet.start()
            took = until("berth registers again", 30, lambda: kubelet.registrations_ms(bench.resource), every=0.02)[0]
            until("the kubelet holds both GPUs for healthy", 10, lambda: len(healthy(bench.resource)) == 2, every=0.02)
            times.append(took)
        if not stream.is_streaming():
            raise TestError("the other program ended")
        bench.unchanged(before)
        _newcomer(bench, "after")
    if max(times) > REGISTER_MS:
        raise TestError(f"berth registered {max(times):.0f} ms after kubelet.sock appeared; the limit is {REGISTER_MS} ms")
    return "registered_after_ms=" + ",".join(f"{took:.0f}" for took in times)


def pod_deleted(bench: Bench) -> str:
    pod = bench.running[0]
    gone = bench.allocation(pod, "main")
    bench.node.delete(pod)
    bench.running.remove(pod)
    took = _wait_for_end(bench, gone.id)
    for other in bench.running:
        for container in other.containers:
            bench.gpus_seen(other, container.name)
    _newcomer(bench, "after-release")
    return f"release_seen_within_s={took:.0f}"


def init_container(bench: Bench) -> None:
    """The kubelet's `List` shows no init container, so a plugin that believes it alone frees the GPU meanwhile."""
    prepare, main = (Container(name, {bench.resource: 1}) for name in ("prepare", "main"))
    pod = bench.node.run(Pod("init", [main], init=[prepare]))
    seen = bench.gpus_seen(pod, "prepare")
    first = bench.allocation(pod, "prepare")
    end = time.monotonic() + INIT_SECONDS
    while time.monotonic() < end:
        if first.id not in [a.id for a in bench.berth.allocations()]:
            raise TestError(f"allocation {first.id} ended while init container prepare was running")
        time.sleep(1)
    pod.release("prepare")
    bench.node.running(pod)
    if bench.gpus_seen(pod, "main") != seen:
        raise TestError(f"init container saw {seen}, the app container {bench.gpus_seen(pod, 'main')}")
    others = [a.gpus for a in bench.berth.allocations() if a.gpus != set(seen)]
    if others:
        raise TestError(f"one pod with one GPU, and the API also holds {others}")


def ends_on_sigterm(bench: Bench) -> str:
    code, took = bench.berth.stop()
    if code != 0 or took > END_SECONDS:
        raise TestError(f"SIGTERM: exit {code} after {took:.1f} s; it should be 0 within {END_SECONDS:g} s")
    for pod in bench.running:
        for container in pod.containers:
            pod.beats(container.name)
    bench.berth.start()
    bench.picture()
    return f"ended_within_ms={took * 1000:.0f}"


def shares_spread(bench: Bench) -> None:
    pods = [bench.pod(f"share-{n}", {"main": 1}) for n in range(4)]
    bench.start(*pods)
    per_gpu = Counter()
    for pod in pods:
        per_gpu.update(bench.gpus_seen(pod, "main"))
    if sorted(per_gpu.values()) != [2, 2]:
        raise TestError(f"four shares on two GPUs lie {dict(per_gpu)}; each should have two")


def sixth_share_refused(bench: Bench) -> str:
    pods = [bench.pod(f"share-{n}", {"main": 1}) for n in range(5)]
    bench.start(*pods)
    for pod in pods:
        bench.gpus_seen(pod, "main")
    status = bench.refused(bench.pod("one-too-many", {"main": 1}))
    if len(bench.berth.allocations()) != 5:
        raise TestError(f"five pods hold a share, the API shows {len(bench.berth.allocations())} allocations")
    for pod in pods:
        pod.beats("main")
    return f"reason={status.get('reason')}"


def cordoned_gpu(bench: Bench) -> None:
    first = bench.pod("first", {"main": 1})
    bench.start(first)
    held = set(bench.gpus_seen(first, "main"))
    (free,) = bench.berth.gpus() - held
    before = bench.picture()
    bench.berth.cordon(free)
    until("the kubelet knows of the cordon", LIST_SECONDS, lambda: free not in healthy(bench.resource), every=0.02)
    bench.refused(bench.pod("too-early", {"main": 1}))
    bench.unchanged(before)
    bench.berth.uncordon(free)
    until("the kubelet knows of its end", LIST_SECONDS, lambda: free in healthy(bench.resource), every=0.02)
    _newcomer(bench, "later")


def policy_changed(bench: Bench) -> None:
    whole = bench.pod("whole", {"main": 1})
    bench.start(whole)
    held = set(bench.gpus_seen(whole, "main"))
    before = bench.picture()
    bench.berth.share(4)
    bench.berth.registered(SHARED)
    bench.unchanged(before)
    shares = [bench.pod(f"share-{n}", {"main": 1}, resource=SHARED) for n in range(4)]
    bench.start(*shares)
    for pod in shares:
        doubly = held & set(bench.gpus_seen(pod, "main"))
        if doubly:
            raise TestError(f"{pod.name} has a share of {doubly}, which {whole.name} holds whole")
    bench.refused(bench.pod("one-too-many", {"main": 1}, resource=SHARED))
    bench.gpus_seen(whole, "main")
    whole.beats("main")


def away(bench: Bench) -> str:
    """While berth is stopped a pod ends and the kubelet restarts; berth must detect both."""
    stays, goes = bench.pod("stays", {"main": 1}), bench.pod("goes", {"main": 1})
    bench.start(stays, goes)
    gone = bench.allocation(goes, "main")
    kept = bench.allocation(stays, "main")
    bench.berth.stop()
    bench.node.delete(goes)
    bench.running.remove(goes)
    bench.node.kubelet.stop()
    bench.node.kubelet.start()
    bench.berth.start()
    took = _wait_for_end(bench, gone.id)
    if bench.allocation(stays, "main").same() != kept.same():
        raise TestError(f"the allocation of {stays.name} changed: {kept.same()}")
    stays.beats("main")
    _newcomer(bench, "newcomer")
    return f"release_seen_within_s={took:.0f}"


def end_of_running(bench: Bench) -> None:
    """`allocation end` on a running pod is refused and names it; with --force it ends, audited, and the pod runs on."""
    pod = bench.pod("in-use", {"main": 1})
    bench.start(pod)
    held = bench.allocation(pod, "main")
    namespace, name, *_ = held.holder
    try:
        bench.berth.cli("allocation", "end", held.id)
    except TestError as refused:
        said = str(refused)
    else:
        raise TestError(f"allocation {held.id} ended although {name} runs")
    for part in ("exit 1", f"{namespace}/{name}", "kubelet", "--force"):
        if part not in said:
            raise TestError(f"the refusal does not say {part!r}: {said}")
    if held.id not in [a.id for a in bench.berth.allocations()]:
        raise TestError(f"the end of allocation {held.id} was refused, but it ended")
    said = bench.berth.cli("allocation", "end", held.id, "--force")
    if f"{namespace}/{name}" not in said or "has ended" not in said:
        raise TestError(f"a forced end does not say what it does: {said}")
    if held.id in [a.id for a in bench.berth.allocations()]:
        raise TestError(f"allocation {held.id} did not end by force")

    def audited() -> bool:
        lines = [line for line in bench.berth.log().splitlines() if "audit" in line and held.id in line]
        return len(lines) == 2 and "refused" in lines[0] and "force" not in lines[0] and "force=true" in lines[1]

    until("both requests are in the audit log, the second as forced", LIST_SECONDS, audited)
    pod.beats("main")
    try:
        bench.berth.cli("allocation", "end", held.id, "--force")
    except TestError as refused:
        if "already ended" not in str(refused):
            raise
    else:
        raise TestError(f"allocation {held.id} ended twice")
    bench.node.delete(pod)
    bench.running.remove(pod)


def adoption(bench: Bench) -> None:
    _, before = bench.picture()
    bench.berth.stop()
    bench.berth.forget()
    bench.berth.start()
    _, now = bench.picture()
    for devices_and_holder in ({a[1:] for a in before.values()}, {a[1:] for a in now.values()}):
        if len(devices_and_holder) != len(bench.running):
            raise TestError(f"{len(bench.running)} pods run, the allocations are {devices_and_holder}")
    if {a[1:] for a in before.values()} != {a[1:] for a in now.values()}:
        raise TestError(f"held before: {before}; taken over: {now}")
    _newcomer(bench, "after-adoption")


def dead_gpu(bench: Bench) -> str:
    """NVIDIA's plugin marks one of a GPU's shares, and has forgotten even that after a restart of the kubelet."""
    pods = [bench.pod(name, {"main": 1}) for name in ("unlucky", "lucky")]
    bench.start(*pods)
    dead, alive = (bench.gpus_seen(pod, "main")[0] for pod in pods)
    begin = time.monotonic()
    bench.berth.fake.xid(dead, 79)

    def only_alive() -> bool:
        listed = healthy(bench.resource)
        return bool(listed) and {gpu_of(device) for device in listed} == {alive}

    until("the kubelet knows that no share of the GPU works", LIST_SECONDS, only_alive, every=0.005)
    took = time.monotonic() - begin
    bench.node.kubelet.stop()
    bench.node.kubelet.start()
    until("it knows that after a restart, too", 30, only_alive, every=0.02)
    others = [bench.pod(f"late-{n}", {"main": 1}) for n in range(3)]
    bench.start(*others)
    for pod in others:
        if bench.gpus_seen(pod, "main") != [alive]:
            raise TestError(f"{pod.name} was given a share of the dead GPU {dead}")
    bench.refused(bench.pod("one-too-many", {"main": 1}))
    for pod in bench.running:
        pod.beats("main")
    return f"unhealthy_after_ms={took * 1000:.0f}"


def released(bench: Bench) -> str:
    """Refused while a pod holds a GPU; forced, no file of the driver is left open, and `resume` brings all GPUs back."""
    pod = bench.pod("holder", {"main": 1})
    bench.start(pod)
    before = bench.allocation(pod, "main").same()

    def files() -> int:
        folder = Path(f"/proc/{bench.berth.pid}/fd")
        return sum(os.path.realpath(file) == str(DEVICE_NODE) for file in folder.iterdir())

    if not files():
        raise TestError(f"berth does not hold {DEVICE_NODE}, so this case shows nothing")
    try:
        bench.berth.cli("nvml", "release")
    except TestError as error:
        if "holds a GPU" not in str(error):
            raise
    else:
        raise TestError("the driver was released although a pod holds a GPU")
    bench.berth.cli("nvml", "release", "--force", "--for", "10m", "--reason", "the test")
    if files():
        raise TestError(f"berth still holds {DEVICE_NODE}")
    until("the kubelet knows that no GPU can be used", LIST_SECONDS, lambda: not healthy(bench.resource), every=0.02)
    bench.refused(bench.pod("too-early", {"main": 1}))
    begin = time.monotonic()
    bench.berth.cli("nvml", "resume")
    until("all GPUs are back", LIST_SECONDS, lambda: len(healthy(bench.resource)) == 2, every=0.02)
    took = time.monotonic() - begin
    if bench.allocation(pod, "main").same() != before:
        raise TestError("the allocation of the running pod is another one")
    pod.beats("main")
    bench.start(bench.pod("later", {"main": 1}))
    return f"resumed_after_s={took:.2f}"


def cdi_devices(bench: Bench) -> None:
    pod = bench.pod("cdi", {"main": 2})
    bench.start(pod)
    held = bench.allocation(pod, "main")
    inside = pod.environment("main")
    injected = {gpu for gpu in bench.berth.gpus() if inside.get(cdi_variable(gpu)) == "injected"}
    if injected != held.gpus or len(injected) != 2:
        raise TestError(f"the API holds {set(held.gpus)} for the pod, the runtime gave it the CDI devices of {injected}")


def _wait_for_end(bench: Bench, allocation: str) -> float:
    """Waits until an allocation is no longer live, and returns how many seconds that took."""
    begin = time.monotonic()

    def ended() -> bool:
        return allocation not in [a.id for a in bench.berth.allocations()]

    until(f"allocation {allocation} ends, whose pod is gone", RELEASE_SECONDS, ended, every=0.5)
    return time.monotonic() - begin


def _newcomer(bench: Bench, name: str) -> None:
    """A new pod runs, on a GPU that was free."""
    held = {gpu for a in bench.berth.allocations() for gpu in a.gpus}
    pod = bench.pod(name, {"main": 1})
    bench.start(pod)
    doubly = held & set(bench.gpus_seen(pod, "main"))
    if doubly:
        raise TestError(f"new pod {name} was given {doubly}, which another pod holds")


def other_root(bench: Bench) -> str:
    """The kubelet's pods are in its own root folder, and its device plugins in the usual one: an allocation must end all the
    same once its pod is gone."""
    if not (bench.node.kubelet.root / "pod-resources" / "kubelet.sock").is_socket() or not PLUGINS.is_dir():
        raise TestError(f"the kubelet does not have its folders in {bench.node.kubelet.root} and {PLUGINS}")
    pod = bench.pod("other-root", {"main": 1})
    bench.start(pod)
    bench.gpus_seen(pod, "main")
    bench.node.delete(pod)
    return bench.ends(pod)


def unknown_root(bench: Bench) -> str:
    """A Berth that does not know of the other root folder grants devices and cannot see a pod end: it is never ready, says why,
    and `node check` names the setting; with it the allocation ends."""
    settings = dict(bench.berth.settings)
    root = settings.pop("kubeletRootDir")
    missing = f"{settings['kubeletDir']}/pod-resources/kubelet.sock"
    # Earlier kubelets may have left it.
    shutil.rmtree(Path(missing).parent, ignore_errors=True)
    bench.berth.stop()
    bench.berth.configure(settings)
    bench.berth.start_unready()
    bench.berth.registered(bench.resource)
    pod = bench.pod("unseen", {"main": 1})
    bench.start(pod)

    def unready() -> bool:
        passed, says = bench.berth.check("evidence")
        if passed or missing not in says or "no allocation can end" not in says:
            raise TestError(f"the check evidence is {'passed' if passed else 'failed'} and says {says!r}")
        return True

    until("berth is not ready, since no allocation can end", 30, unready)
    bench.node.delete(pod)
    bench.running.remove(pod)
    end = time.monotonic() + UNREADY_SECONDS
    while time.monotonic() < end:
        unready()
        time.sleep(0.5)
    if len(bench.berth.allocations()) != 1:
        raise TestError(f"without the pods' devices the API shows {[a.same() for a in bench.berth.allocations()]}")
    said = " ".join(bench.berth.fails("node", "check", "--config", CONFIG_FOR_READERS).split())
    for part in (f"{missing} does not exist", f"set kubeletRootDir: {root}"):
        if part not in said:
            raise TestError(f"`berth node check` does not say {part!r}: {said}")
    bench.berth.stop()
    bench.berth.configure(bench.berth.settings)
    bench.berth.start()
    return bench.ends(pod)


def denied(bench: Bench) -> None:
    """A Berth that may not open the kubelet's socket says so, and names its own user."""
    bench.berth.stop()
    mode = PLUGINS.stat().st_mode & 0o7777

    def undo() -> None:
        bench.berth.stop()
        PLUGINS.chmod(mode)

    bench.at_end.append(undo)
    # It may make its own socket there and read what the kubelet has noted, and not open the kubelet's socket.
    PLUGINS.chmod(0o777)
    CHECKPOINT.chmod(0o644)
    SOCKET.chmod(0o755)
    bench.berth.start_as(_NO_ONE)

    named = ("Permission denied", "it has mode 0755 and owner uid 0", f"berth runs as uid {_NO_ONE}")

    def names_all(said: str) -> bool:
        # A table's column may break a word.
        text = "".join(said.split())
        if not all("".join(part.split()) in text for part in named):
            raise TestError(f"it says {said!r}")
        return True

    for what, said in {
        "the resource in the API": lambda: bench.berth.registration(bench.resource).get("waiting", ""),
        "the check `kubelet` of /readyz": lambda: bench.berth.check("kubelet")[1],
        "`berth node show`": lambda: bench.berth.cli("node", "show"),
        "`berth node check`": lambda: bench.berth.fails("node", "check", "--config", CONFIG_FOR_READERS, user=_NO_ONE),
    }.items():
        until(f"{what} names the denied permission and uid {_NO_ONE}", 30, lambda said=said: names_all(said()))
    if bench.berth.check("kubelet")[0]:
        raise TestError("the check `kubelet` is passed, and the kubelet's socket is denied")


#: Eight GPUs: the pods of the cases hold 1 + 4 + 1 + 1 + 1, and the last newcomer takes the one that was freed.
SCENARIOS = [
    Scenario(
        "whole",
        Setup(gpus=8, library=True),
        {
            "a pod with one GPU sees the GPU that it holds according to the API": one_gpu,
            "two containers with two GPUs each see disjoint GPUs": two_containers,
            "a configured library is readable inside, and read-only": library_mount,
            "kill -9 of berth: pods run on, allocations survive, a new pod works": berth_killed,
            "restart of the kubelet: pods run on, berth registers at once": kubelet_restarted,
            "a deleted pod's allocation ends, and its GPU can be allocated again": pod_deleted,
            "SIGTERM ends berth cleanly, and a restart finds all holders": ends_on_sigterm,
        },
    ),
    Scenario(
        "root folder",
        Setup(gpus=1, other_root=True),
        {
            "a kubelet with another --root-dir: a pod gets its GPU, and its allocation ends": other_root,
            "a berth that does not know of it is not ready, and `node check` names the setting": unknown_root,
            "a berth without root's rights names the permission and the user": denied,
        },
    ),
    Scenario(
        "foreign",
        Setup(gpus=2),
        {"foreign stream over a kubelet restart: berth registers at once, pods run on": foreign_stream},
    ),
    Scenario(
        "spread",
        Setup(gpus=2, shares=4),
        {"four pods with a share each lie 2+2 on two GPUs": shares_spread},
    ),
    Scenario(
        "five shares",
        Setup(gpus=1, shares=5),
        {"five pods share a GPU, the sixth is refused clearly": sixth_share_refused},
    ),
    Scenario(
        "init",
        Setup(gpus=2),
        {"a long init container keeps its GPU, and hands it to the app container": init_container},
    ),
    Scenario(
        "cordon",
        Setup(gpus=2),
        {"a cordoned GPU gets no pod until it is uncordoned": cordoned_gpu},
    ),
    Scenario(
        "policy",
        Setup(gpus=2),
        {"from whole GPUs to shares while it runs: the whole GPU stays one pod's": policy_changed},
    ),
    Scenario(
        "forced end",
        Setup(gpus=1),
        {"`allocation end` on a running pod is refused and names it; --force ends it, audited": end_of_running},
    ),
    Scenario(
        "away",
        Setup(gpus=4),
        {
            "pods that ended while berth and the kubelet were down are detected, the others stay": away,
            "a berth with an empty store adopts the devices of running pods": adoption,
        },
    ),
    Scenario(
        "fault",
        Setup(gpus=2, shares=4),
        {"an XID takes every share of a GPU from the kubelet, also after its restart": dead_gpu},
    ),
    Scenario(
        "driver",
        Setup(gpus=2),
        {"the driver is released under a running pod, and used again": released},
    ),
    Scenario(
        "cdi",
        Setup(gpus=4, cdi=True),
        {"the devices arrive by their CDI names": cdi_devices},
        before=lambda: write_cdi_spec(uuids(4)),
    ),
]
