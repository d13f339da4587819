"""NVIDIA's device plugin, built from Go modules once, on the same GPUs as Berth."""

from __future__ import annotations

import json
from pathlib import Path

import process
from gomodule import GoModule
from gpus import FakeGpus
from kubelet import clock_ns, healthy
from places import RUN
from say import until

MODULE = GoModule("nvidia", "github.com/NVIDIA/k8s-device-plugin", ["cmd/nvidia-device-plugin"], cgo=True)

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
