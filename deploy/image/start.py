"""Starts an image of an archive, without root and without a container runtime: `berth --version`, then a daemon on simulated
GPUs, which compiles a policy. Another machine's program runs under QEMU."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import debian
import oci
import program

_POLICY = program.REPO / "policies-wasm" / "prebuilt" / "binpack.wasm"
#: For a daemon to start and to compile a policy: it takes a second, under QEMU and not optimised up to a minute.
_SECONDS = 180
#: For all else that is run here.
_MORE_SECONDS = 60


class StartError(Exception):
    """The image does not start; its text has what was printed."""


def start(archive: Path, architecture: program.Architecture, cache: Path) -> str:
    """Starts the image and returns what `berth --version` printed. `cache` is a folder for QEMU, which is downloaded if this
    machine has none."""
    config, layers = oci.read(archive, architecture.name)
    if config["config"]["Entrypoint"] != ["/usr/bin/berth"]:
        raise StartError(f"the entry point is {config['config']['Entrypoint']}, not /usr/bin/berth")
    emulator = [] if architecture.is_native else [_emulator(architecture, cache), architecture.machine]
    with tempfile.TemporaryDirectory(prefix="berth-image-") as folder:
        for layer in layers:
            subprocess.run(["tar", "--extract", "--no-same-owner", f"--directory={folder}"], input=layer, check=True)
        namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        command = [*namespaces, Path(__file__).with_name("start.sh"), folder, _POLICY, _SECONDS, *emulator]
        try:
            done = subprocess.run(
                [str(word) for word in command], capture_output=True, text=True, timeout=_SECONDS + _MORE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise StartError(f"{architecture.name} has not ended after {error.timeout} s") from error
    if done.returncode != 0:
        hint = "" if architecture.is_native else " (before Linux 6.7 it needs `apt-get install qemu-user-static binfmt-support`)"
        raise StartError(f"{architecture.name} does not start{hint}: {(done.stdout + done.stderr).strip()[-3000:]}")
    return done.stdout.splitlines()[0]


def _emulator(architecture: program.Architecture, cache: Path) -> Path:
    """QEMU, linked statically, since the image lacks its libraries."""
    name = f"qemu-{architecture.machine}-static"
    installed = shutil.which(name)
    if installed:
        return Path(installed)
    package = "qemu-user-static"
    archive = debian.packages([package], program.native().name, cache, refresh=False)[package]
    subprocess.run(["dpkg-deb", "--extract", archive, cache / "files"], check=True)
    return cache / "files" / "usr" / "bin" / name
