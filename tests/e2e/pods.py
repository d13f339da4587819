"""Pods, and what their shells write for the test to read.

A pod is a file in the kubelet's folder of static pods, or is made by kubectl where there is an API server.

Every container writes its environment once and then a heartbeat, both into the
pod's folder on the host; so a check sees what the container itself sees.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import images
from places import MANIFESTS, PODS
from say import TestError, until

NAMESPACE = "e2e"
#: The variable of each container that has its pod's UID: pods one after another may write into the same folder.
_UID = "E2E_POD_UID"

# An init container that ends when the test lets it.
_INIT_SHELL = """
trap 'exit 1' TERM
env > /e2e/{name}.env.new && mv /e2e/{name}.env.new /e2e/{name}.env
until [ -e /e2e/{name}.go ]; do sleep 0.2 & wait $!; done
"""

# `wait` returns at once on a signal, `sleep` alone would not; the heartbeat is the host's uptime. It ends with the
# code that the test writes, and only once, so that a container that is started again stays.
_SHELL = """
trap 'exit 0' TERM
{extra}
env > /e2e/{name}.env.new && mv /e2e/{name}.env.new /e2e/{name}.env
until [ -e /e2e/{name}.end ]; do
  cat /proc/uptime > /e2e/{name}.beat.new && mv /e2e/{name}.beat.new /e2e/{name}.beat
  sleep 0.5 & wait $!
done
code=$(cat /e2e/{name}.end)
rm /e2e/{name}.end
exit $code
"""


class Container:
    """One container: its name, the extended resources that it asks for, shell lines to run before its heartbeat,
    variables that it sets itself, its image, whether it is privileged, the path at which it has the host's /dev/null,
    in which NVIDIA's runtime reads names of GPUs, and those of the pod's claims that it uses; `claim/request` for one request
    of a claim."""

    def __init__(
        self,
        name: str,
        resources: dict[str, int],
        extra: str = "",
        env: dict[str, str] | None = None,
        image: str = images.BUSYBOX,
        privileged: bool = False,
        mount: str = "",
        claims: tuple[str, ...] = (),
    ) -> None:
        self.claims = claims
        self.name = name
        self.resources = resources
        self.extra = extra
        self.env = env or {}
        self.image = image
        self.privileged = privileged
        self.mount = mount


class Pod:
    """One pod. Its `name` and `uid` are final once it is handed over: an API server gives a UID of its own.

    An init container waits until `release` is called with its name. `restart` is the pod's restartPolicy. `on`:
    labels that its node must have, by nodeAffinity. `grace`: its terminationGracePeriodSeconds. Another `namespace`: only of
    a static pod. `claims`: ResourceClaims of the namespace, each under its own name. `templates`: the same of
    ResourceClaimTemplates.
    """

    def __init__(
        self,
        name: str,
        containers: list[Container],
        init: list[Container] | None = None,
        restart: str = "Always",
        labels: dict[str, str] | None = None,
        on: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        grace: int = 2,
        namespace: str = NAMESPACE,
        claims: tuple[str, ...] = (),
        templates: tuple[str, ...] = (),
    ) -> None:
        self.claims = claims
        self.templates = templates
        self.namespace = namespace
        self.short_name = name
        self.name = name
        self.containers = containers
        self.init = init or []
        self.restart = restart
        self.labels = labels or {}
        self.on = on or {}
        self.annotations = annotations or {}
        self.grace = grace
        # As the kubelet makes one of a static pod: 32 hex digits, without dashes.
        self.uid = uuid.uuid4().hex
        self.folder = PODS / self.uid

    def environment(self, container: str, seconds: float = 30) -> dict[str, str]:
        """The container's environment, as its own shell printed it."""
        text = self.wrote(f"{container}.env", seconds)
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def started(self, container: str) -> None:
        """Waits until the container's environment is that of this pod, and not that of an earlier one in the same folder."""

        def own() -> bool:
            return self.environment(container).get(_UID) == self.uid

        until(f"container {container} of pod {self.name} writes its environment", 60, own)

    def wrote(self, name: str, seconds: float = 30) -> str:
        """What a container wrote into the file `name` of the pod's folder."""
        path = self.folder / name
        until(f"pod {self.name} writes {name}", seconds, path.exists)
        return path.read_text(encoding="utf-8", errors="replace")

    def beats(self, container: str, seconds: float = 10) -> None:
        """Waits for a heartbeat that is newer than this call."""
        begin = _uptime(Path("/proc/uptime").read_text(encoding="ascii"))
        path = self.folder / f"{container}.beat"

        def newer() -> bool:
            if not path.exists():
                raise TestError("it wrote none")
            return _uptime(path.read_text(encoding="ascii")) > begin

        until(f"container {container} of pod {self.name} is alive", seconds, newer)

    def alive(self, container: str) -> bool:
        """Whether its last heartbeat is younger than three of them."""
        beat = _uptime((self.folder / f"{container}.beat").read_text(encoding="ascii"))
        return _uptime(Path("/proc/uptime").read_text(encoding="ascii")) - beat < 1.5

    def release(self, init_container: str) -> None:
        """Lets an init container end."""
        (self.folder / f"{init_container}.go").touch()

    def end(self, container: str, code: int) -> None:
        """Lets a container end with an exit status."""
        draft = self.folder / f"{container}.end.new"
        draft.write_text(str(code), encoding="ascii")
        draft.rename(self.folder / f"{container}.end")

    def manifest(self) -> str:
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": self.short_name,
                    "namespace": self.namespace,
                    "uid": self.uid,
                    "labels": self.labels,
                    "annotations": self.annotations,
                },
                "spec": {
                    "hostNetwork": True,
                    "dnsPolicy": "Default",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": self.grace,
                    "restartPolicy": self.restart,
                    **({"resourceClaims": self._resource_claims()} if self.claims or self.templates else {}),
                    **({"affinity": {"nodeAffinity": self._node_affinity()}} if self.on else {}),
                    "initContainers": [self._container(c, _INIT_SHELL) for c in self.init],
                    "containers": [self._container(c, _SHELL) for c in self.containers],
                    "volumes": [
                        {"name": "e2e", "hostPath": {"path": str(self.folder), "type": "Directory"}},
                        {"name": "null", "hostPath": {"path": "/dev/null", "type": "CharDevice"}},
                    ],
                },
            },
            indent=1,
        )

    def _resource_claims(self) -> list[dict]:
        claims = [{"name": name, "resourceClaimName": name} for name in self.claims]
        return claims + [{"name": name, "resourceClaimTemplateName": name} for name in self.templates]

    def _node_affinity(self) -> dict:
        terms = [{"key": key, "operator": "In", "values": [value]} for key, value in self.on.items()]
        return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": terms}]}}

    @staticmethod
    def _container(container: Container, shell: str) -> dict:
        amounts = {name: str(count) for name, count in container.resources.items()}
        script = shell.format(name=container.name, extra=container.extra)
        return {
            "name": container.name,
            "image": container.image,
            "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", script],
            "env": [
                {"name": _UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                *({"name": name, "value": value} for name, value in container.env.items()),
            ],
            "resources": {
                "limits": amounts,
                "requests": amounts,
                **({"claims": [_used(claim) for claim in container.claims]} if container.claims else {}),
            },
            "volumeMounts": [
                {"name": "e2e", "mountPath": "/e2e"},
                *([{"name": "null", "mountPath": container.mount}] if container.mount else []),
            ],
            "securityContext": {"privileged": container.privileged},
        }


def _used(claim: str) -> dict:
    name, _, request = claim.partition("/")
    return {"name": name, **({"request": request} if request else {})}


def manifest_path(pod: Pod) -> Path:
    return MANIFESTS / f"{pod.short_name}.json"


def container_ids(status: dict) -> dict[str, tuple]:
    """Container name to (id, restarts): equal twice means that nothing was started again between."""
    return {s["name"]: (s["containerID"], s["restartCount"]) for s in status["status"]["containerStatuses"]}


def _uptime(text: str) -> float:
    return float(text.split()[0]) if text.strip() else 0.0
