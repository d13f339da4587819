"""A folder that looks like an installed NVIDIA driver: libraries with sonames, programs, sockets, device nodes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

#: Its version, which is that of tests/fake-nvml.
VERSION = "570.172.08"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
#: Base of the name, its soname, and the links beside it. The names of a datacenter driver that matter, not all of them.
_NAMES = [
    ("libcuda.so", "libcuda.so.1", ["libcuda.so.1", "libcuda.so"]),
    ("libnvidia-ml.so", "libnvidia-ml.so.1", ["libnvidia-ml.so.1"]),
    ("libnvidia-ptxjitcompiler.so", "libnvidia-ptxjitcompiler.so.1", ["libnvidia-ptxjitcompiler.so.1"]),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1", ["libnvidia-opticalflow.so.1"]),
    ("libnvidia-gpucomp.so", "", []),
    ("libGLX_nvidia.so", "libGLX_nvidia.so.0", ["libGLX_nvidia.so.0"]),
    ("vdpau/libvdpau_nvidia.so", "libvdpau_nvidia.so.1", ["libvdpau_nvidia.so.1"]),
]
_PROGRAMS = ["nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"]
_GRAPHICS = ["etc/vulkan/icd.d/nvidia_icd.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json"]
CONTROL_NODES = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]


class DriverRoot:
    """`nvml` is the library that takes the place of the driver's; root alone may make device nodes."""

    def __init__(self, folder: Path, gpus: int, nvml: Path) -> None:
        self.folder = folder
        self._nvml = nvml
        self._install(VERSION)
        for name in _PROGRAMS:
            self._file(f"usr/bin/{name}", 0o755)
        for name in _GRAPHICS:
            self._file(name, 0o644)
        self._file("run/nvidia-persistenced/socket", 0o666)
        self._file(f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin", 0o644)
        (folder / "dev").mkdir()
        for name in [*CONTROL_NODES, *(f"nvidia{gpu}" for gpu in range(gpus))]:
            self._node(name)

    @classmethod
    def of(cls, folder: Path, nvml: Path) -> DriverRoot:
        """One that was made before."""
        made = cls.__new__(cls)
        made.folder, made._nvml = folder, nvml
        return made

    def change_version(self, version: str) -> None:
        """Replaces the driver by another version, as an upgrade does."""
        for path in (self.folder / _LIBRARIES).rglob("*"):
            if path.is_symlink() or path.is_file():
                path.unlink()
        self._install(version)

    def _install(self, version: str) -> None:
        for base, soname, links in _NAMES:
            path = self.folder / _LIBRARIES / f"{base}.{version}"
            path.parent.mkdir(parents=True, exist_ok=True)
            name = [f"-Wl,-soname,{soname}"] if soname else []
            if base == "libnvidia-ml.so":
                shutil.copyfile(self._nvml, path)
            else:
                subprocess.run(["cc", "-shared", "-nostdlib", *name, "-o", path, "-x", "c", "/dev/null"], check=True)
            for link in links:
                # The link without a version leads to the soname, as in NVIDIA's packages.
                target = soname if link.endswith(".so") else path.name
                (path.parent / link).symlink_to(target)

    def _file(self, name: str, mode: int) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n", encoding="ascii")
        path.chmod(mode)

    def _node(self, name: str) -> None:
        """A node with the numbers of /dev/null, so that a container may open it."""
        path = self.folder / "dev" / name
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.chmod(0o666)
