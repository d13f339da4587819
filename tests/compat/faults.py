#!/usr/bin/env python3
"""NVIDIA's device plugin and Berth under the same faults of GPUs: `just compat-faults`, or `python3 tests/compat/faults.py`.

Both programs see one fake NVML with eight H100s and one stand-in kubelet, in mount namespaces of their own, one after the
other. Most faults concern the first GPU and last ten seconds; then the state is good again, and for at most 30 seconds the
device list is read until all devices are healthy. Berth's `health.quietSeconds` is 10 here in place of 300, so that it fits
into these; NVIDIA's plugin has no such setting.

It prints the lines of the logs that name a reason, and at the end a table in Markdown. It needs root (for the mount
namespaces) and Go, and takes 15 minutes. Exit status: 0 if Berth's lists were the expected ones with every fault, 1
otherwise, 2 if the comparison could not run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests" / "e2e"))

import nvidia  # noqa: E402

import namespace  # noqa: E402
import rig  # noqa: E402
from configurations import MODEL, UUIDS  # noqa: E402

#: In place of 300. `pollSeconds` is the default.
BERTH_CONFIG = "health: { pollSeconds: 5, quietSeconds: 10 }\n"
#: How long a program has to register, and a fault lasts if it says nothing else.
START_SECONDS, FAULT_SECONDS = 20, 10
#: Berth scans every 5 seconds, and a call that hangs for 10 seconds makes a GPU unhealthy.
HANG_SECONDS = 25
#: Longer than Berth waits for a GPU when it starts.
HANG_AT_START_SECONDS = 100
#: How long devices have to be healthy again.
AFTER_SECONDS = 30
#: NVIDIA's plugin opens NVML several times, and each time starts one GPU after the other.
SLOW_SECONDS = 150
#: Devices that are all healthy must stay so for this long.
STILL_SECONDS = 3
EVERY_SECONDS = 0.1
#: Lines of a log that are shown for a fault, without `--verbose` and with it.
LINES, LINES_VERBOSE = 3, 20
FIRST = UUIDS[0]
FABRIC_UP = {"state": "completed", "status": 0}


@dataclass
class Fault:
    name: str
    #: Adds the fault to the state of a good node.
    break_node: Callable[[dict], None]
    #: How many healthy and unhealthy devices Berth has to list with the fault. After it all eight have to be healthy.
    during: tuple[int, int] = (8, 0)
    #: The fault is there before the program starts.
    from_start: bool = False
    lasts: int = FAULT_SECONDS
    #: The fault is not removed: the devices become healthy by themselves, within so many seconds after `lasts`.
    ends_by_itself: int | None = None

    def state(self) -> dict:
        state = good_node()
        self.break_node(state)
        return state

    def state_after(self) -> dict:
        """Events stay in the file; a new one would be a new error."""
        return {**good_node(), "events": self.state().get("events", [])}


def good_node() -> dict:
    gpus = [
        {"uuid": uuid, "name": MODEL, "memory_total_mib": 81559, "pci_bus_id": f"00000000:{index + 1:02x}:00.0", "fabric": FABRIC_UP}
        for index, uuid in enumerate(UUIDS)
    ]
    return {"gpus": gpus}


def xid(code: int, **gpu: object) -> Callable[[dict], None]:
    """The driver reports the XID of the first GPU, and from then on that GPU also has these values."""

    def change(state: dict) -> None:
        state["events"] = [{"seq": 1, "gpu": FIRST, "kind": "xid", "data": code}]
        state["gpus"][0].update(gpu)

    return change


def first(**values: object) -> Callable[[dict], None]:
    return lambda state: state["gpus"][0].update(values)


def each(**values: object) -> Callable[[dict], None]:
    return lambda state: [gpu.update(values) for gpu in state["gpus"]]


def hangs(call: str) -> Callable[[dict], None]:
    return lambda state: state.update(faults=[{"call": call, "gpu": FIRST, "hang": True}])


FAULTS = [
    Fault("each GPU takes 3 s to start", each(cold_start_ms=3000), from_start=True, ends_by_itself=SLOW_SECONDS),
    Fault("`nvmlDeviceGetMemoryInfo*` of one GPU hangs", hangs("nvmlDeviceGetMemoryInfo*"), during=(7, 1), lasts=HANG_SECONDS),
    Fault("every call of one GPU hangs", hangs("*"), during=(7, 1), lasts=HANG_SECONDS),
    Fault("every call of one GPU hangs from the start", hangs("*"), during=(7, 0), from_start=True, lasts=HANG_AT_START_SECONDS),
    Fault("XID 31 (application)", xid(31)),
    Fault("XID 94 (contained memory error)", xid(94)),
    Fault("XID 109 (context switch timeout)", xid(109)),
    Fault("XID 95 and a GPU that needs a reset", xid(95, recovery_action="gpu_reset"), during=(7, 1)),
    Fault("fabric in progress at the start", each(fabric={"state": "in_progress", "status": 0}), during=(0, 8), from_start=True),
    Fault("memory of one GPU not readable", first(memory_total_mib=None), from_start=True),
    Fault("one GPU is lost, without an event", first(lost=True), during=(7, 1)),
    Fault("one GPU is lost, with XID 79", xid(79, lost=True), during=(7, 1)),
]


@dataclass
class Observed:
    #: Seconds from the start of the program to its first list of devices; `None`: there was none while the fault lasted.
    registered: float | None = None
    #: Healthy and unhealthy devices: before the fault, with it, and at the end.
    before: tuple[int, int] | None = None
    during: tuple[int, int] | None = None
    after: tuple[int, int] | None = None
    #: Seconds from the fault to the first change of the devices, and from its end until all were healthy.
    noticed: float | None = None
    healed: float | None = None
    exited: int | None = None
    reasons: list[str] = field(default_factory=list)


class Watch:
    """Reads the devices that a program has listed to the kubelet."""

    def __init__(self, program: subprocess.Popen, kubelet: rig.Kubelet) -> None:
        self._program = program
        self._kubelet = kubelet
        self._start = time.monotonic()
        self.registered: float | None = None

    def count(self) -> tuple[int, int] | None:
        """Healthy and unhealthy devices; `None` if there is no list."""
        devices = [health for listed in self._kubelet.devices().values() for health in listed.values()]
        if not devices:
            return None
        if self.registered is None:
            self.registered = time.monotonic() - self._start
        healthy = devices.count("Healthy")
        return healthy, len(devices) - healthy

    def until(self, seconds: float, wanted: Callable[[tuple[int, int] | None], bool], still: float = 0) -> float | None:
        """When `wanted` began to be so, and was so for `still` seconds; `None` if not within `seconds`, or the program ended."""
        begin, since = time.monotonic(), None
        while self._program.poll() is None:
            now = time.monotonic()
            if wanted(self.count()):
                since = now if since is None else since
                if now - since >= still:
                    return since - begin
            else:
                since = None
            if now - begin > seconds:
                return None
            time.sleep(EVERY_SECONDS)
        return None


def whole(count: tuple[int, int] | None) -> bool:
    return count == (len(UUIDS), 0)


def observe(node: rig.Rig, fault: Fault, command: list) -> Observed:
    seen = Observed()
    with node.serving(command, fault.state() if fault.from_start else good_node(), {}) as (program, kubelet):
        watch = Watch(program, kubelet)
        if not fault.from_start:
            watch.until(START_SECONDS, whole, still=1)
            seen.before = watch.count()
            logged = len(node.log())
            node.write(fault.state())
        else:
            logged = 0
        begin = time.monotonic()
        changed = watch.until(fault.lasts, lambda count: count != seen.before)
        seen.noticed = None if fault.from_start else changed
        time.sleep(max(0.0, begin + fault.lasts - time.monotonic()))
        seen.during = watch.count()
        if fault.ends_by_itself is None:
            node.write(fault.state_after())
        seen.healed = watch.until(fault.ends_by_itself or AFTER_SECONDS, whole, still=STILL_SECONDS)
        seen.after = watch.count()
        seen.registered = watch.registered
        seen.exited = program.poll()
        seen.reasons = reasons(node.log()[logged:])
    return seen


#: Matches the log lines in which the programs report a change or an error of a GPU.
REASON = re.compile(r"GPU-0|Xid=|does not answer|device memory|fabric|Skipping event|Failed to determine uuid|waiting for event")
#: Berth's line for a change of a GPU's health.
CHANGE = "berth_core::transition_log"
#: What Berth made of an event that changed nothing.
TRIAGED = re.compile(r'severity=(?P<severity>\w+) reason="(?P<reason>[^"]*)"')
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: What differs between two lines with the same message: the time, klog's process id, and the GPU.
TIME = re.compile(r"^([IWEF])\d{4} \S+ +\d+ |^\S+Z +")
GPU = re.compile(r"(GPU \d+ \()?GPU-\w{8}-c0de[-\w]*\)?")
#: Level and place of a line.
PLACE = re.compile(r"^\S+:\d+\] |^[A-Z]+ [\w:]+: ")
REASON_MAX = 160


def reasons(log: str) -> list[str]:
    """Each line once, with how often it is there."""
    counts: dict[str, int] = {}
    for line in COLOURS.sub("", log).splitlines():
        if REASON.search(line):
            line = GPU.sub("GPU-...", TIME.sub("", line))
            counts[line] = counts.get(line, 0) + 1
    return [line if count == 1 else f"{line} ({count} times)" for line, count in counts.items()]


def reason(lines: list[str]) -> str:
    line = next((line for line in lines if CHANGE in line), lines[0] if lines else "-")
    if triaged := TRIAGED.search(line):
        return f"{triaged['reason']}: severity {triaged['severity']}"
    return PLACE.sub("", line).replace("|", "/")[:REASON_MAX]


def cell(count: tuple[int, int] | None) -> str:
    return "none" if count is None else f"{count[0]} / {count[1]}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def row(fault: Fault, program: str, seen: Observed) -> str:
    registered = "no" if seen.registered is None else seconds(seen.registered)
    before = "-" if fault.from_start else cell(seen.before)
    after = cell(seen.after) if seen.exited is None else f"exited with {seen.exited}"
    healed = None if whole(seen.during) else seen.healed
    values = [fault.name, program, registered, before, cell(seen.during), seconds(seen.noticed), after, seconds(healed)]
    return "| " + " | ".join([*values, reason(seen.reasons)]) + " |"


HEAD = """| fault | program | registered after | healthy / unhealthy before | with the fault | changed after | after the fault | all healthy after | in the log |
|---|---|---|---|---|---|---|---|---|"""


def unexpected(fault: Fault, seen: Observed) -> str:
    """Empty where Berth did what is expected of it."""
    if seen.exited is not None:
        return f"it exited with {seen.exited}"
    if not fault.from_start and not whole(seen.before):
        return f"before the fault it lists {cell(seen.before)}"
    if seen.during != fault.during:
        return f"with the fault it lists {cell(seen.during)}, expected {cell(fault.during)}"
    if not whole(seen.after):
        return f"after the fault it lists {cell(seen.after)}"
    return ""


def compare(node: rig.Rig, args: argparse.Namespace) -> int:
    config = node.folder / "berth.yaml"
    config.write_text(BERTH_CONFIG, encoding="utf-8")
    commands = {
        "NVIDIA": [nvidia.MODULE.folder / "nvidia-device-plugin"],
        "Berth": [*rig.berth_command(args.berth, node), "--config", config],
    }
    rows, wrong = [], []
    for fault in FAULTS:
        if args.only not in fault.name:
            continue
        for program, command in commands.items():
            seen = observe(node, fault, command)
            rows.append(row(fault, program, seen))
            print(rows[-1], flush=True)
            for line in seen.reasons[: LINES_VERBOSE if args.verbose else LINES]:
                print(f"    {line[:300]}", flush=True)
            if program == "Berth" and (why := unexpected(fault, seen)):
                wrong.append(f"{fault.name}: {why}")
    print("\n".join(["", f"NVIDIA's plugin {nvidia.MODULE.version}", "", HEAD, *rows, ""]), flush=True)
    for line in wrong:
        print(f"compat-faults: Berth: {line}", flush=True)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    namespace.add_programs(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has this text")
    parser.add_argument("--verbose", action="store_true", help=f"show up to {LINES_VERBOSE} lines of each log in place of {LINES}")
    args = parser.parse_args()
    return namespace.run("compat-faults", args, lambda node: compare(node, args))


if __name__ == "__main__":
    sys.exit(main())
