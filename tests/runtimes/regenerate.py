#!/usr/bin/env python3
"""What each containerd makes of the configuration files in `containerd/`: writes `containerd.json`, which Berth's reader is
tested against (src/strategy/runtime/containerd.rs).

    sudo -E python3 tests/runtimes/regenerate.py            # all versions
    sudo -E python3 tests/runtimes/regenerate.py --check    # changes nothing; exit status 1 if an answer changed

Each case is an archive in the txtar format: a comment, then files. containerd is given its usual file, or the first one if
that is in another folder. The answers are read out of `containerd config dump`, which runs in a chroot with these files
alone; without the file they are those of `containerd config default`. A dump says nothing of imports that do not exist, with
which the daemon does not start, so there is no such case. Needs root, Go and Python 3.11; the programs are built from Go
modules once, some minutes each, and kept where `tests/e2e` keeps its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))
sys.dont_write_bytecode = True

import machine  # noqa: E402
import places  # noqa: E402

#: The newest release of each series, and the last 2.3 that refuses a drop-in of a newer version than its root file.
VERSIONS = ["v1.7.35", "v2.0.14", "v2.1.9", "v2.2.9", "v2.3.4", "v2.3.7", "v2.4.2"]
ANSWERS = HERE / "containerd.json"
USUAL_FILE = "/etc/containerd/config.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description="What each containerd makes of the files in containerd/.")
    parser.add_argument("--check", action="store_true", help="compare with containerd.json and change nothing")
    check = parser.parse_args().check
    programs = {version: build(version) for version in VERSIONS}
    answers = {}
    for case in sorted((HERE / "containerd").glob("*.txtar")):
        files = read_archive(case.read_text(encoding="utf-8"))
        answers[case.stem] = {version: answer(program, files) for version, program in programs.items()}
    text = as_text(answers)
    if check:
        return 0 if ANSWERS.read_text(encoding="utf-8") == text else 1
    ANSWERS.write_text(text, encoding="utf-8")
    print(f"{len(answers)} cases, {len(VERSIONS)} versions: {ANSWERS}")
    return 0


def build(version: str) -> Path:
    """The program of a release, built with the dependencies that its own go.mod names."""
    folder = places.cache() / f"containerd-dump-{version}"
    if (folder / "containerd").is_file():
        return folder / "containerd"
    module = "github.com/containerd/containerd" + ("/v2" if version.startswith("v2.") else "")
    env = {**os.environ, "CGO_ENABLED": "0"}
    found = subprocess.run(
        [machine.go(), "mod", "download", "-json", f"{module}@{version}"], check=True, env=env, stdout=subprocess.PIPE
    )
    print(f"building containerd {version}", flush=True)
    unfinished = Path(tempfile.mkdtemp(prefix="containerd-dump-unfinished-", dir=places.cache()))
    try:
        options = ["-mod=readonly", "-trimpath", f"-ldflags=-s -w -X {module}/version.Version={version}"]
        source = json.loads(found.stdout)["Dir"]
        command = [machine.go(), "build", "-C", source, *options, "-o", unfinished / "containerd", "./cmd/containerd"]
        subprocess.run(command, check=True, env=env)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder / "containerd"


def read_archive(text: str) -> dict[str, str]:
    """The files of a txtar archive by path, in their order; the comment before the first is left out."""
    parts = re.split(r"^-- (\S+) --\n", text, flags=re.M)[1:]
    return dict(zip(parts[0::2], parts[1::2]))


def answer(program: Path, files: dict[str, str]) -> dict:
    """What this containerd makes of the files; `error` if it would not start with them."""
    with tempfile.TemporaryDirectory(prefix="berth-runtimes-") as root:
        for path, text in files.items():
            file = Path(root + path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        os.link(program, f"{root}/containerd") if same_disk(program, root) else shutil.copy(program, f"{root}/containerd")
        file = given_file(files)
        # A containerd that was given no file and finds none starts with its defaults; the dump of 1.7 is an error there.
        arguments = ["--config", file, "config", "dump"] if Path(root + file).is_file() else ["config", "default"]
        dump = subprocess.run(["chroot", root, "/containerd", *arguments], capture_output=True, text=True, timeout=60)
    if dump.returncode != 0:
        return {"error": dump.stderr.strip().splitlines()[-1]}
    return settings(tomllib.loads(dump.stdout))


def given_file(files: dict[str, str]) -> str:
    first = next(iter(files), USUAL_FILE)
    return USUAL_FILE if Path(USUAL_FILE).parent in Path(first).parents else first


def same_disk(program: Path, root: str) -> bool:
    return program.stat().st_dev == os.stat(root).st_dev


def settings(dump: dict) -> dict:
    """What Berth reads, out of a dump."""
    plugins = dump.get("plugins", {})
    names = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"]
    off = set(dump.get("disabled_plugins", []))
    cri = plugins.get(names[1], plugins.get(names[0], {}))
    # containerd 1.7 makes this section, which later versions ignore, the default runtime when its plugin starts.
    legacy = cri.get("containerd", {}).get("default_runtime", {})
    name = cri.get("containerd", {}).get("default_runtime_name", "")
    runtime = cri.get("containerd", {}).get("runtimes", {}).get(name, {})
    if legacy.get("runtime_type"):
        name, runtime = "default", legacy
    if not cri or off & {*names, "cri"}:
        return {"cri": False}
    return {
        "cri": True,
        # containerd 2.4 has no such setting: CDI is always on.
        "cdi": cri.get("enable_cdi", True),
        "specDirs": cri["cdi_spec_dirs"],
        "defaultRuntime": name,
        "program": runtime.get("options", {}).get("BinaryName", ""),
    }


def as_text(answers: dict) -> str:
    """JSON with one line for each answer; versions that answer alike share it."""
    cases = []
    for case, by_version in answers.items():
        alike: dict[str, list[str]] = {}
        for version, found in by_version.items():
            alike.setdefault(json.dumps(found), []).append(version)
        lines = [f'    {{"versions": {json.dumps(versions)}, "answer": {found}}}' for found, versions in alike.items()]
        cases.append(f"  {json.dumps(case)}: [\n" + ",\n".join(lines) + "\n  ]")
    return "{\n" + ",\n".join(cases) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
