"""What the program needs beside itself, from Debian's packages: libc and libgcc, CA certificates, user names, and the
release of Debian. No shell and no package manager.

Like the distroless images, it keeps each package's copyright file, and its description in /var/lib/dpkg/status.d, by which
scanners of images know the packages.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import debian
import oci

#: What is kept of each package, beside its copyright file: files, and folders with what is in them.
PACKAGES: dict[str, tuple[str, ...]] = {
    "base-files": ("etc/debian_version", "etc/os-release", "usr/lib/os-release", "usr/share/common-licenses"),
    "ca-certificates": ("usr/share/ca-certificates/mozilla",),
    # The copyright file of libgcc-s1 is a link into its folder.
    "gcc-12-base": (),
    # At least as new as the libc that the program is linked with.
    "libc6": ("etc/ld.so.conf.d", "lib", "lib64"),
    "libgcc-s1": ("lib",),
}
_CERTIFICATES = "usr/share/ca-certificates/mozilla/"
#: Where TLS libraries look for the certificates, all in one file. The package makes it when it is installed.
BUNDLE = "etc/ssl/certs/ca-certificates.crt"
_DESCRIPTIONS = "var/lib/dpkg/status.d"
_OWN = {
    # Where the runtime mounts its own.
    **{name: oci.folder() for name in ("dev", "proc", "run", "sys")},
    "root": oci.folder(0o700),
    "tmp": oci.folder(0o1777),
    "etc/passwd": oci.file(
        b"root:x:0:0:root:/root:/sbin/nologin\n"
        b"nonroot:x:65532:65532:nonroot:/nonexistent:/sbin/nologin\n"
    ),
    "etc/group": oci.file(b"root:x:0:\nnonroot:x:65532:\n"),
    "etc/nsswitch.conf": oci.file(b"passwd: files\ngroup: files\nhosts: files dns\n"),
    # NVIDIA's runtime adds the folders of its libraries to that folder, and has the linker's cache made.
    "etc/ld.so.conf": oci.file(b"include /etc/ld.so.conf.d/*.conf\n"),
}


def entries(architecture: str, cache: Path, refresh: bool = True) -> dict[str, oci.Entry]:
    """The base of an architecture; `cache` and `refresh` as for `debian.packages`, whose error this raises."""
    archives = debian.packages(list(PACKAGES), architecture, cache, refresh)
    found = dict(_OWN)
    for package in PACKAGES:
        found[f"{_DESCRIPTIONS}/{package}"] = oci.file(debian.description(archives[package]))
        found.update(kept(package, debian.files(archives[package])))
    certificates = sorted(path for path in found if path.startswith(_CERTIFICATES))
    if not certificates:
        raise debian.PackageError(f"ca-certificates has no certificates in /{_CERTIFICATES}")
    found[BUNDLE] = oci.file(b"".join(found.pop(path).data for path in certificates))
    return found


def kept(package: str, tar: bytes) -> dict[str, oci.Entry]:
    """What the image keeps of a package's files, which are a tar file."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as members:
        for member in members:
            path = member.name.removeprefix("./").rstrip("/")
            if not _is_kept(package, path):
                continue
            if member.issym():
                found[path] = oci.link(member.linkname)
            elif member.isfile():
                # Without setuid, whatever the package says.
                found[path] = oci.file(members.extractfile(member).read(), member.mode & 0o755)
            elif not member.isdir():
                raise debian.PackageError(f"{package} has /{path}, which is neither a file nor a symbolic link")
    return found


def versions(entries: dict[str, oci.Entry]) -> list[str]:
    """`NAME VERSION` of each package of a base."""
    found = []
    for package in PACKAGES:
        lines = entries[f"{_DESCRIPTIONS}/{package}"].data.decode().splitlines()
        found.append(f"{package} {next(line for line in lines if line.startswith('Version: ')).split()[1]}")
    return found


def _is_kept(package: str, path: str) -> bool:
    documents = f"usr/share/doc/{package}"
    # The second where it is a link to the folder of another package.
    if path in (f"{documents}/copyright", documents):
        return True
    return any(path == one or path.startswith(f"{one}/") for one in PACKAGES[package])
