"""Compares two outcomes."""

from __future__ import annotations

import re

from outcome import Outcome

#: Berth's own variables, beside NVIDIA's: the allocation's id and its limits.
OWN = "BERTH_"
#: NVIDIA's plugin names CDI devices after a specification that it writes itself; Berth takes nvidia-ctk's.
CDI_KINDS = ("k8s.device-plugin.nvidia.com/gpu=", "nvidia.com/gpu=")


def judge(case, there: Outcome, here: Outcome) -> tuple[str, str]:
    """The verdict, and in a few words what differs or what names it."""
    difference = differs(there, here)
    if case.named is None:
        return ("different", difference) if difference else ("same", "")
    line = next((line for line in here.log.splitlines() if re.search(case.named, line)), None)
    if line is None:
        return "silent", f"no line of Berth's has {case.named!r}" + (f"; {difference}" if difference else "")
    if difference and not case.may_differ:
        return "different", difference
    return "named", re.search(case.named, line).group(0)[:100]


def differs(there: Outcome, here: Outcome) -> str:
    """Empty where the outcomes are the same."""
    if there.refused != here.refused:
        return "only NVIDIA's plugin serves" if here.refused else "only Berth serves"
    for what, own, other in (("before", there.first, here.first), ("after", there.lists, here.lists)):
        if own != other:
            return f"device lists ({what}): {counted(own)} there, {counted(other)} here"
    for request, answer in there.answers.items():
        own, other = normal(answer), normal(here.answers.get(request, "not asked"))
        if own != other:
            return f"Allocate of {request}: {parts(own, other)} there, {parts(other, own)} here"
    return ""


def counted(lists: dict) -> str:
    def count(devices: dict) -> str:
        return f"{sum(health == 'Healthy' for health in devices.values())}/{len(devices)}"

    return ", ".join(f"{resource} {count(devices)}" for resource, devices in sorted(lists.items())) or "none"


def normal(answer: dict | str) -> dict | str:
    """Without what is each program's own: keys of annotations have random ends, lists of nodes no order and repeats."""
    if isinstance(answer, str):
        return answer
    return {
        "envs": {key: value for key, value in answer["envs"].items() if not key.startswith(OWN)},
        "mounts": sorted(answer["mounts"]),
        "devices": sorted(map(list, {tuple(device) for device in answer["devices"]})),
        "annotations": {key.rpartition("/")[0]: names(value.split(",")) for key, value in answer["annotations"].items()},
        "cdi": names(answer["cdi"]),
    }


def names(devices: list[str]) -> list[str]:
    for kind in CDI_KINDS:
        devices = [device.removeprefix(kind) for device in devices]
    return devices


def parts(answer: dict | str, other: dict | str) -> object:
    if isinstance(answer, str) or isinstance(other, str):
        return "refused" if answer == "refused" else "granted"
    return {key: value for key, value in answer.items() if value != other[key]}
