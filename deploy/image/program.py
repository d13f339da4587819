"""Compiles the program for an architecture: this machine's, or another one with Debian's C compiler for it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Architecture:
    """An architecture as Go and Debian call it."""

    name: str
    #: As `uname -m` and QEMU call it.
    machine: str
    #: Packages to build for it on another machine: a C compiler, which is also the linker, and the C library.
    packages: tuple[str, ...]

    @property
    def triple(self) -> str:
        return f"{self.machine}-unknown-linux-gnu"

    @property
    def compiler(self) -> str:
        return f"{self.machine}-linux-gnu-gcc"

    @property
    def is_native(self) -> bool:
        return platform.machine() == self.machine


ARCHITECTURES = {
    "amd64": Architecture("amd64", "x86_64", ("gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross")),
    "arm64": Architecture("arm64", "aarch64", ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross")),
}


class BuildError(Exception):
    """The program cannot be built; its text says why, and what helps."""


def native() -> Architecture:
    """This machine's. `BuildError` if no image is made for it."""
    for architecture in ARCHITECTURES.values():
        if architecture.is_native:
            return architecture
    raise BuildError(f"berth is built for amd64 and arm64, not for {platform.machine()}")


def prepare(architecture: Architecture) -> None:
    """Installs what compiling for another machine needs, if it is missing: a C compiler, as root, and Rust's standard library.
    `BuildError` if that fails, with the command that installs it."""
    if architecture.is_native:
        return
    if not shutil.which(architecture.compiler):
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *architecture.packages]
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise BuildError(f"{architecture.compiler} is not installed: run `sudo {' '.join(install)}`")
        if subprocess.run(install, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=False).returncode != 0:
            raise BuildError(f"`{' '.join(install)}` failed, see above; run `apt-get update` first")
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], cwd=REPO, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not (Path(sysroot) / "lib" / "rustlib" / architecture.triple).is_dir():
        add = ["rustup", "target", "add", architecture.triple]
        try:
            added = subprocess.run(add, cwd=REPO, check=False).returncode == 0
        except FileNotFoundError:
            added = False
        if not added:
            raise BuildError(f"rustc has no standard library for {architecture.triple}, and `{' '.join(add)}` failed")


def build(architecture: Architecture, profile: str) -> Path:
    """The path of the program, built with that profile of Cargo.toml, after `prepare`. It takes minutes for `dist`, which is
    optimised as a whole. `BuildError` if it fails."""
    cargo = os.environ.get("CARGO", "cargo")
    command = [cargo, "build", "--locked", "--package", "berth", "--bin", "berth", "--profile", profile]
    env = dict(os.environ)
    if not architecture.is_native:
        triple = architecture.triple
        command += ["--target", triple]
        # ring and wasmtime have a little C and assembly.
        env[f"CC_{triple.replace('-', '_')}"] = architecture.compiler
        env[f"CARGO_TARGET_{triple.replace('-', '_').upper()}_LINKER"] = architecture.compiler
    if subprocess.run(command, cwd=REPO, env=env, check=False).returncode != 0:
        raise BuildError(f"`{' '.join(command)}` failed, see above")
    described = subprocess.run(
        [cargo, "metadata", "--locked", "--no-deps", "--format-version=1"], cwd=REPO, stdout=subprocess.PIPE, check=True
    )
    target = Path(json.loads(described.stdout)["target_directory"])
    folder = "debug" if profile == "dev" else profile
    return (target if architecture.is_native else target / architecture.triple) / folder / "berth"
