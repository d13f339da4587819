#!/usr/bin/env python3
"""The image of Berth for amd64 and arm64 as one OCI archive, without Docker: `just image`.

The program is compiled for each architecture, laid over a base of Debian's packages (`base.py`), and each image is started
once (`start.py`). deploy/Dockerfile builds the same on a distroless base.
Exit status: 0 if all images are built and start, else 1; the last line has the result of each architecture.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True

import base  # noqa: E402
import debian  # noqa: E402
import oci  # noqa: E402
import program  # noqa: E402
import start  # noqa: E402

#: As in the chart's values.
REPOSITORY = "registry.example.com/berth"
ARCHIVE = program.REPO / "target" / "image" / "berth.tar"
CACHE = program.REPO / ".cache" / "image"
#: The `config` of the image, as deploy/Dockerfile has it. The variables are those of the distroless images.
SETTINGS = {
    "User": "0:0",
    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", f"SSL_CERT_FILE=/{base.BUNDLE}"],
    "WorkingDir": "/",
    "Entrypoint": ["/usr/bin/berth"],
    "Cmd": ["serve"],
    "Labels": {
        "org.opencontainers.image.title": "berth",
        "org.opencontainers.image.description": "A Kubernetes node daemon that shares and guards a node's GPUs",
        "org.opencontainers.image.licenses": "Apache-2.0",
    },
}


def name() -> str:
    """The image's name with its tag, which the chart uses by default."""
    chart = (program.REPO / "deploy" / "helm" / "berth" / "Chart.yaml").read_text(encoding="utf-8")
    tag = re.search(r'^appVersion: "(.+)"$', chart, re.M)[1]
    return f"{REPOSITORY}:{tag}"


def image(programs: dict[str, Path], archive: Path, refresh: bool = True) -> oci.Archive:
    """Writes the archive with the program of each architecture. `refresh`: see `debian.packages`, whose error this raises."""
    layers = {}
    for architecture, path in programs.items():
        below = base.entries(architecture, CACHE / architecture, refresh)
        packages = ", ".join(base.versions(below))
        own = {
            "usr/bin/berth": oci.file(path.read_bytes(), 0o755),
            "usr/share/doc/berth/LICENSE": oci.file((program.REPO / "LICENSE").read_bytes()),
        }
        layers[architecture] = [oci.layer(below, f"Debian {debian.RELEASE}: {packages}"), oci.layer(own, "berth")]
        print(f"{architecture}: {packages}", flush=True)
    return oci.write(archive, name(), SETTINGS, layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="dist", help="the profile of Cargo.toml to build with")
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=f"default: {' '.join(program.ARCHITECTURES)}")
    args = parser.parse_args()
    wanted = list(dict.fromkeys(args.architectures)) or list(program.ARCHITECTURES)
    for architecture in wanted:
        if architecture not in program.ARCHITECTURES:
            parser.error(f"images are built for {' and '.join(program.ARCHITECTURES)}, not for {architecture}")
    programs, outcomes = _programs(wanted, args.profile)
    failed = bool(outcomes)
    if programs:
        try:
            written = image(programs, ARCHIVE)
        except debian.PackageError as why:
            print(why, flush=True)
            print("image: " + " ".join(f"{architecture}=not built (no base image, see above)" for architecture in wanted), flush=True)
            return 1
        for made in written.images:
            outcomes[made.architecture] = f"{made.size / 1e6:.0f} MB"
            try:
                version = start.start(ARCHIVE, program.ARCHITECTURES[made.architecture], CACHE / "qemu")
                print(f"{made.architecture}: {version} starts and compiles a policy", flush=True)
            except (start.StartError, debian.PackageError, program.BuildError) as why:
                print(why, flush=True)
                outcomes[made.architecture] += " (does not start)"
                failed = True
        print(f"{ARCHIVE.relative_to(program.REPO)}: {name()}, {written.digest}", flush=True)
    print("image: " + " ".join(f"{architecture}={outcomes[architecture]}" for architecture in wanted), flush=True)
    return 1 if failed else 0


def _programs(wanted: list[str], profile: str) -> tuple[dict[str, Path], dict[str, str]]:
    """The program of each architecture that can be built, and why the others cannot."""
    programs, reasons = {}, {}
    # What may be missing is installed first, since building takes minutes.
    for architecture in wanted:
        try:
            program.prepare(program.ARCHITECTURES[architecture])
        except program.BuildError as why:
            reasons[architecture] = f"not built ({why})"
    for architecture in (one for one in wanted if one not in reasons):
        print(f"{architecture}: building berth with the profile {profile}", flush=True)
        try:
            programs[architecture] = program.build(program.ARCHITECTURES[architecture], profile)
        except program.BuildError as why:
            reasons[architecture] = f"not built ({why})"
    return programs, reasons


if __name__ == "__main__":
    sys.exit(main())
