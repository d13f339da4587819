"""The images of the test, made by hand, so that no registry is asked for anything.

A docker-archive is a tar with `manifest.json`, one config and one tar a layer;
`ctr images import` reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import process
from places import HERE
from say import TestError

BUSYBOX = "berth.invalid/e2e/busybox:1"
#: As NVIDIA's images of CUDA do, it sets the variable by which NVIDIA's runtime selects GPUs.
NAMES_GPUS = "berth.invalid/e2e/names-gpus:1"
PAUSE = "berth.invalid/e2e/pause:1"

_BUSYBOX_BINARY = Path("/bin/busybox")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def build(folder: Path) -> list[Path]:
    """Builds the archives into `folder` and returns their paths. It takes under a second, so nothing is kept."""
    sets_visible_devices = ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_REQUIRE_CUDA=cuda>=12.0"]
    return [
        _build_busybox(folder / "busybox.tar", BUSYBOX, ["PATH=/bin"]),
        _build_busybox(folder / "names-gpus.tar", NAMES_GPUS, sets_visible_devices),
        _build_pause(folder),
    ]


def _build_busybox(path: Path, name: str, environment: list[str]) -> Path:
    binary = _BUSYBOX_BINARY.read_bytes()
    applets = process.run([_BUSYBOX_BINARY, "--list"], "list busybox's applets").split()
    links = {f"bin/{name}": "busybox" for name in applets if name != "busybox"}
    layer = _tar(files={"bin/busybox": binary}, links=links, folders=["bin", "tmp"])
    return _archive(path, name, layer, {"Cmd": ["/bin/sh"], "Env": environment})


def _build_pause(folder: Path) -> Path:
    program = folder / "pause"
    compiler = ["cc", "-Os", "-static", "-o", program, HERE / "image" / "pause.c"]
    process.run(compiler, "compile image/pause.c (a C compiler and static libc: Debian's gcc and libc6-dev)")
    layer = _tar(files={"pause": program.read_bytes()}, links={}, folders=[])
    return _archive(folder / "pause.tar", PAUSE, layer, {"Cmd": ["/pause"], "Env": ["PATH=/bin"]})


def _archive(path: Path, name: str, layer: bytes, config: dict) -> Path:
    config = json.dumps(
        {
            "architecture": _architecture(),
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {config_name: config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(_tar(files=files, links={}, folders=[]))
    return path


def _tar(files: dict[str, bytes], links: dict[str, str], folders: list[str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
        for name, target in sorted(links.items()):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return out.getvalue()


def _architecture() -> str:
    machine = subprocess.run(["uname", "-m"], stdout=subprocess.PIPE, check=True).stdout.decode().strip()
    if machine not in _ARCHITECTURES:
        raise TestError(f"this test knows no image architecture for {machine}: add it to images.py")
    return _ARCHITECTURES[machine]
