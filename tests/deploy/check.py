#!/usr/bin/env python3
"""Everything in deploy/ that can be checked without a cluster: `just deploy-check`, which brings the tools.

Exit status: 0 all is well, 1 something is wrong, with a line for each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True

import chart  # noqa: E402
import image  # noqa: E402
import metrics  # noqa: E402
import queries  # noqa: E402

sys.path.insert(0, str(chart.REPO / "deploy" / "grafana"))
import dashboard  # noqa: E402

#: The oldest that the chart takes, and the newest whose schemas are there.
VERSIONS = ("1.30", "1.36")
#: What must be a text wherever it is.
_TEXTS = {"name", "namespace", "secretName", "key", "path", "mountPath", "image", "interval", "policyName"}
#: Kinds of others, which have no schema here.
FOREIGN = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "Certificate"}

ADMIN = {
    "adminAddress": "::",
    "admin": {
        "tls": {
            "secretName": "berth-tls",
            "clientCASecretName": "berth-tls",
            "requireClientCert": True,
            "clients": [{"name": "alice", "right": "change"}, {"name": "bob", "right": "read"}],
            "issuerRef": {"name": "ours", "kind": "ClusterIssuer"},
        },
        "tokens": [
            {"name": "grafana", "right": "read", "secretName": "berth-tokens", "key": "grafana"},
            {"name": "ci.example.com", "right": "change", "secretName": "ci"},
        ],
        "kubernetes": {"enabled": True, "audiences": ["berth"]},
        "socket": {"hostDir": "/run/berth"},
        "limits": {"readsPerSecond": 100, "changesPerSecond": 5},
    },
    "rbac": {"review": True},
    "networkPolicy": {"adminFrom": [{"podSelector": {}}], "egress": [{"ports": [{"port": 4317}]}]},
}
OWN_TLS = {
    "config": {"admin": {"tls": {"certFile": "/c/tls.crt", "keyFile": "/c/tls.key"}, "tokens": [{"name": "a", "right": "read", "sha256": "0" * 64}]}},
    "extraVolumes": [{"name": "c", "secret": {"secretName": "mine"}}],
    "extraVolumeMounts": [{"name": "c", "mountPath": "/c", "readOnly": True}],
}
NVIDIA = {
    "runtimeClassName": "nvidia",
    "nvidiaDriverRoot": "/run/nvidia/driver",
    "migStrategy": "mixed",
    "deviceListStrategy": "envvar,cdi-cri",
    "deviceIDStrategy": "index",
    "compatWithCPUManager": True,
    "cdi": {"nvidiaHookPath": "/usr/local/nvidia/toolkit/nvidia-cdi-hook"},
    "nvml": {"migMonitor": True},
    "hostNetwork": True,
    "healthAddress": "::",
    "kubeletPodsAPI": True,
}
#: What NVIDIA's chart (v0.20) has by default and asks for nothing, where it is not as in Berth's own values.
NVIDIA_DEFAULTS = {
    "config": {"name": "", "map": {}, "default": "", "fallbackStrategies": ["named", "single"]},
    **dict.fromkeys(["compatWithCPUManager", "migStrategy", "failOnInitError", "deviceListStrategy", "deviceIDStrategy", "nvidiaDriverRoot"]),
    **dict.fromkeys(["gdrcopyEnabled", "gdsEnabled", "mofedEnabled", "deviceDiscoveryStrategy", "runtimeClassName"]),
    "devicePlugin": {"enabled": True},
    "gfd": {
        "enabled": False,
        "nameOverride": "gpu-feature-discovery",
        "namespaceOverride": "",
        "noTimestamp": None,
        "sleepInterval": None,
        "securityContext": {"privileged": True},
    },
    "nfd": {
        "nameOverride": "node-feature-discovery",
        "master": {"serviceAccount": {"name": "node-feature-discovery", "create": True}, "config": {"extraLabelNs": ["nvidia.com"]}},
        "worker": {
            "tolerations": [
                {"key": "node-role.kubernetes.io/master", "operator": "Equal", "value": "", "effect": "NoSchedule"},
                {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"},
            ],
            "config": {"sources": {"pci": {"deviceClassWhitelist": ["02", "03"], "deviceLabelFields": ["vendor"]}}},
        },
    },
    "mps": {"root": "/run/nvidia/mps", "enableHostPID": True},
    "cdi": {"nvidiaHookPath": None, "featureFlags": None},
    "updateStrategy": {"type": "RollingUpdate"},
    "priorityClassName": "system-node-critical",
}
#: docs/cdi.md, "A read-only /etc".
TALOS = {
    "containerRuntime": {"configFolders": ["/etc/cri"]},
    "config": {
        "containerRuntime": {"configFiles": ["/etc/cri/containerd.toml"]},
        "cdi": {"folders": ["/var/run/cdi"]},
    },
}
#: A file of NVIDIA's plugin and one of Berth, of which a label of the node chooses.
CONFIGS = {
    "shared": "version: v1\nsharing:\n  timeSlicing:\n    resources: [{name: nvidia.com/gpu, replicas: 4}]\n",
    "whole": "stack: [{ policy: exclusive }]\n",
}
ALERTS = {
    "podMonitor": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "grafanaDashboard": {"enabled": True},
}

#: What must render and be valid.
GOOD = {
    "default": {},
    "profiles": {"profiles": chart.PROFILES},
    "only profiles": {"profiles": {**chart.PROFILES, "sim": {"config": {"gpus": "sim:8xh100"}, "hostPID": False}}, "onlyProfiles": True},
    "all rights": {"rbac": chart.ALL_RIGHTS},
    "admin API over TLS": ADMIN,
    "TLS by the file": OWN_TLS,
    "further tokens without TLS": {"admin": {"tokens": ADMIN["admin"]["tokens"], "socket": {"enabled": True}}},
    "the admin API on ::1": {"adminAddress": "::1"},
    "the admin API on another loopback address": {"adminAddress": "127.0.0.2", "adminPort": 1234},
    "odd names": {
        **chart.ODD_NAMES,
        **ALERTS,
        "admin": {**chart.ODD_NAMES["admin"], "tls": {"secretName": "123", "clientCASecretName": "true", "issuerRef": {"name": "1e3"}}},
    },
    "labels by NFD": {
        "config": {"labels": {"nfdFile": "/etc/kubernetes/node-feature-discovery/features.d/berth"}},
        "gfd": {"enabled": True},
        "profiles": {"a": {"config": {"labels": {"nfdFile": "/nfd/features.d/x"}}}},
    },
    "labels alone": {"gfd": {"enabled": True}},
    "labels, placed by another label": {"gfd": {"enabled": True}, "affinity": None, "nodeSelector": {"gpu": "true"}},
    "labels of the node": {"labels": {"node": True}, "rbac": {"label": True}},
    "no API server": {"rbac": {"read": False}},
    "apiServer off, unquoted": {"config": {"apiServer": False}},
    "nvidia runtime": NVIDIA,
    "driver at the root": {"nvidiaDriverRoot": "/", "gpuOperator": {"enabled": True}},
    "GPU operator": {"nvidiaDriverRoot": "/run/nvidia/driver", "gpuOperator": {"enabled": True, "label": "nvidia.com/gpu.deploy.device-plugin"}},
    "a host whose /etc is read-only": TALOS,
    "the default values of NVIDIA's chart": NVIDIA_DEFAULTS,
    "values of NVIDIA's chart": {
        **NVIDIA_DEFAULTS,
        "config": {"map": CONFIGS, "default": "shared", "fallbackStrategies": ["named"]},
        "gfd": {"enabled": True, "noTimestamp": True},
        "failOnInitError": False,
        "gdsEnabled": True,
        "migStrategy": "mixed",
        "nvidiaDevRoot": "/run/nvidia/driver",
        "devicePlugin": {"enabled": True, "enableHostNetwork": True},
        "deviceDiscoveryStrategy": "nvml",
    },
    "a ConfigMap of one's own": {"config": {"name": "1e3", "stack": [{"policy": "exclusive"}], "fallbackStrategies": []}},
    # As NVIDIA's plugin takes them.
    "files with an empty section": {"config": {"map": {"default": "version: v1\nflags:\nsharing:\n"}}},
    "a configuration that is empty": {"config": None, "gfd": {"enabled": True}, "service": {"enabled": False}, "serviceAccount": {"create": False, "name": "mine"}},
    "files of a profile": {"profiles": {"a": {"config": {"map": {"only": "gpus: sim:1xt4"}}}}},
    "monitoring": ALERTS,
    "settings that need the guard": {"config": {"bypass": {"action": "deny"}, "enforce": {"memory": "require"}}},
    "settings of a profile that need the guard": {"profiles": {"a": {"config": {"bypass": {"action": "strip"}}}}},
    "settings that need the guard, with it": {"guard": {"enabled": True}, "config": {"bypass": {"action": "deny"}, "enforce": {"memory": "require"}}},
    "bypass denied": {"bypassPolicy": {"validationActions": ["Deny", "Audit"], "exemptNamespaces": []}},
    "nothing that can be off": {
        "bypassPolicy": {"enabled": False},
        "service": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "affinity": None,
        "priorityClassName": None,
    },
}

#: Names of tokens that the daemon signs with itself, in any case.
OWN_NAMES = ("admin", "Root", "CONFIG", "unknown", "user-7", "User-x")


def _token(name: str) -> dict:
    return {"name": name, "right": "read", "secretName": "a"}


def _own_token(name: str) -> dict:
    return {"name": name, "right": "read", "file": "/a"}


#: What must be refused, and a part of the message, or several.
BAD = {
    **{f"a token that is called {name}": ({"admin": {"tokens": [_token(name)]}}, "/admin/tokens/0/name") for name in OWN_NAMES},
    **{
        f"a token of the file that is called {name}": ({"config": {"admin": {"tokens": [_own_token(name)]}}}, "/config/admin/tokens/0/name")
        for name in (*OWN_NAMES, "certificate:ann", "Kubernetes:ann")
    },
    "two tokens of a name": ({"admin": {"tokens": [_token("a"), _token("b"), _token("a")]}}, "admin.tokens has the name a twice"),
    "two tokens of a name, one of the file": (
        {"admin": {"tokens": [_token("a")]}, "config": {"admin": {"tokens": [_own_token("a")]}}},
        "admin.tokens has the name a twice",
    ),
    "two tokens of a name by a profile": (
        {"admin": {"tokens": [_token("a")]}, "profiles": {"p": {"config": {"admin": {"tokens": [_own_token("a")]}}}}},
        "admin.tokens has the name a twice",
    ),
    "two client certificates of a name": (
        {"admin": {"tls": {"secretName": "a", "clientCASecretName": "a", "clients": [{"name": "ann", "right": r} for r in ("read", "change")]}}},
        "admin.tls.clients has the name ann twice",
    ),
    "the admin API at a name": ({"adminAddress": "localhost"}, "adminAddress"),
    "the health port at a name": ({"healthAddress": "localhost"}, "healthAddress"),
    "an unknown value": ({"imag": {}}, "imag"),
    "a key of the file that is the chart's": ({"config": {"healthListen": "0.0.0.0:1"}}, "healthListen"),
    "a key of the file that no daemon knows": ({"config": {"replicas": 4}}, "replicas"),
    "values of NVIDIA's chart without an equal, all at once": (
        {
            "image": {"repository": "nvcr.io/nvidia/k8s-device-plugin"},
            "deviceDiscoveryStrategy": "tegra",
            "devicePlugin": {"enabled": False},
            "gfd": {"sleepInterval": "60s", "noTimestamp": False, "enableHostNetwork": True},
            "nfd": {"enabled": True, "gc": {"enable": False}},
            "mps": {"root": "/mps"},
            "cdi": {"featureFlags": "disable-nvsandbox-utils"},
            "config": {"name": "mine", "map": CONFIGS},
        },
        [
            "image.repository: nvcr.io/nvidia/k8s-device-plugin is NVIDIA's plugin; set image.repository",
            "deviceDiscoveryStrategy: Berth finds GPUs by NVML alone",
            "devicePlugin.enabled: one daemon serves devices and sets labels",
            "gfd.sleepInterval: labels are written when they change",
            "gfd.noTimestamp: Berth writes no nvidia.com/gfd.timestamp",
            "gfd.enableHostNetwork: labels are set by Berth's own pod; use devicePlugin.enableHostNetwork",
            "nfd.enabled: this chart does not install node-feature-discovery",
            "nfd.gc: this chart does not install node-feature-discovery",
            "mps.root: Berth starts no MPS control daemon; remove mps",
            "cdi.featureFlags: Berth makes its CDI specification without options",
            "config.name refers to an existing ConfigMap and config.map creates one",
        ],
    ),
    "files of which nothing chooses": ({"config": {"map": CONFIGS}}, "config.default: no file applies to nodes without the label"),
    "a default that is no file": ({"config": {"map": CONFIGS, "default": "a"}}, "config.default: a is not a key of config.map; use one of shared, whole"),
    "a file that is no YAML": ({"config": {"map": {"a": "b: ["}}}, "config.map.a: is not valid YAML"),
    "a file with what the chart sets": ({"config": {"map": {"a": "stateDir: /a"}}}, "config.map.a: has stateDir"),
    "a file with what the guard reads": (
        {"guard": {"enabled": True}, "config": {"map": {"a": "enforce: { memory: require }"}}},
        "config.map.a: has enforce, and all nodes have one guard, which does not read these files; set config.enforce",
    ),
    "a file that wants NVIDIA's MPS": ({"config": {"map": {"a": "sharing: { mps: { resources: [] } }"}}}, "config.map.a: has sharing.mps"),
    "files of a profile that is wrong": ({"profiles": {"p": {"config": {"map": CONFIGS}}}}, "profiles.p.config.default: no file applies to nodes without the label"),
    "files without the API server": ({"config": {"map": {"a": ""}, "apiServer": "off"}}, "config.map: the node's label is read through the API server"),
    "a fallback that there is not": ({"config": {"name": "a", "fallbackStrategies": ["first"]}}, "fallbackStrategies"),
    "labels without the API server": ({"gfd": {"enabled": True}, "rbac": {"read": False}}, "rbac.read"),
    "a device list strategy that there is not": ({"deviceListStrategy": "envvar,cdi"}, "deviceListStrategy"),
    "two daemons on a node": ({"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}, "maxSurge must stay 0"),
    "rights without the first": ({"rbac": {"read": False, "evict": True}}, "rbac.read"),
    "labels of the node without the right": ({"labels": {"node": True}}, "rbac.label"),
    "a profile's labels without the right": ({"profiles": {"a": {"config": {"labels": {"node": True}}}}}, "rbac.label"),
    "reviews without the right": ({"admin": {"kubernetes": {"enabled": True}}}, "rbac.review"),
    "the network without TLS": ({"adminAddress": "0.0.0.0"}, "needs TLS"),
    "client certificates without a CA": ({"admin": {"tls": {"secretName": "a", "requireClientCert": True}}}, "clientCASecretName"),
    "a CA without TLS": ({"admin": {"tls": {"clientCASecretName": "a"}}}, "needs secretName"),
    "a token without its Secret": ({"admin": {"tokens": [{"name": "a", "right": "read"}]}}, "secretName"),
    "a token whose name is a path": ({"admin": {"tokens": [{"name": "../a", "right": "read", "secretName": "a"}]}}, "name"),
    "a token that may write": ({"admin": {"tokens": [{"name": "a", "right": "write", "secretName": "a"}]}}, "right"),
    "Deny and Warn": ({"bypassPolicy": {"validationActions": ["Deny", "Warn"]}}, "validationActions"),
    "a profile that is called default": ({"profiles": {"default": {}}}, "default"),
    "rights by profile": ({"profiles": {"a": {"rbac": {"evict": True}}}}, "rbac"),
    "the default namespace": ({"namespaceOverride": "default"}, "namespace of its own"),
}


#: What else must be in what is rendered of GOOD, and what must not: words of the DaemonSets, the Service, the policies.
RENDERED = {
    "default": (
        # Case 12 of the hardware's acceptance, with "nvidia runtime": privileged only where it is needed, and compute.
        ['value: "http://127.0.0.1:9470"', 'value: "compute,utility"', "privileged: false", 'mountPath: "/var/run/cdi" }']
        + ['mountPath: "/etc/containerd", readOnly: true', 'mountPath: "/etc/cdi", readOnly: true'],
        ["features.d", "berth-admin", "/run/berth", "containerPort: 9470", "port: admin", "targetPort: admin"],
    ),
    "admin API over TLS": (
        ['value: "unix:///run/berth/admin.sock"', 'hostPath: { path: "/run/berth", type: DirectoryOrCreate }', "containerPort: 9470"]
        + ["port: admin", "targetPort: admin", "adminListen: '[::]:9470'", "kind: Certificate", "key: ca.crt", 'path: "ci.example.com"'],
        ["features.d", "medium: Memory", "scheme: HTTPS"],
    ),
    "further tokens without TLS": (["medium: Memory", "adminListen: 127.0.0.1:9470", "unix:///run/berth"], ["containerPort: 9470"]),
    "the admin API on ::1": (['value: "http://[::1]:9470"', "adminListen: '[::1]:9470'"], ["127.0.0.1"]),
    "the admin API on another loopback address": (['value: "http://127.0.0.2:1234"', "adminListen: 127.0.0.2:1234"], ["127.0.0.1"]),
    # PyYAML takes 1e3 for a text, Kubernetes' reader for a number.
    "odd names": (
        ['secretName: "123"', 'secretName: "true"', 'name: "123"', '{ key: "on", path: "1e3" }', 'image: "1:30"', 'name: "1e3"', 'name: "1e3-true"']
        + ['kubernetes.io/instance: "berth"', 'kubernetes.io/name: "123"', 'priorityClassName: "1e3"', 'berth/daemonset: "1e3"'],
        [": 1e3\n", ": 123\n"],
    ),
    "TLS by the file": (["mountPath: /c", "containerPort: 9470", "port: admin"], ["admin-tls"]),
    "labels by NFD": (
        ['hostPath: { path: "/etc/kubernetes/node-feature-discovery/features.d", type: DirectoryOrCreate }']
        + ['hostPath: { path: "/nfd/features.d", type: DirectoryOrCreate }', "nfdFile: /nfd/features.d/x"],
        ["berth-label", "node: true"],
    ),
    "labels of the node": (['name: "berth-label-own-node"', "node: true"], ["features.d"]),
    # The right, and what holds it to the own node.
    "labels alone": (['name: "berth-label"', 'name: "berth-label-own-node"', "node: true"], ["features.d"]),
    "nvidia runtime": (
        ["name: MIG_STRATEGY", 'value: "envvar,cdi-cri"', 'value: "/run/nvidia/driver"', "name: PASS_DEVICE_SPECS"]
        + ["name: NVIDIA_CDI_HOOK_PATH", "privileged: true", 'value: "compute,utility"'],
        ["- watch\n  - apiGroups", "drop:", "allowPrivilegeEscalation"],
    ),
    "a host whose /etc is read-only": (
        ['mountPath: "/etc/cri", readOnly: true', 'hostPath: { path: "/var/run/cdi", type: DirectoryOrCreate }', 'mountPath: "/var/run/cdi" }'],
        ["/etc/cdi", "/etc/containerd", "/etc/crio"],
    ),
    "the default values of NVIDIA's chart": ([], ["configs", "name: MIG_STRATEGY", "berth-label", "hostNetwork"]),
    "values of NVIDIA's chart": (
        ["--config-dir=/etc/berth-configs", '"--config-default=shared"', '"--config-fallbacks=named"', 'configMap: { name: "berth-configs" }']
        + ["hostNetwork: true", 'name: "berth-label-own-node"', "- get\n    - watch"]
        + [f'name: {name}\n              value: "{value}"' for name, value in (("FAIL_ON_INIT_ERROR", "false"), ("GDS_ENABLED", "true"))]
        + [f'name: {name}\n              value: "{value}"' for name, value in (("MIG_STRATEGY", "mixed"), ("NVIDIA_DEV_ROOT", "/run/nvidia/driver"))],
        ["features.d", "checksum/configs"],
    ),
    "a ConfigMap of one's own": (['configMap: { name: "1e3" }', '"--config-fallbacks="', "policy: exclusive"], ["--config-default"]),
    "files of a profile": (['configMap: { name: "berth-a-configs" }', 'name: "berth-a-configs"'], ['"berth-configs"']),
}

#: What `helm install` must say at its end with GOOD, and what it must not.
NOTES = {
    "default": ([], ["REQUIRED"]),
    "labels alone": (["REQUIRED where", "  0 pods run", "\n  kubectl label node NODE nvidia.com/gpu.present=true"], []),
    "values of NVIDIA's chart": (["REQUIRED where"], []),
    "a configuration that is empty": (["REQUIRED where"], []),
    "settings that need the guard": (["REQUIRED, since config.enforce.memory is require", "REQUIRED, since config.bypass.action is deny"], []),
    "settings of a profile that need the guard": (["REQUIRED, since profiles.a.config.bypass.action is strip"], []),
    "settings that need the guard, with it": ([], ["REQUIRED"]),
    "labels, placed by another label": ([], ["REQUIRED"]),
}


class Check:
    def __init__(self, berth: Path) -> None:
        self._berth = berth
        self.wrong = 0

    def note(self, what: str, faults: list[str]) -> None:
        self.wrong += len(faults)
        print(f"{'ok   ' if not faults else 'WRONG'} {what}", flush=True)
        for fault in faults:
            print(f"      {fault}", file=sys.stderr, flush=True)

    def run(self) -> int:
        self.note("deploy/manifests are what the chart says", chart.differing())
        stale = dashboard.OUT.read_text(encoding="utf-8") != dashboard.text()
        self.note("the dashboard is what dashboard.py says", ["run `just deploy-render`"] if stale else [])
        for name, values in GOOD.items():
            self.note(f"values: {name}", self._good(values) + _rendered(name, values) + _noted(name, values))
        for name, (values, word) in BAD.items():
            self.note(f"refused: {name}", _bad(values, word))
        self.note("helm lint", _ran([chart.helm(), "lint", "--strict", "--kube-version", chart.KUBERNETES, chart.CHART]))
        rules = chart.REPO / "deploy" / "prometheus"
        self.note("promtool check rules", _ran(["promtool", "check", "rules", rules / "rules.yaml"]))
        self.note("promtool test rules", _ran(["promtool", "test", "rules", rules / "tests.yaml"]))
        self.note("queries of the dashboard can be read", _readable())
        self.note("hadolint", _ran(["hadolint", chart.REPO / "deploy" / "Dockerfile"]))
        self.note("an image's archive", image.archive_faults())
        self.note("the base of an image", image.base_faults())
        self.note("an image's settings are those of the Dockerfile and the chart", image.settings_faults())
        self.note("metrics of a daemon", _ran([sys.executable, Path(metrics.__file__), "--berth", self._berth]))
        asked = [sys.executable, Path(queries.__file__), "--berth", self._berth]
        self.note("a Prometheus that scrapes it answers every query", _ran(asked))
        return 1 if self.wrong else 0

    def _good(self, values: dict) -> list[str]:
        import kubernetes_validate
        import yaml

        try:
            documents = [yaml.safe_load(text) for text in chart.render(values)]
        except ValueError as why:
            return [str(why)]
        faults = []
        for document in documents:
            faults += [f"{document['kind']}: {path} is no text" for path in _no_texts(document)]
            if document["kind"] == "ConfigMap" and ("config.yaml" in document["data"] or document["metadata"]["name"].endswith("-configs")):
                for file in document["data"].values():
                    faults += self._config(document["metadata"]["name"], file)
            if document["kind"] in FOREIGN:
                continue
            for version in VERSIONS:
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except kubernetes_validate.ValidationError as why:
                    faults.append(f"{document['kind']} {document['metadata']['name']}, {version}: {why.message}")
        return faults

    def _config(self, name: str, text: str) -> list[str]:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            return [f"ConfigMap {name}: {fault}" for fault in _ran([self._berth, "config", "check", "--without-files", "--without-gpus", file.name])]


def _no_texts(value, path: str = "") -> list[str]:
    """Where a name is none, also in objects that have no schema here."""
    if isinstance(value, list):
        return [found for i, one in enumerate(value) for found in _no_texts(one, f"{path}[{i}]")]
    if not isinstance(value, dict):
        return []
    found = [f"{path}.{key}" for key in _TEXTS & set(value) if not isinstance(value[key], (str, dict))]
    return found + [one for key, inner in value.items() for one in _no_texts(inner, f"{path}.{key}")]


def _rendered(name: str, values: dict) -> list[str]:
    there, absent = RENDERED.get(name, ([], []))
    text = "\n".join(chart.render(values)) if there or absent else ""
    return [f"{w!r} is not rendered" for w in there if w not in text] + [f"{w!r} is rendered" for w in absent if w in text]


def _noted(name: str, values: dict) -> list[str]:
    there, absent = NOTES.get(name, ([], []))
    text = chart.notes(values) if there or absent else ""
    return [f"{w!r} is not said at the end" for w in there if w not in text] + [f"{w!r} is said at the end" for w in absent if w in text]


def _bad(values: dict, words: str | list[str]) -> list[str]:
    """`words`: one, or all of several, in what Helm says."""
    try:
        chart.render(values)
    except ValueError as why:
        missing = [word for word in ([words] if isinstance(words, str) else words) if word not in str(why)]
        return [f"it is refused without {missing}: {why}"] if missing else []
    return ["it is taken"]


def _readable() -> list[str]:
    """As rules, which promtool can parse, with Grafana's variables filled in."""
    rules = []
    for where, query in metrics.queries().items():
        if "variable" in where:
            continue
        query = query.replace("$__rate_interval", "5m").replace("$instance", ".*")
        rules.append({"record": f"berth:query{len(rules)}", "expr": query})
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
        file.flush()
        return _ran(["promtool", "check", "rules", file.name])


def _ran(command: list) -> list[str]:
    """Its words if it fails; nothing if it does not."""
    command = [str(part) for part in command]
    if not shutil.which(command[0]):
        return [f"there is no {command[0]} here: `just deploy-tools`"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [(done.stdout + done.stderr).strip()[-1500:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--berth", type=Path, default=chart.REPO / "target" / "release" / "berth")
    return Check(parser.parse_args().berth.resolve()).run()


if __name__ == "__main__":
    sys.exit(main())
