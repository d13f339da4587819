"""What a program made of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    #: It ended instead of serving, with this exit status.
    refused: bool = False
    status: int | None = None
    #: By resource the ids and their health, before anything happened to a GPU, and after it.
    first: dict = field(default_factory=dict)
    lists: dict = field(default_factory=dict)
    #: By resource and number of devices what an Allocate was answered.
    answers: dict = field(default_factory=dict)
    #: While one share is held, by resource and number of shares: how many of the preferred ones are of the held one's
    #: device (`beside`), and how many of each other device (`elsewhere`).
    preferred: dict = field(default_factory=dict)
    log: str = ""

    def __str__(self) -> str:
        if self.refused:
            return f"refuses (exit status {self.status})"
        lists = {}
        for resource, devices in self.lists.items():
            healthy = sum(health == "Healthy" for health in devices.values())
            lists[resource] = f"{healthy} of {len(devices)} healthy"
        return f"{lists or 'serves nothing'} {self.answers} {self.preferred}"
