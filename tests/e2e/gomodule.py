"""Builds programs from one of this test's small Go modules, once, into the cache."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path

import machine
import process
from places import HERE, cache
from say import TestError, note

#: A cold build of the kubelet on two cores takes four to eight minutes; this is for slow machines.
_BUILD_SECONDS = 3600


class GoModule:
    """A folder with a go.mod that requires one module, at a fixed version, and the programs to build from it.

    `packages` are folders of that module; the last word of each is the program's name. `cgo`: with a C
    compiler, for what loads a C library; such a program must not be linked so that symbols resolve at once.
    `with_version`: links the version into the programs of Kubernetes, which report none otherwise; Berth reads the API server's.
    `reported_version`: the version that the programs report instead of their own.
    """

    def __init__(
        self,
        name: str,
        module: str,
        packages: list[str],
        cgo: bool = False,
        with_version: bool = False,
        reported_version: str = "",
    ) -> None:
        self.name = name
        self.module = module
        self.packages = packages
        self.cgo = cgo
        self.with_version = with_version or bool(reported_version)
        self.reported_version = reported_version
        #: The version to build; if empty, the one in our go.mod.
        self._other_version = ""
        self._source = HERE / name

    @property
    def version(self) -> str:
        """The version that is built."""
        return self._other_version or self._required()

    def choose(self, version: str) -> None:
        """Builds this version of Kubernetes, whatever our go.mod requires."""
        self._other_version = "" if version == self._required() else version

    def _required(self) -> str:
        """The version that our go.mod requires."""
        text = (self._source / "go.mod").read_text(encoding="utf-8")
        found = re.search(rf"^require {re.escape(self.module)} (v\S+)$", text, re.M)
        if not found:
            raise TestError(f"{self._source / 'go.mod'} requires no {self.module}")
        return found.group(1)

    def _derive(self, folder: Path) -> None:
        """Copies our module and replaces the version of Kubernetes in its go.mod. Modules of Kubernetes that are v0.X there
        belong to Kubernetes v1.X."""
        shutil.copytree(self._source, folder)
        file, ours = folder / "go.mod", self._required()
        text = file.read_text(encoding="utf-8").replace(ours, self._other_version)
        text = text.replace(ours.replace("v1.", "v0.", 1), self._other_version.replace("v1.", "v0.", 1))
        file.write_text(text, encoding="utf-8")
        process.run(
            [machine.go(), "mod", "tidy", "-C", folder],
            f"go mod tidy of {self.name} {self._other_version}",
            seconds=_BUILD_SECONDS,
        )

    @property
    def folder(self) -> Path:
        """Where the programs are kept; the version is part of the name, so a new one is built beside the old one."""
        suffix = f"-shown-as-{self.reported_version}" if self.reported_version else "-with-version" if self.with_version else ""
        return cache() / f"{self.name}-{self.version}{suffix}"

    @property
    def is_built(self) -> bool:
        return self.folder.is_dir()

    def build(self) -> Path:
        """Builds if the cache lacks it. The folder appears in the cache whole or not at all."""
        if self.is_built:
            return self.folder
        cache().mkdir(parents=True, exist_ok=True)
        note(f"building {self.name} {self.version} into {self.folder}; this takes some minutes, once")
        begin = time.monotonic()
        unfinished = Path(tempfile.mkdtemp(prefix=f"{self.name}-unfinished-", dir=cache()))
        try:
            packages = [f"{self.module}/{package}".rstrip("/") for package in self.packages]
            # go-nvml names functions that only some libnvidia-ml have: they are looked up when first called.
            link = "-s -w -extldflags=-Wl,-z,lazy" if self.cgo else "-s -w"
            if self.with_version:
                link += f" -X k8s.io/component-base/version.gitVersion={self.reported_version or self.version}"
            source = self._source
            if self._other_version:
                source = unfinished / "source"
                self._derive(source)
            command = [machine.go(), "build", "-C", source, "-mod=readonly", "-trimpath", f"-ldflags={link}"]
            process.run(
                [*command, "-o", f"{unfinished}/", *packages],
                f"build {self.name} (its Go modules come from GOPROXY)",
                {"CGO_ENABLED": "1" if self.cgo else "0"},
                seconds=_BUILD_SECONDS,
            )
            unfinished.rename(self.folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        note(f"built in {time.monotonic() - begin:.0f} s")
        return self.folder
