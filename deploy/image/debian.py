"""Debian's packages of any architecture, downloaded by this machine's apt-get and never installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

RELEASE = "bookworm"
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SOURCES = [
    f"deb [signed-by={_KEYS}] http://deb.debian.org/debian {RELEASE} main",
    f"deb [signed-by={_KEYS}] http://deb.debian.org/debian-security {RELEASE}-security main",
]


class PackageError(Exception):
    """Packages cannot be downloaded or read; its text says why."""


def packages(names: list[str], architecture: str, cache: Path, refresh: bool = True) -> dict[str, Path]:
    """The packages' archives by their names, for an architecture as Debian calls it, in the folder `cache`, which is for
    them alone. `refresh`: the newest, with the newest security fixes; otherwise those in the folder, if all are there."""
    if refresh or set(_archives(cache)) != set(names):
        _download(names, architecture, cache)
    archives = _archives(cache)
    missing = set(names) - set(archives)
    if missing:
        raise PackageError(f"apt-get has downloaded no {', '.join(sorted(missing))} for {architecture} into {cache}")
    return archives


def description(archive: Path) -> bytes:
    """A package's description: its name, version, source and so on."""
    return _run(["dpkg-deb", "--field", archive])


def files(archive: Path) -> bytes:
    """A package's files, as a tar file."""
    return _run(["dpkg-deb", "--fsys-tarfile", archive])


def _archives(cache: Path) -> dict[str, Path]:
    return {path.name.partition("_")[0]: path for path in sorted(cache.glob("*.deb"))}


def _download(names: list[str], architecture: str, cache: Path) -> None:
    """apt's lists and settings are the folder's own, so that this machine's stay as they are."""
    for folder in ("apt/lists/partial", "apt/archives/partial"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
    (cache / "apt" / "sources.list").write_text("\n".join([*_SOURCES, ""]), encoding="ascii")
    (cache / "apt" / "status").touch()
    for old in cache.glob("*.deb"):
        old.unlink()
    settings = {
        "Dir::State::Lists": cache / "apt" / "lists",
        "Dir::State::Status": cache / "apt" / "status",
        "Dir::Cache": cache / "apt",
        "Dir::Etc::SourceList": cache / "apt" / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        # As root, apt would download as a user who may not write to this folder.
        "APT::Sandbox::User": "root",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    for command in (["update"], ["download", *names]):
        _run(["apt-get", "-qq", *options, *command], cwd=cache)


def _run(command: list, cwd: Path | None = None) -> bytes:
    command = [str(word) for word in command]
    try:
        done = subprocess.run(command, capture_output=True, cwd=cwd, env={**os.environ, "LC_ALL": "C"}, check=False)
    except FileNotFoundError as error:
        raise PackageError(f"{command[0]} is not installed: this needs Debian or Ubuntu; elsewhere, build deploy/Dockerfile") from error
    if done.returncode != 0:
        raise PackageError(f"`{' '.join(command)}`: exit {done.returncode}: {done.stderr.decode(errors='replace').strip()[-1500:]}")
    return done.stdout
