"""A containerd of the test's own: own socket, own folders, so one that is there already is not touched."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import images
import process
from gomodule import GoModule
from places import CDI_SPECS, CONTAINERD_CONFIG, CONTAINERD_DROP_INS, CONTAINERD_SOCKET, LIB, NRI_SOCKET, RUN
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
        self._serve()
        for archive in images.build(RUN):
            self.take(archive)

    def stop(self) -> None:
        self._process.stop()

    def restart(self, root: str = "", drop_in: str = "") -> None:
        """Starts it again with another root file and a drop-in; without arguments with its usual file. Containers run on."""
        self.stop()
        shutil.rmtree(CONTAINERD_DROP_INS, ignore_errors=True)
        CONTAINERD_DROP_INS.mkdir()
        if drop_in:
            (CONTAINERD_DROP_INS / "99-nvidia.toml").write_text(drop_in, encoding="utf-8")
        CONTAINERD_CONFIG.write_text(root or self._settings(), encoding="utf-8")
        self._serve()

    def migrated(self) -> str:
        """Its usual file as `config migrate` writes it in its newest version, with the drop-ins imported."""
        found = self._config("migrate")
        return re.sub(r"^imports = .*$", f'imports = ["{CONTAINERD_DROP_INS}/*.toml"]', found, count=1, flags=re.M)

    def default_runtime(self) -> str:
        """The default runtime of pods, by its own reading of its files."""
        found = re.search(r"^\s*default_runtime_name = ['\"](.*)['\"]$", self._config("dump"), re.M)
        if not found:
            raise TestError("containerd config dump shows no default_runtime_name")
        return found.group(1)

    def _serve(self) -> None:
        self._process.start()

        def answers() -> bool:
            self._process.check()
            self._ctr("version")
            return True

        until("containerd answers", 30, answers)

    def _config(self, command: str) -> str:
        args = [self._program("containerd"), "--log-level", "fatal", "--config", CONTAINERD_CONFIG, "config", command]
        return process.run(args, f"containerd config {command}")

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

[plugins."io.containerd.nri.v1.nri"]
  disable = false
  socket_path = "{NRI_SOCKET}"
  plugin_path = "{RUN}/nri/plugins"
  plugin_config_path = "{RUN}/nri/conf.d"

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
