"""Compares two outcomes."""

from __future__ import annotations

import re

from outcome import Outcome

#: Berth's own variables, beside NVIDIA's: the allocation's id and its limits.
OWN = "BERTH_"
#: The grant, for `berth guard`.
OWN_ANNOTATION = "berth.dev/"
#: Each program names CDI devices after a specification that it writes itself; Berth takes nvidia-ctk's where there is one.
CDI_KINDS = ("k8s.device-plugin.nvidia.com/gpu=", "nvidia.com/gpu=", "berth/gpu=")
#: Berth's value of NVIDIA_VISIBLE_DEVICES with CDI strategies alone, so that a runtime without CDI does not give a container
#: the GPUs that its image names (docs/cdi.md); NVIDIA's plugin does not set it then.
NO_DEVICES = "void"
#: How Berth ends where it refuses: 1, or 2 for its command line. Every other status is a crash, as 101 of a panic.
REFUSALS = (1, 2)
PANIC = "panicked at"


def judge(case, wanted: Outcome, here: Outcome) -> tuple[str, str]:
    """The verdict on what Berth came to, and in a few words what differs or what names it."""
    difference = crash(here) or differs(wanted, here)
    if case.named is None:
        return ("different", difference) if difference else ("same", "")
    line = next((line for line in here.log.splitlines() if re.search(case.named, line)), None)
    if line is None:
        return "silent", f"no line of Berth's has {case.named!r}" + (f"; {difference}" if difference else "")
    if difference:
        return "different", difference
    return "named", re.search(case.named, line).group(0)[:100]


def crash(here: Outcome) -> str:
    """Empty where Berth serves, or ended as it ends where it refuses."""
    if PANIC in here.log:
        return "Berth panicked"
    if here.refused and here.status not in REFUSALS:
        return f"Berth crashed: exit status {here.status}"
    return ""


def differs(wanted: Outcome, here: Outcome) -> str:
    """Empty where the outcomes are the same."""
    if wanted.refused != here.refused:
        return "Berth refuses, and is to serve" if here.refused else "Berth serves, and is to refuse"
    if here.refused:
        return ""
    for what, own, other in (("before", wanted.first, here.first), ("after", wanted.lists, here.lists)):
        if own != other:
            return f"device lists ({what}): {counted(own)} wanted, {counted(other)} here"
    for request, answer in wanted.answers.items():
        own, other = normal(answer), normal(here.answers.get(request, "not asked"))
        if own != other:
            return f"Allocate of {request}: {parts(own, other)} wanted, {parts(other, own)} here"
    for request, shares in wanted.preferred.items():
        if shares != here.preferred.get(request):
            return f"GetPreferredAllocation of {request}: {shares} wanted, {here.preferred.get(request)} here"
    return ""


def counted(lists: dict) -> str:
    def count(devices: dict) -> str:
        return f"{sum(health == 'Healthy' for health in devices.values())}/{len(devices)}"

    return ", ".join(f"{resource} {count(devices)}" for resource, devices in sorted(lists.items())) or "none"


def normal(answer: dict | str) -> dict | str:
    """Without what is each program's own: keys of annotations have random ends, lists of nodes no order and repeats."""
    if isinstance(answer, str):
        return answer
    annotations = {key: value for key, value in answer["annotations"].items() if not key.startswith(OWN_ANNOTATION)}
    return {
        "envs": {
            key: listed(key, value)
            for key, value in answer["envs"].items()
            if not key.startswith(OWN) and not (value == NO_DEVICES and (answer["cdi"] or annotations))
        },
        "mounts": sorted(answer["mounts"]),
        "devices": sorted(map(list, {tuple(device) for device in answer["devices"]})),
        "annotations": {key.rpartition("/")[0]: names(value.split(",")) for key, value in annotations.items()},
        "cdi": names(answer["cdi"]),
    }


def listed(key: str, value: str) -> str:
    """NVIDIA's plugin takes indices from a map of Go's, so their order is another one each time."""
    return ",".join(sorted(value.split(","))) if key == "NVIDIA_VISIBLE_DEVICES" else value


def names(devices: list[str]) -> list[str]:
    for kind in CDI_KINDS:
        devices = [device.removeprefix(kind) for device in devices]
    return devices


def parts(answer: dict | str, other: dict | str) -> object:
    if isinstance(answer, str) or isinstance(other, str):
        return "refused" if answer == "refused" else "granted"
    return {key: value for key, value in answer.items() if value != other[key]}
