"""Renders the chart, and keeps the plain manifests equal to it.

    python3 tests/deploy/chart.py           says which manifests differ from the chart
    python3 tests/deploy/chart.py --write   writes them again
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CHART = REPO / "deploy" / "helm" / "berth"
MANIFESTS = REPO / "deploy" / "manifests"
NAMESPACE = "berth"
#: The cluster that is rendered for.
KUBERNETES = "1.36.0"

_HEAD = "# Rendered from deploy/helm/berth by `just deploy-render`; do not edit.\n"

#: Exclusive nodes beside shared ones, by a label: nvidia.com/gpu, and five nvidia.com/gpu.shared a GPU.
PROFILES = {
    "exclusive": {"config": {"stack": [{"policy": "exclusive"}]}},
    "shared": {"config": {"stack": [{"policy": "timeslice", "parameters": {"replicas": 5}}]}},
}

#: What the daemon may be allowed beyond reading.
ALL_RIGHTS = {"events": True, "evict": True, "delete": True, "label": True, "review": True}

#: The admin API for others than kubectl's: over TLS, for whom the cluster lets in.
ADMIN_TLS = {
    "admin": {"tls": {"secretName": "berth-tls"}, "kubernetes": {"enabled": True, "audiences": ["berth"]}},
    "rbac": {"review": True},
}

#: Names that YAML takes for numbers and truths where nothing says that they are texts, and paths that look like more.
ODD_NAMES = {
    "nameOverride": "123",
    "fullnameOverride": "1e3",
    "image": {"repository": "1", "tag": "30"},
    "serviceAccount": {"name": "123"},
    "priorityClassName": "1e3",
    "runtimeClassName": "true",
    "kubeletDir": "/var/lib/kubelet, a: b",
    "kubeletRootDir": "/var/lib/k0s, a: b/kubelet",
    "devicePluginsDir": "/var/lib/kubelet, a: b/plugins",
    "kubeletPodsAPI": True,
    "nvidiaDriverRoot": "/run/driver, a: b",
    "stateDir": "/var/lib/berth } #",
    "labels": {"nfdFile": "/nfd, a: b/features"},
    "profiles": {"1e3": {}, "true": {}},
    "admin": {
        "tls": {"secretName": "123", "clientCASecretName": "true"},
        "tokens": [{"name": "1e3", "right": "read", "secretName": "123", "key": "on"}],
        "socket": {"hostDir": "/run/berth, a: b"},
    },
    "rbac": ALL_RIGHTS,
}

#: Each of the plain manifests: what is written above it, the chart's values, and the templates that are taken.
PLAIN = {
    "berth.yaml": (
        "# Berth with default settings. Set the image to one of yours first.\n#   kubectl apply -f berth.yaml\n",
        {"createNamespace": True},
        (),
    ),
    "rights.yaml": (
        "# In addition to berth.yaml: events, the node's condition, drains that evict and delete, labels of the node, each limited to\n"
        "# the own node; and reviews of tokens. A right that the daemon's settings do not use has no effect.\n"
        "#   kubectl apply -f rights.yaml\n",
        {"rbac": ALL_RIGHTS},
        ("rbac", "own-node"),
    ),
    "dra.yaml": (
        "# Replaces the objects of berth.yaml with these names: with the DRA driver (docs/dra.md), its rights, and DeviceClasses.\n"
        "# Kubernetes 1.34 or newer.\n"
        "#   kubectl apply -f dra.yaml\n",
        {"config": {"dra": {"enabled": True}}},
        ("rbac", "own-node", "daemonset", "deviceclasses"),
    ),
    "fleet.yaml": (
        "# Replaces the objects of berth.yaml with these names: with the node's part in the fleet (docs/fleet.md), its kinds, its\n"
        "# rights, and the controller.\n"
        "#   kubectl apply -f fleet.yaml\n",
        {"config": {"fleet": {"enabled": True}}, "controller": {"enabled": True}},
        ("rbac", "own-node", "daemonset", "fleet", "controller"),
    ),
    "profiles.yaml": (
        "# Replaces the DaemonSet of berth.yaml: exclusive and shared nodes, by the node label berth/profile. Nodes without it\n"
        "# get no pod.\n"
        "#   kubectl delete -n berth daemonset/berth configmap/berth\n#   kubectl apply -f profiles.yaml\n",
        {"onlyProfiles": True, "profiles": PROFILES},
        ("daemonset",),
    ),
    "admin-tls.yaml": (
        "# Replaces the objects of berth.yaml with these names: the admin API over TLS on every pod's address, for users of the\n"
        "# cluster with the rights (docs/access.md). Needs the Secret berth-tls, as cert-manager creates it.\n"
        "#   kubectl -n berth create secret tls berth-tls --cert=tls.crt --key=tls.key\n"
        "#   kubectl apply -f admin-tls.yaml\n",
        ADMIN_TLS,
        ("rbac", "networkpolicy", "service", "daemonset"),
    ),
    "monitoring.yaml": (
        "# For the Prometheus operator, in addition to berth.yaml: what to scrape, and alert rules.\n"
        "#   kubectl apply -f monitoring.yaml\n",
        {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
        ("monitoring",),
    ),
}

#: What others need comes first, and what holds a right in check before the right.
_ORDER = ["CustomResourceDefinition", "Namespace", "ServiceAccount", "ConfigMap", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
_ORDER += ["ClusterRole", "ClusterRoleBinding", "RoleBinding", "DeviceClass", "NetworkPolicy", "Service", "DaemonSet", "Deployment"]


def helm() -> str:
    """The path of Helm 3 or 4: `BERTH_HELM`, or that of PATH."""
    path = os.environ.get("BERTH_HELM") or shutil.which("helm")
    if not path:
        sys.exit("there is no helm here: `just deploy-tools` builds one")
    return path


def render(values: dict | None = None, templates: tuple[str, ...] = (), chart: Path = CHART) -> list[str]:
    """The documents of the chart as texts, by kind and name; ValueError with Helm's words if it refuses the values."""
    command = [helm(), "template", "berth", str(chart), "--namespace", NAMESPACE, "--values", "-"]
    # A Helm that was built from its module takes the cluster for an old one.
    command += ["--kube-version", KUBERNETES]
    for one in templates:
        command += ["--show-only", f"templates/{one}.yaml"]
    # JSON is YAML.
    done = subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    return documents(done.stdout)


def notes(values: dict) -> str:
    """What `helm install` says at its end. Helm shows it only to who has a cluster, so it is rendered as a ConfigMap here."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "berth"
        shutil.copytree(CHART, copy)
        templates = copy / "templates"
        text = (templates / "NOTES.txt").read_text(encoding="utf-8")
        (templates / "NOTES.txt").unlink()
        (templates / "_notes.tpl").write_text('{{- define "notes" -}}' + text + "{{- end -}}", encoding="utf-8")
        shown = 'kind: ConfigMap\nmetadata:\n  name: notes\ntext: {{ include "notes" . | toJson }}\n'
        (templates / "notes.yaml").write_text(shown, encoding="utf-8")
        document = render(values, ("notes",), copy)[0]
    return json.loads(re.search(r"^text: (.*)$", document, flags=re.M).group(1))


def documents(text: str) -> list[str]:
    """The documents of a text, without what Helm adds and without empty ones."""
    parts = [re.sub(r"^# Source: .*\n", "", p, flags=re.M).strip("\n") for p in re.split(r"^---$", text, flags=re.M)]
    found = [p + "\n" for p in parts if re.search(r"^[^#\s]", p, flags=re.M)]
    return sorted(found, key=_place)


def _place(document: str) -> tuple:
    kind = re.search(r"^kind: (\S+)", document, flags=re.M).group(1)
    name = re.search(r"^metadata:\n(?:  .*\n)*?  name: (\S+)", document, flags=re.M).group(1)
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind, name)


def plain(name: str) -> str:
    """What a plain manifest must be."""
    head, values, templates = PLAIN[name]
    return _HEAD + head + "".join(f"---\n{d}" for d in render(values, templates))


def differing() -> list[str]:
    """Plain manifests that are not what the chart says, or that the chart does not know."""
    there = {p.name: p.read_text(encoding="utf-8") for p in MANIFESTS.glob("*.yaml")}
    return sorted(n for n in {*there, *PLAIN} if n not in PLAIN or there.get(n) != plain(n))


def main() -> int:
    if "--write" in sys.argv[1:]:
        for name in PLAIN:
            (MANIFESTS / name).write_text(plain(name), encoding="utf-8")
        return 0
    wrong = differing()
    for name in wrong:
        print(f"deploy/manifests/{name} is not what the chart says: run `just deploy-render`", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
