"""The node on which NVIDIA's tests of its DRA driver run: what they expect of a cluster, and run.py's setups do not need.

`kubectl logs` works, pods have a network namespace of their own, the images that the tests name are here, and Berth grants
all GPUs through claims.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "deploy" / "image"))

import controlplane  # noqa: E402
import images  # noqa: E402
import kubelet  # noqa: E402
import node  # noqa: E402
import oci  # noqa: E402
import process  # noqa: E402
import program  # noqa: E402
from berth import Berth, Setup  # noqa: E402
from gpus import FakeGpus  # noqa: E402
from kubelet import NODE_NAME  # noqa: E402
from nvidia_driver import PROC_DRIVER  # noqa: E402
from places import HERE, REPO, RUN  # noqa: E402

#: Programs in the place of Helm, of nvidia-smi on the node, and so on.
STANDINS = HERE / "nvidia-dra"
#: The images of NVIDIA's pods, by the names that containerd gives them.
_IMAGES = (
    "docker.io/library/ubuntu:22.04",
    "docker.io/library/ubuntu:24.04",
    "nvcr.io/nvidia/cuda:12.2.0-base-ubuntu22.04",
)
_BASH, _BUSYBOX = Path("/bin/bash-static"), Path("/bin/busybox")
_CERTIFICATES = RUN / "controlplane"
_AUTHORITY = _CERTIFICATES / "ca.crt"
#: The namespace, and the label, of the pods of NVIDIA's driver, which its tests wait for.
_NAMESPACE = "dra-driver-nvidia-gpu"
_GATE = "DRAExtendedResource=true"


class ControlPlane(controlplane.ControlPlane):
    """Its API server authenticates at the kubelet, which it finds by the node's name."""

    def __init__(self, logs: Path, service_accounts: bool = False) -> None:
        super().__init__(logs, service_accounts)
        hosts = RUN / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {NODE_NAME}\n", encoding="ascii")
        more = [
            f"--kubelet-client-certificate={_CERTIFICATES}/server.crt",
            f"--kubelet-client-key={_CERTIFICATES}/server.key",
            f"--feature-gates={_GATE}",
        ]
        self._api.args = _with_mount(hosts, Path("/etc/hosts"), [*self._api.args, *more])


class Kubelet(kubelet.Kubelet):
    """Its server accepts the API server's certificate once the control plane's authority exists."""

    def _settings(self) -> dict:
        settings = super()._settings()
        if _AUTHORITY.exists():
            settings["authentication"]["x509"] = {"clientCAFile": str(_AUTHORITY)}
        return settings


class Node(node.Node):
    control_plane = ControlPlane

    def __init__(self, logs: Path, containerd_folder: str) -> None:
        super().__init__(logs, containerd_folder)
        self.kubelet = Kubelet(logs)
        #: For programs that talk to the cluster.
        self.environment: dict[str, str] = {}

    def prepare(self) -> None:
        """Joins a control plane and gives it what NVIDIA's tests look for."""
        for name in ("unconnected", "loopback"):
            shutil.copy(STANDINS / "cni", RUN / "cni" / name)
        # containerd takes the first configuration by name. The folder has the plugins, too, so no file is named like one.
        network = {"cniVersion": "0.4.0", "name": "apart", "plugins": [{"type": "unconnected"}]}
        (RUN / "cni" / "apart.conflist").write_text(json.dumps(network), encoding="utf-8")
        self._take_images()
        self.join()
        self.renew()
        kubectl = controlplane.MODULE.build()
        self.environment = {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "KUBECACHEDIR": str(RUN / "kubectl"),
            "PATH": f"{STANDINS}:{kubectl}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # The classes of the chart.
        manifests = (REPO / "deploy" / "manifests" / "dra.yaml").read_text(encoding="utf-8").split("\n---\n")
        classes = RUN / "classes.yaml"
        classes.write_text("\n---\n".join(one for one in manifests if "\nkind: DeviceClass\n" in one), encoding="utf-8")
        self.kubectl("apply", "-f", classes)
        # The tests of MIG look for a node whose line in `kubectl get nodes` contains `worker`.
        self.kubectl("label", "node", NODE_NAME, "node-role.kubernetes.io/worker=")
        self.kubectl("create", "namespace", _NAMESPACE)
        command = ["sh", "-c", "trap 'exit 0' TERM; sleep 99999 & wait"]
        self._pod(_NAMESPACE, "berth", {"dra-driver-nvidia-gpu-component": "kubelet-plugin"}, "gpus", command)
        # The test of extended resources reads the gate from the API server's pod. This pod shows it, and no node runs it.
        command = ["kube-apiserver", f"--feature-gates={_GATE}"]
        self._pod("kube-system", "kube-apiserver", {"component": "kube-apiserver"}, "kube-apiserver", command, runs=False)

    def kubectl(self, *args, seconds: float = 120) -> str:
        """Without a namespace, unlike that of the control plane."""
        return process.run(["kubectl", *args], f"kubectl {' '.join(map(str, args))}", self.environment, seconds)

    def gpus_seen(self, namespace: str) -> dict[str, dict[str, frozenset[str]]]:
        """What nvidia-smi printed in each container of each pod."""
        seen: dict[str, dict[str, frozenset[str]]] = {}
        for pod in json.loads(self.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]:
            name = pod["metadata"]["name"]
            for container in (c["name"] for c in pod["spec"]["containers"]):
                said = self.kubectl("logs", "-n", namespace, name, "-c", container)
                seen.setdefault(name, {})[container] = frozenset(re.findall(r"UUID: ([A-Z]+-[0-9a-f-]+)", said))
        return seen

    def _pod(self, namespace: str, name: str, labels: dict, container: str, command: list[str], runs: bool = True) -> None:
        spec = {
            "containers": [{"name": container, "image": images.BUSYBOX, "imagePullPolicy": "Never", "command": command}],
            **({} if runs else {"schedulingGates": [{"name": "berth.invalid/never"}]}),
        }
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        file = RUN / "pod.json"
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}), encoding="utf-8")
        self.kubectl("apply", "-f", file)
        if runs:
            self.kubectl("wait", "-n", namespace, f"pod/{name}", "--for=condition=Ready", "--timeout=60s")

    def _take_images(self) -> None:
        """bash and busybox under the names of the images. nvidia-smi is the driver's and comes with the GPU."""
        applets = process.run([_BUSYBOX, "--list"], "list busybox's applets").split()
        entries = {f"bin/{name}": oci.link("busybox") for name in applets if name not in ("bash", "busybox")}
        entries["bin/busybox"] = oci.file(_BUSYBOX.read_bytes(), 0o755)
        entries["bin/bash"] = oci.file(_BASH.read_bytes(), 0o755)
        entries["tmp"] = oci.folder(0o1777)
        archive = RUN / "ubuntu.tar"
        layer = oci.layer(entries, "bash and busybox")
        oci.write(archive, _IMAGES[0], {"Cmd": ["/bin/bash"], "Env": ["PATH=/usr/bin:/bin"]}, {program.native().name: [layer]})
        self.containerd.take(archive)
        for name in _IMAGES[1:]:
            self.containerd.tag(_IMAGES[0], name)


class ClaimsBerth(Berth):
    """Berth whose GPUs are granted through DRA from the start, on a node with an installed driver."""

    def __init__(self, logs: Path, binary: Path, fake: FakeGpus, gpus: int, kubeconfig: Path) -> None:
        super().__init__(logs, binary, fake, _Claims(gpus=gpus, auto=True, api_server=True, dra=True), kubeconfig)
        self.settings["dra"] = {"enabled": True, "via": "dra"}
        self.configure(self.settings)
        self._process.args = _with_mount(PROC_DRIVER, Path("/proc/driver"), self._process.args)


class _Claims(Setup):
    @property
    def resources(self) -> list[str]:
        """The device plugin has none."""
        return []


def _with_mount(source: Path, target: Path, args: list[str]) -> list[str]:
    """A program that sees `source` at `target`."""
    script = f'mount --bind {source} {target} && exec "$@"'
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh", *args]
