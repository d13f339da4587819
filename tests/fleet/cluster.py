"""A cluster of an API server and etcd, simulated nodes and controllers, and the policies that the nodes read from a folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
# Nothing that only root can remove is left in a user's checkout.
sys.dont_write_bytecode = True

import controlplane  # noqa: E402
import machine  # noqa: E402
import places  # noqa: E402
import process  # noqa: E402
from pods import NAMESPACE  # noqa: E402
from say import TestError, note, until  # noqa: E402
from wasm import trapping  # noqa: E402

REPO = places.REPO
FOLDER = places.RUN / "fleet"
LAYOUT = FOLDER / "layout"
KINDS = REPO / "deploy" / "helm" / "berth" / "files" / "crds"
API = "/apis/fleet.berth.dev/v1alpha1"
#: Users of the API server that run a controller.
CONTROLLERS = ("controller-a", "controller-b")
#: In the folder; the nodes and the controllers allow the host.
REPOSITORY = "registry.example/gpu"
#: The labels of the simulated nodes.
POOL = {"pool": "sim"}


class Fleet:
    """`programs`: the folder of `berth` and `simulated-nodes`. `repository`: from which controllers and nodes may read, too."""

    def __init__(self, programs: Path, logs: Path, nodes: int, models: int = 2, repository: str = "") -> None:
        self.berth = programs / "berth"
        self.size = nodes
        #: Tens of nodes of which the start has been reported.
        self._shown = 0
        self.cluster = controlplane.ControlPlane(logs, only_api_server=True, controllers=CONTROLLERS)
        args = [programs / "simulated-nodes", "--kubeconfig", self.cluster.kubeconfig, "--nodes", nodes, "--models", models]
        self._repositories = [repository] if repository else []
        args += ["--layout", LAYOUT, *(f"--repository={one}" for one in self._repositories)]
        self.nodes = process.Process("simulated-nodes", args, logs / "nodes.log")
        self.controllers = {user: self._controller(user, logs) for user in CONTROLLERS}

    def start(self, first: str = CONTROLLERS[0]) -> None:
        """Starts all but the other controllers."""
        for folder in (places.RUN, places.LIB):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        FOLDER.mkdir()
        for user in CONTROLLERS:
            self._write_settings(user)
        self.cluster.start()
        self.cluster.kubectl("apply", "-f", KINDS)
        self.cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", KINDS)
        LAYOUT.mkdir()
        self.nodes.start()
        # On a busy machine a node takes seconds.
        until("all nodes report", 120 + 10 * self.size, self._all_report, every=1)
        self.controllers[first].start()

    def stop(self) -> None:
        for one in (*self.controllers.values(), self.nodes):
            if one.running():
                os.kill(one.pid, signal.SIGCONT)
            one.stop(seconds=30)
        self.cluster.stop()
        for folder in (places.RUN, places.LIB):
            shutil.rmtree(folder, ignore_errors=True)

    def _all_report(self) -> bool:
        self.nodes.check()
        shown = self.gpu_nodes()
        reported = [one for one in shown if one.get("status", {}).get("models")]
        if len(reported) // 10 > self._shown:
            self._shown = len(reported) // 10
            note(f"{len(reported)} of {self.size} nodes report")
        if len(reported) < self.size:
            raise TestError(f"{len(reported)} of {self.size}")
        return True

    def _controller(self, user: str, logs: Path) -> process.Process:
        args = [self.berth, "controller", "--config", FOLDER / f"{user}.yaml", "--namespace", NAMESPACE]
        return process.Process(user, args, logs / f"{user}.log")

    def _write_settings(self, user: str) -> None:
        fleet = {"enabled": True, "repositories": ["registry.example", *self._repositories], "layouts": [str(LAYOUT)]}
        settings = {"nodeName": user, "kubeconfig": str(self.cluster.kubeconfig_of(user)), "fleet": fleet}
        (FOLDER / f"{user}.yaml").write_text(json.dumps(settings), encoding="utf-8")

    # Policies.

    def pack(self, name: str, tag: str, trap: str = "") -> str:
        """Puts a shipped policy into the folder; its hook `trap` traps. Returns its reference."""
        policy = (REPO / "policies-wasm" / "prebuilt" / f"{name}.wasm").read_bytes()
        file = FOLDER / f"{name}-{tag}.wasm"
        file.write_bytes(trapping(policy, trap) if trap else policy)
        said = self.run("policy", "pack", str(file), f"layout:{LAYOUT}:{tag}")
        (manifest,) = re.findall(r"manifest: (sha256:\w+)", said)
        return f"{REPOSITORY}/{name}@{manifest}"

    def run(self, *args: str) -> str:
        return process.run([self.berth, *args], f"berth {' '.join(args)}")

    # Objects.

    def apply(self, name: str, stack: list[dict], selector: dict | None = None, annotations: dict | None = None, **spec) -> None:
        """Applies a SharingPolicy, as a GitOps tool does."""
        whole = {"nodeSelector": {"matchLabels": POOL if selector is None else selector}, "stack": stack, **spec}
        metadata = {"name": name, **({"annotations": annotations} if annotations else {})}
        shown = {"apiVersion": "fleet.berth.dev/v1alpha1", "kind": "SharingPolicy", "metadata": metadata, "spec": whole}
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(shown), encoding="utf-8")
        self.cluster.kubectl("apply", "--server-side", "-f", path)

    def policy(self, name: str) -> dict:
        return self.cluster.get(f"{API}/sharingpolicies/{name}")

    def rollout(self, name: str) -> dict:
        return self.policy(name).get("status", {}).get("rollout", {})

    def gpu_nodes(self) -> list[dict]:
        return self.cluster.get(f"{API}/gpunodes")["items"]

    def assigned(self, revision: str) -> list[str]:
        """The nodes whose GPUNode names a revision."""
        return [one["metadata"]["name"] for one in self.gpu_nodes() if one["spec"].get("stack", {}).get("revision") == revision]

    def active(self) -> dict[str, str]:
        """The revision that is active on each node, as its daemon reports."""
        return {one["metadata"]["name"]: one["status"]["stack"].get("active", "") for one in self.gpu_nodes()}

    def health(self, name: str) -> list[str]:
        """What kstatus (Flux) and Argo CD make of a SharingPolicy."""
        script = REPO / "deploy" / "gitops" / "health.lua"
        path = FOLDER / "object.json"
        path.write_text(json.dumps(self.policy(name)), encoding="utf-8")
        return process.run(["sh", "-c", f"{health_program()} {script} < {path}"], "the health of a SharingPolicy").split()

    def has_difference(self, name: str) -> bool:
        """Whether the object differs from the file that was applied last, as GitOps tools compare them."""
        command = ["diff", "--server-side", "-f", FOLDER / f"{name}.json"]
        try:
            self.cluster.kubectl(*command)
        except TestError:
            return True
        return False

    def until_rollout(self, name: str, seconds: float, revision_not: str = "", **fields) -> dict:
        """Waits until the rollout shows these fields, and of another revision. Returns it."""

        def look() -> dict:
            shown = self.rollout(name)
            if shown.get("revision", revision_not) == revision_not or any(shown.get(key) != value for key, value in fields.items()):
                raise TestError(f"it shows {shown}, {self.reason(name)}")
            return shown

        return until(f"the rollout of {name} shows {fields}", seconds, look, every=0.3)

    def reason(self, name: str, condition: str = "Ready") -> tuple[str, str, str]:
        """Status, reason and message of a condition."""
        for one in self.policy(name).get("status", {}).get("conditions", []):
            if one["type"] == condition:
                return one["status"], one["reason"], one["message"]
        return "", "", ""

    def until_reason(self, name: str, reason: str, seconds: float, condition: str = "Ready") -> str:
        """Waits until the condition has this reason. Returns the message."""

        def look() -> str:
            shown = self.reason(name, condition)
            if shown[1] != reason:
                raise TestError(f"it is {shown}")
            return shown[2]

        return until(f"{condition} of {name} has the reason {reason}", seconds, look, every=0.3)

    def set_ready(self, node: str, is_ready: bool) -> None:
        """What a node controller does when a kubelet is silent."""
        ready = {"type": "Ready", "status": "True" if is_ready else "Unknown", "reason": "Test", "message": ""}
        self.cluster.kubectl("patch", "node", node, "--subresource=status", "-p", json.dumps({"status": {"conditions": [ready]}}))

    def annotate(self, name: str, annotation: str) -> None:
        self.cluster.kubectl("annotate", "--overwrite", "gsp", name, f"fleet.berth.dev/{annotation}")


def health_program() -> Path:
    """Built once, with libraries of Flux and Argo CD."""
    program = places.cache() / "fleet-health"
    if not program.exists():
        source = Path(__file__).resolve().parent / "health"
        process.run([machine.go(), "build", "-C", source, "-o", program, "."], "build tests/fleet/health", seconds=900)
    return program


def timeslice(reference: str, replicas: int) -> dict:
    """An entry that divides each GPU."""
    return {"name": "timeslice", "ref": reference, "parameters": {"replicas": replicas}}


def steps(*percents: int, soak: str = "10s", canaries: int = 1) -> dict:
    """A rollout of one node a model and then these shares of all nodes."""
    first = {"nodesPerModel": canaries, "soak": soak}
    return {"steps": [first, *({"percent": percent, "soak": soak} for percent in percents)]}
