"""A setup and the cases that are run on it."""

from __future__ import annotations

from berth import Setup
from gomodule import GoModule


class Scenario:
    """One setup and its cases, by the names that are printed.

    `cluster`: on a node of an API server, with pods made by kubectl. `berth_first`: Berth runs before the first
    case; without it, the first case starts what it wants.
    `install` is called with libfake_nvml.so, and puts a driver onto the node. `change_gpus` is called with the GPUs before
    Berth starts, and may change them. `modules`: the Go modules whose programs its cases run.
    `first_minor`: the first minor version of Kubernetes that has what the cases need.
    """

    def __init__(
        self,
        name: str,
        setup: Setup,
        cases: dict,
        before=None,
        cluster: bool = False,
        berth_first: bool = True,
        install=None,
        change_gpus=None,
        modules: tuple[GoModule, ...] = (),
        first_minor: int = 0,
    ) -> None:
        self.name = name
        self.setup = setup
        self.cases = cases
        self.before = before or (lambda: None)
        self.cluster = cluster
        self.berth_first = berth_first
        self.install = install or (lambda _: None)
        self.change_gpus = change_gpus or (lambda _: None)
        self.modules = modules
        self.first_minor = first_minor
