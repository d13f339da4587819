"""NVIDIA's device plugin and container toolkit, built from Go modules once, on the same GPUs as Berth."""

from __future__ import annotations

import json
from pathlib import Path

import machine
import process
from gomodule import GoModule
from gpus import FakeGpus
from kubelet import clock_ns, healthy
from places import RUN
from say import until

MODULE = GoModule("nvidia", "github.com/NVIDIA/k8s-device-plugin", ["cmd/nvidia-device-plugin"], cgo=True)
TOOLKIT = GoModule(
    "nvidia-toolkit", "github.com/NVIDIA/nvidia-container-toolkit", ["cmd/nvidia-ctk", "cmd/nvidia-cdi-hook"], cgo=True
)

_CONFIG = RUN / "nvidia.json"


class NvidiaPlugin:
    """`replicas` 0: whole GPUs; else time-slicing, under the same resource name or, `renamed`, under `<name>.shared`."""

    def __init__(self, logs: Path, gpus: FakeGpus, resource: str, replicas: int = 0, renamed: bool = False) -> None:
        self.resource = resource
        self._replicas = replicas
        settings: dict = {"version": "v1", "flags": {"migStrategy": "none", "deviceDiscoveryStrategy": "nvml"}}
        if replicas:
            shared = [{"name": "nvidia.com/gpu", "replicas": replicas}]
            settings["sharing"] = {"timeSlicing": {"renameByDefault": renamed, "resources": shared}}
        _CONFIG.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        args = [MODULE.build() / "nvidia-device-plugin", "--config-file", _CONFIG]
        env = gpus.environment_by_name()
        self._process = process.Process("nvidia-device-plugin", args, logs / "nvidia-device-plugin.log", env)

    def start(self, devices: int) -> None:
        """Starts it and waits until the kubelet holds so many of its devices for healthy."""
        begin = clock_ns()
        self._process.start()

        def known() -> bool:
            self._process.check()
            return len(healthy(self.resource, begin)) == devices

        until(f"the kubelet knows {devices} devices of NVIDIA's device plugin", 30, known, every=0.02)

    def stop(self) -> None:
        self._process.stop()

    def running(self) -> bool:
        return self._process.running()


def apply_memory_limit(gpus: FakeGpus, gpu: str, pid: int, mib: int) -> None:
    """Runs NVIDIA's hook, which sets the limit of a container's cgroup on a GPU, as for a container with its variable.

    The hook expects cgroup v2 at /sys/fs/cgroup, so it runs in a mount namespace in which cgroup v2 is mounted there.
    """
    environment = gpus.environment_by_name()
    bundle = RUN / "bundle"
    bundle.mkdir(exist_ok=True)
    spec = {"ociVersion": "1.1.0", "process": {"cwd": "/", "env": [f"NVIDIA_GPU_MEMORY_LIMIT={mib}"]}}
    (bundle / "config.json").write_text(json.dumps(spec), encoding="utf-8")
    state = {"ociVersion": "1.1.0", "id": "container", "status": "created", "pid": pid, "bundle": str(bundle)}
    (bundle / "state.json").write_text(json.dumps(state), encoding="utf-8")
    flags = [f"--driver-root={environment['LD_LIBRARY_PATH']}", f"--gpu-id={gpu}", f"--container-spec={bundle / 'state.json'}"]
    hook = [TOOLKIT.build() / "nvidia-cdi-hook", "apply-cuda-memory-limits", *flags]
    script = f'mount --bind {machine.CGROUP2} /sys/fs/cgroup && exec "$@"'
    process.run(["unshare", "--mount", "sh", "-c", script, "sh", *hook], "NVIDIA's hook", environment)
