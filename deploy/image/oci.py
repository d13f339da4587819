"""Writes an image of several architectures as an OCI archive: the image layout of the OCI specification in a tar file.

The same inputs give the same bytes, and so the same digests: entries are sorted, owned by root and dated 1970, and
gzip's header has neither a time nor a name. Only another version of zlib may compress to other bytes.

https://github.com/opencontainers/image-spec: image-layout.md, image-index.md, manifest.md, config.md, layer.md.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

_CREATED = "1970-01-01T00:00:00Z"


@dataclass(frozen=True)
class Entry:
    """A file, a symbolic link or a folder. `mode` has the permission bits of a file or folder."""

    kind: str  # "file", "link" or "folder"
    mode: int = 0o644
    data: bytes = b""
    target: str = ""


def file(data: bytes, mode: int = 0o644) -> Entry:
    return Entry("file", mode, data=data)


def link(target: str) -> Entry:
    return Entry("link", 0o777, target=target)


def folder(mode: int = 0o755) -> Entry:
    return Entry("folder", mode)


@dataclass(frozen=True)
class Layer:
    """A compressed layer. `diff_id` is the digest of its tar before compression."""

    data: bytes
    diff_id: str
    made_by: str


@dataclass(frozen=True)
class Image:
    """One architecture of an image, as the archive has it. `size` is what a node downloads: the sum of the compressed
    layers, in bytes."""

    architecture: str
    size: int
    #: The digest of its configuration, which containerd calls the image's ID.
    config: str


@dataclass(frozen=True)
class Archive:
    """What an archive has. `digest` is that of the index, which a registry shows for the image and the chart takes."""

    digest: str
    images: list[Image]


def layer(entries: dict[str, Entry], made_by: str) -> Layer:
    """A layer of entries by their paths, which are relative to the root. Folders above them are added where missing."""
    folders = {str(parent) for path in entries for parent in PurePosixPath(path).parents if str(parent) != "."}
    entries = {**{path: folder() for path in folders}, **entries}
    tar = _tar(sorted(entries.items()))
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=9, fileobj=packed, mtime=0) as out:
        out.write(tar)
    return Layer(packed.getvalue(), _digest(tar), made_by)


def write(path: Path, name: str, settings: dict, layers: dict[str, list[Layer]]) -> Archive:
    """Writes the archive of image `name` (REPOSITORY:TAG) with the layers of each architecture, as Go and Debian call it
    (amd64). `settings` is the `config` of the image's configuration: Entrypoint, Labels and the like."""
    blobs: dict[str, bytes] = {}

    def add(kind: str, data: bytes) -> dict:
        blobs[_digest(data)] = data
        return {"mediaType": kind, "digest": _digest(data), "size": len(data)}

    manifests = []
    for architecture, own in sorted(layers.items()):
        config = {
            "created": _CREATED,
            "architecture": architecture,
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [one.diff_id for one in own]},
            "history": [{"created": _CREATED, "created_by": one.made_by} for one in own],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": add(CONFIG, _json(config)),
            "layers": [add(LAYER, one.data) for one in own],
        }
        platform = {"architecture": architecture, "os": "linux"}
        manifests.append({**add(MANIFEST, _json(manifest)), "platform": platform})
    index = add(INDEX, _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}))
    # The tag for the tools that follow the specification, the whole name for containerd.
    names = {"org.opencontainers.image.ref.name": name.rpartition(":")[2], "io.containerd.image.name": name}
    top = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [{**index, "annotations": names}]}
    files = {f"blobs/{digest.replace(':', '/')}": data for digest, data in blobs.items()}
    files["index.json"] = _json(top)
    files["oci-layout"] = _json({"imageLayoutVersion": "1.0.0"})
    entries = {**{name: folder() for name in ("blobs", "blobs/sha256")}, **{name: file(data) for name, data in files.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(_tar(sorted(entries.items())))
    unfinished.replace(path)
    return inspect(path)


def inspect(path: Path) -> Archive:
    """What an archive has. `ValueError` if a blob is not what its digest says, `KeyError` if there is no such blob."""
    blobs = _Blobs(path)
    images = []
    for architecture, manifest in blobs.manifests().items():
        images.append(Image(architecture, sum(one["size"] for one in manifest["layers"]), manifest["config"]["digest"]))
    return Archive(blobs.index["digest"], images)


def read(path: Path, architecture: str) -> tuple[dict, list[bytes]]:
    """The configuration of an archive's image for an architecture, and its layers' tar files, unpacked. Errors as for
    `inspect`."""
    blobs = _Blobs(path)
    manifest = blobs.manifests()[architecture]
    config = json.loads(blobs.read(manifest["config"]))
    layers = [gzip.decompress(blobs.read(one)) for one in manifest["layers"]]
    if [_digest(one) for one in layers] != config["rootfs"]["diff_ids"]:
        raise ValueError(f"{path}: the diff_ids of {architecture} are not those of its layers")
    return config, layers


class _Blobs:
    """The blobs of an archive by their descriptors. `index` is that of its one image."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with tarfile.open(path) as tar:
            self._files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        [self.index] = json.loads(self._files["index.json"])["manifests"]

    def read(self, descriptor: dict) -> bytes:
        data = self._files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
        if _digest(data) != descriptor["digest"] or len(data) != descriptor["size"]:
            raise ValueError(f"{self._path}: the blob {descriptor['digest']} has another digest or size")
        return data

    def manifests(self) -> dict[str, dict]:
        """The manifest of each architecture."""
        listed = json.loads(self.read(self.index))["manifests"]
        return {one["platform"]["architecture"]: json.loads(self.read(one)) for one in listed}


def _tar(entries: list[tuple[str, Entry]]) -> bytes:
    """Times and owners are TarInfo's defaults: 1970, and root."""
    kinds = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "folder": tarfile.DIRTYPE}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, entry in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.size, member.linkname = kinds[entry.kind], entry.mode, len(entry.data), entry.target
            tar.addfile(member, io.BytesIO(entry.data))
    return out.getvalue()


def _json(value: dict) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
