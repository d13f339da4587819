"""A containerd of the test's own: own socket, own folders, so one that is there already is not touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import images
import process
from gomodule import GoModule
from places import CDI_SPECS, CONTAINERD_CONFIG, CONTAINERD_SOCKET, LIB, RUN
from say import TestError, until

#: A containerd of version 2, for machines whose package is older.
MODULE = GoModule(
    "containerd",
    "github.com/containerd/containerd/v2",
    ["cmd/containerd", "cmd/containerd-shim-runc-v2", "cmd/ctr"],
)

#: First version whose CRI plugin puts CDI devices into containers.
_FIRST_WITH_CDI = (1, 7)


class Containerd:
    """`binaries` is a folder with containerd, ctr and the runc shim; empty: those of PATH."""

    def __init__(self, logs: Path, binaries: str = "") -> None:
        self._folder = binaries
        self.version = self._read_version()
        env = {"PATH": f"{binaries}:/usr/sbin:/usr/bin:/sbin:/bin"} if binaries else None
        args = [self._program("containerd"), "--config", CONTAINERD_CONFIG]
        self._process = process.Process("containerd", args, logs / "containerd.log", env)

    @property
    def has_cdi(self) -> bool:
        return self._numbers() >= _FIRST_WITH_CDI

    def start(self) -> None:
        CONTAINERD_CONFIG.write_text(self._settings(), encoding="utf-8")
        CDI_SPECS.mkdir(exist_ok=True)
        (RUN / "cni").mkdir(exist_ok=True)
        # Never called, since all pods use the host's network; but a node without any network is never Ready.
        network = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]}
        (RUN / "cni" / "none.conflist").write_text(json.dumps(network), encoding="utf-8")
        self._process.start()

        def answers() -> bool:
            self._process.check()
            self._ctr("version")
            return True

        until("containerd answers", 30, answers)
        for archive in images.build(RUN):
            self.take(archive)

    def stop(self) -> None:
        self._process.stop()

    def take(self, archive: Path) -> None:
        """Takes the image of an archive, for pods to run."""
        self._ctr("-n", "k8s.io", "images", "import", archive)

    def tag(self, name: str, other: str) -> None:
        """Gives an image that is here another name, as a pull by that name would."""
        self._ctr("-n", "k8s.io", "images", "tag", name, other)

    def _ctr(self, *args) -> str:
        return process.run([self._program("ctr"), "--address", CONTAINERD_SOCKET, *args], f"ctr {args[-1]}")

    def _program(self, name: str) -> str:
        return str(Path(self._folder) / name) if self._folder else name

    def _read_version(self) -> str:
        said = process.run([self._program("containerd"), "--version"], "containerd --version")
        found = re.search(r"\bv?(\d+\.\d+\.\d+\S*)", said)
        if not found:
            raise TestError(f"containerd --version says {said.strip()!r}, which names no version")
        return found.group(1)

    def _numbers(self) -> tuple:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    def _settings(self) -> str:
        """A file of version 2, which containerd 1.6 and 2.x both read.

        `restrict_oom_score_adj`: without CAP_SYS_RESOURCE runc may not lower a sandbox's score, and fails.
        The pods use the host's network, so no CNI plugin is there.
        """
        cdi = f'  enable_cdi = true\n  cdi_spec_dirs = ["{CDI_SPECS}"]' if self.has_cdi else ""
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        return f"""version = 2
root = "{LIB}/containerd"
state = "{RUN}/containerd"

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{LIB}/opt"

[{cri}]
  sandbox_image = "{images.PAUSE}"
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
{cdi}

[{cri}.cni]
  bin_dir = "{RUN}/cni"
  conf_dir = "{RUN}/cni"

[{cri}.containerd]
  snapshotter = "{_snapshotter()}"

[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[{cri}.containerd.runtimes.runc.options]
  SystemdCgroup = false
  Root = "{RUN}/runc"
"""


def _snapshotter() -> str:
    """overlayfs, except where the folder itself lies on an overlay, as in a container: there it cannot be stacked."""
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, after = line.split(" - ", 1)
        point = before.split()[4]
        if f"{LIB}/".startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return "native" if kind == "overlay" else "overlayfs"
