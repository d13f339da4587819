"""Checks of deploy/image without a compiler and without Debian: what an archive is, and that it says what
deploy/Dockerfile and the chart say."""

from __future__ import annotations

import io
import re
import sys
import tarfile
import tempfile
from pathlib import Path

import chart

sys.path.insert(0, str(chart.REPO / "deploy" / "image"))
import base  # noqa: E402
import build  # noqa: E402
import debian  # noqa: E402
import oci  # noqa: E402

_ENTRIES = {
    "usr/bin/berth": oci.file(b"the program", 0o755),
    "etc/os-release": oci.link("../usr/lib/os-release"),
    "tmp": oci.folder(0o1777),
}
#: The members of its layer: kind, mode, what a link leads to.
_MEMBERS = {
    "etc": (tarfile.DIRTYPE, 0o755, ""),
    "etc/os-release": (tarfile.SYMTYPE, 0o777, "../usr/lib/os-release"),
    "tmp": (tarfile.DIRTYPE, 0o1777, ""),
    "usr": (tarfile.DIRTYPE, 0o755, ""),
    "usr/bin": (tarfile.DIRTYPE, 0o755, ""),
    "usr/bin/berth": (tarfile.REGTYPE, 0o755, ""),
}
_NAME = "registry.example.com/berth:1.2"


def archive_faults() -> list[str]:
    """What is wrong with an archive of two architectures, read back by its digests."""
    reversed_entries = dict(reversed(_ENTRIES.items()))
    layers = {"arm64": [oci.layer(_ENTRIES, "a")], "amd64": [oci.layer(_ENTRIES, "a"), oci.layer({}, "b")]}
    same = {"amd64": [oci.layer(reversed_entries, "a"), oci.layer({}, "b")], "arm64": [oci.layer(reversed_entries, "a")]}
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "a.tar", Path(folder) / "b.tar"
        written = oci.write(first, _NAME, build.SETTINGS, layers)
        if oci.write(second, _NAME, build.SETTINGS, same) != written or first.read_bytes() != second.read_bytes():
            faults.append("the same image is written in two ways")
        # Four bytes of gzip's header (RFC 1952) are the time.
        if any(one.data[4:8] != bytes(4) for own in layers.values() for one in own):
            faults.append("a layer has the time of its compression")
        sizes = {one.architecture: one.size for one in written.images}
        if sizes != {name: sum(len(one.data) for one in own) for name, own in layers.items()}:
            faults.append(f"the sizes are {sizes}")
        for architecture, own in layers.items():
            config, tars = oci.read(first, architecture)
            if (config["architecture"], config["os"], config["config"]) != (architecture, "linux", build.SETTINGS):
                faults.append(f"the configuration of {architecture} is {config}")
            if len(tars) != len(own) or len(config["history"]) != len(own):
                faults.append(f"{architecture} has {len(tars)} layers and {len(config['history'])} lines of history")
            faults += _layer_faults(tars[0])
        if written.digest.encode() not in _member(first, "index.json") or _NAME.encode() not in _member(first, "index.json"):
            faults.append("index.json has not the index' digest and the image's name")
        data = first.read_bytes()
        second.write_bytes(data.replace(b'"linux"', b'"Linux"'))
        try:
            oci.read(second, "amd64")
            faults.append("an archive with a changed blob is read")
        except ValueError:
            pass
    return faults


def base_faults() -> list[str]:
    """What is kept of a package: its libraries and its copyright file, without setuid."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as out:
        for path, mode in (
            ("./lib/x86_64-linux-gnu/libc.so.6", 0o4755),
            ("./lib64x", 0o644),
            ("./usr/lib/gconv/A.so", 0o644),
            ("./usr/share/doc/libc6/copyright", 0o644),
            ("./usr/share/doc/libc6/changelog.gz", 0o644),
        ):
            member = tarfile.TarInfo(path)
            member.mode = mode
            out.addfile(member)
    kept = {path: entry.mode for path, entry in base.kept("libc6", tar.getvalue()).items()}
    wanted = {"lib/x86_64-linux-gnu/libc.so.6": 0o755, "usr/share/doc/libc6/copyright": 0o644}
    return [] if kept == wanted else [f"of libc6 it keeps {kept}, wanted {wanted}"]


def settings_faults() -> list[str]:
    """Where deploy/image says something else than deploy/Dockerfile and the chart."""
    text = (chart.REPO / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    last_stage = text[text.rindex("\nFROM ") :]
    labels = dict(re.findall(r'(org\.opencontainers\.\S+)="([^"]*)"', last_stage))
    said = {
        "User": re.search(r"^USER (\S+)$", last_stage, re.M)[1],
        "Entrypoint": re.search(r'^ENTRYPOINT \["(\S+)"\]$', last_stage, re.M)[1].split(),
        "Cmd": re.search(r'^CMD \["(\S+)"\]$', last_stage, re.M)[1].split(),
        "Labels": labels,
    }
    faults = []
    for key, value in said.items():
        if build.SETTINGS[key] != value:
            faults.append(f"{key} of deploy/Dockerfile is {value}, of deploy/image {build.SETTINGS[key]}")
    if f"slim-{debian.RELEASE}" not in text:
        faults.append(f"deploy/Dockerfile does not compile on {debian.RELEASE}")
    manifest = (chart.MANIFESTS / "berth.yaml").read_text(encoding="utf-8")
    if f'image: "{build.name()}"' not in manifest:
        faults.append(f"the chart's image is not {build.name()}")
    return faults


def _layer_faults(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
        program = tar.extractfile("usr/bin/berth").read()
    faults = [] if program == b"the program" else [f"usr/bin/berth is {program!r}"]
    if {one.name: (one.type, one.mode, one.linkname) for one in members} != _MEMBERS or [one.name for one in members] != list(_MEMBERS):
        faults.append(f"a layer has {[(one.name, one.type, oct(one.mode)) for one in members]}")
    return faults + [f"{one.name} has an owner or a time" for one in members if (one.uid, one.gid, one.mtime) != (0, 0, 0)]


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as tar:
        return tar.extractfile(name).read()
