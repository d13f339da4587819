#!/usr/bin/env python3
"""deploy/manifests on a whole control plane and a real kubelet: `just deploy-cluster`, or `sudo -E python3 tests/e2e/deployed.py`.

Berth runs in a pod here, as its DaemonSet says, from the image that deploy/image builds: `--image` is one of `just image`,
otherwise it is made of the program. Its GPUs are simulated, and its token is that of its service account. What the
policies of deploy/ allow and refuse is asked of the API server itself. It needs what run.py needs, and Helm.
Exit status: 0 all passed, 1 a case failed, 2 the test could not be run.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shutil
import signal
import ssl
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

# As in run.py.
sys.dont_write_bytecode = True

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "deploy"))
sys.path.insert(2, str(Path(__file__).resolve().parents[2] / "deploy" / "image"))

import build  # noqa: E402
import chart  # noqa: E402
import containerd  # noqa: E402
import controlplane  # noqa: E402
import debian  # noqa: E402
import images  # noqa: E402
import kubelet  # noqa: E402
import machine  # noqa: E402
import oci  # noqa: E402
import places  # noqa: E402
import process  # noqa: E402
import program  # noqa: E402
from berth import cdi_variable, write_cdi_spec  # noqa: E402
from controlplane import Answer, ControlPlane  # noqa: E402
from node import Node  # noqa: E402
from pods import NAMESPACE, Container, Pod  # noqa: E402
from say import Hopeless, Score, TestError, note, problem, until  # noqa: E402

MANIFESTS = places.REPO / "deploy" / "manifests"
#: The namespace and the service account of the manifests.
BERTH = "berth"
#: Where the manifests have the kubelet's neighbour; the test's own folder instead, which is removed at its end.
_STATE = places.LIB / "state"
#: Nodes that are objects and nothing else.
_HERE, _ELSEWHERE = "rights-here", "rights-elsewhere"
#: The manifests' port of the admin API; the pods of this test have the host's network.
_ADMIN_PORT = machine.ADMIN_PORT
_NEW_CERTIFICATE = "openssl req -x509 -days 2 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1".split()
_STRATEGIC = "application/strategic-merge-patch+json"
_MERGE = "application/merge-patch+json"
#: Of namespaces.
_EVENTS = "/apis/events.k8s.io/v1/namespaces"
_NO_OWNER = {"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "11111111-2222-3333-4444-555555555555"}
_WHOLE, _SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


class Deployed:
    """The cases. Each builds on those before it."""

    def __init__(self, node: Node, berth: Path, image: oci.Archive) -> None:
        self.node = node
        self.cluster: ControlPlane = node.cluster
        self._berth = berth
        self._image = image

    # What the API server takes

    def manifests_are_taken(self) -> str:
        """Strictly, so that an unknown field is an error. PodMonitor and PrometheusRule are of another's API."""
        self.cluster.kubectl("create", "namespace", BERTH)
        files = [p for p in sorted(MANIFESTS.glob("*.yaml")) if p.name != "monitoring.yaml"]
        # And names that are texts only where the chart says so.
        odd = places.RUN / "odd-names.yaml"
        odd.write_text("---\n".join(chart.render(chart.ODD_NAMES)), encoding="utf-8")
        names = [p.name for p in (*files, odd)]
        for name, file in zip(names, (*files, odd)):
            said = self.cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", BERTH, "-f", file)
            # kubectl reports that the namespace was created by hand, which is not an error of the manifest.
            wrong = [line for line in said.splitlines() if "Warning" in line and "namespaces/berth" not in line]
            if wrong:
                raise TestError(f"{name}: {wrong}")
        return ", ".join(names)

    def expressions_have_types(self) -> str:
        """The controller manager checks each expression of a policy against the types of what it is about."""
        self._apply("berth.yaml")
        self.cluster.kubectl("apply", "-f", MANIFESTS / "rights.yaml")

        def checked():
            path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
            found = self.cluster.get(path)["items"]
            if len(found) != 6:
                raise Hopeless(f"{len(found)} policies")
            for policy in found:
                status = policy.get("status", {})
                if status.get("observedGeneration") != policy["metadata"]["generation"]:
                    raise TestError(f"{policy['metadata']['name']} is not checked yet")
                warnings = status.get("typeChecking", {}).get("expressionWarnings")
                if warnings:
                    raise Hopeless(f"{policy['metadata']['name']}: {warnings}")
            return found

        return f"policies={len(until('the policies are checked', 60, checked))}"

    # Rights end at the own node

    def rights_end_at_the_own_node(self) -> str:
        for name in (_HERE, _ELSEWHERE):
            self._made("/api/v1/nodes", {"metadata": {"name": name}})
        for name in ("here", "here-too", "elsewhere", "elsewhere-too"):
            where = _HERE if name.startswith("here") else _ELSEWHERE
            self._made(f"/api/v1/namespaces/{NAMESPACE}/pods", _plain_pod(name, where))
        token = self._token(_HERE)
        free = self._token(None)

        def both(what: str, own, other) -> None:
            """`own` and `other` send the same to this and to another node, with a token."""
            until(f"{what} elsewhere is refused", 30, lambda: _refused(other(token, True), "may not"), every=0.3)
            _refused(other(token, False), "may not")
            _refused(own(free, False), "may not")
            if own(token, False).status not in (200, 201):
                raise TestError(f"{what} of the own node: {own(token, True).message}")

        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        both("a patch of the status", _bind(self._condition, _HERE), _bind(self._condition, _ELSEWHERE))
        both("an event", _bind(self._event, _HERE), _bind(self._event, _ELSEWHERE))
        both("a patch of labels", _bind(self._label, _HERE), _bind(self._label, _ELSEWHERE))
        both("an eviction", _bind(self._evict, f"{pods}/here"), _bind(self._evict, f"{pods}/elsewhere"))
        both("a deletion", _bind(self._delete, f"{pods}/here-too"), _bind(self._delete, f"{pods}/elsewhere-too"))
        # Others are not held to anything.
        for answer in (
            self._evict(f"{pods}/elsewhere", "", False),
            self._delete(f"{pods}/elsewhere-too", "", False),
            self._condition(_ELSEWHERE, "", False),
            self._label(_ELSEWHERE, "", False),
            self._event(_ELSEWHERE, "", False),
        ):
            if answer.status not in (200, 201):
                raise TestError(f"an administrator: {answer.message}")
        return "nodes/status, events, nodes, pods/eviction, pods"

    def nothing_else_of_the_own_node(self) -> str:
        """With the right to patch a node one could send pods elsewhere, promise GPUs, or make the node look ill."""
        token = self._token(_HERE)
        patches = {
            "capacity": {"status": {"capacity": {_WHOLE: "64"}}},
            "allocatable": {"status": {"allocatable": {_WHOLE: "64"}}},
            "addresses": {"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.7"}]}},
            "a condition": {"status": {"conditions": [_a_condition("MemoryPressure")]}},
            "labels": {"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}},
            "phase": {"status": {"phase": "Terminated"}},
            "daemonEndpoints": {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}},
            "nodeInfo": {"status": {"nodeInfo": {"kubeletVersion": "v1.0.0"}}},
            "images": {"status": {"images": [{"names": ["registry.example.com/a:1"], "sizeBytes": 1}]}},
            "volumesInUse": {"status": {"volumesInUse": ["kubernetes.io/csi/a"]}},
            "volumesAttached": {"status": {"volumesAttached": [{"name": "a", "devicePath": "/dev/a"}]}},
            "runtimeHandlers": {"status": {"runtimeHandlers": [{"name": "a"}]}},
            "features": {"status": {"features": {"supplementalGroupsPolicy": True}}},
            "declaredFeatures": {"status": {"declaredFeatures": ["A"]}},
            "annotations": {"metadata": {"annotations": {"a": "b"}}},
            "a finalizer": {"metadata": {"finalizers": ["example.com/a"]}},
            # The collector of garbage would delete the node, since there is no such owner.
            "an owner": {"metadata": {"ownerReferences": [_NO_OWNER]}},
        }
        # What the API server itself has a node's status consist of, lest a newer one has more. It never takes `config`.
        schema = self.cluster.get("/openapi/v3/api/v1")["components"]["schemas"]["io.k8s.api.core.v1.NodeStatus"]
        left = set(schema["properties"]) - set(patches) - {"conditions", "config"}
        if left:
            raise TestError(f"no case tried {left}")
        of_node = {
            "a label of another": {"metadata": {"labels": {"topology.kubernetes.io/zone": "b"}}},
            "a label that is like ours": {"metadata": {"labels": {"evil-nvidia.com/gpu.product": "x"}}},
            "a label that is taken away": {"metadata": {"labels": {"kept": None}}},
            "an annotation": {"metadata": {"annotations": {"a": "b"}}},
            "a finalizer": {"metadata": {"finalizers": ["example.com/a"]}},
            "an owner": {"metadata": {"ownerReferences": [_NO_OWNER]}},
            "a taint": {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoExecute"}]}},
            "unschedulable": {"spec": {"unschedulable": True}},
        }
        self.cluster.kubectl("label", "node", _HERE, "kept=yes")
        asked = [(f"{name} (status)", f"/api/v1/nodes/{_HERE}/status", patch) for name, patch in patches.items()]
        asked += [(name, f"/api/v1/nodes/{_HERE}", patch) for name, patch in of_node.items()]
        for name, path, patch in asked:
            answer = self.cluster.answer("PATCH", path, patch, token, _STRATEGIC)
            try:
                _refused(answer, "may change no")
            except TestError as why:
                raise TestError(f"{name}: {why}") from why
        return ", ".join(name for name, _, _ in asked)

    def events_are_of_the_own_node_and_by_berth(self) -> str:
        """What an event says of other nodes, operators would believe."""
        token = self._token(_HERE)
        path = f"{_EVENTS}/default/events"
        wrong = {
            "of another node": {"regarding": {"kind": "Node", "name": _ELSEWHERE, "uid": _ELSEWHERE}},
            "of a node without a name": {"regarding": {"kind": "Node"}},
            "of something else": {"regarding": {"kind": "Deployment", "name": "a", "apiVersion": "apps/v1", "namespace": "default"}},
            "in another's name": {"reportingController": "kubelet"},
            "in another node's name": {"reportingInstance": _ELSEWHERE},
        }
        asked = [(name, "POST", path, {**_an_event(_HERE, "wrong"), **more}, "") for name, more in wrong.items()]
        # The kubelet's, which is not Berth's to change.
        of_kubelet = {**_an_event(_HERE, "kubelet"), "reportingController": "kubelet"}
        self._made(path, of_kubelet)
        series = {"series": {"count": 2, "lastObservedTime": of_kubelet["eventTime"]}}
        asked.append(("another's", "PATCH", f"{path}/{of_kubelet['metadata']['name']}", series, _MERGE))
        # The same objects by the older group, which Berth has no right to: with one it is held to the same.
        older = "/api/v1/namespaces/default/events"
        self.cluster.kubectl("create", "clusterrole", "older-events", "--verb=create,patch", "--resource=events")
        try:
            account = f"--serviceaccount={BERTH}:{BERTH}"
            self.cluster.kubectl("create", "clusterrolebinding", "older-events", "--clusterrole=older-events", account)
            ours = {"reportingComponent": "berth", "reportingInstance": _HERE}
            asked.append(("another's as ours", "PATCH", f"{older}/{of_kubelet['metadata']['name']}", ours, _MERGE))
            body = {"metadata": {"name": "older"}, "involvedObject": wrong["of another node"]["regarding"], **ours}
            asked.append(("of another node by the older group", "POST", older, body, ""))

            def in_force() -> bool:
                """The role, a moment after it was made."""
                message = self.cluster.answer("POST", older, body, token).message
                if "cannot create" in message:
                    raise TestError(message)
                return True

            until("the right to the older group", 30, in_force, every=0.3)
            for name, method, where, sent, kind in asked:
                try:
                    _refused(self.cluster.answer(method, where, sent, token, kind), "may not report")
                except TestError as why:
                    raise TestError(f"an event {name}: {why}") from why
        finally:
            self.cluster.kubectl("delete", "clusterrolebinding,clusterrole", "older-events")
        # And what the daemon does: it reports an event of a pod, and counts its repetitions.
        pod = _an_event(_HERE, "pod", {"kind": "Pod", "name": "a", "namespace": "default", "apiVersion": "v1"})
        for method, where, body in (("POST", path, pod), ("PATCH", f"{path}/{pod['metadata']['name']}", series)):
            answer = self.cluster.answer(method, where, body, token, _MERGE if method == "PATCH" else "")
            if answer.status not in (200, 201):
                raise TestError(f"{method} of an event of a pod: {answer.message}")
        return ", ".join(name for name, *_ in asked)

    # Pods that go past every device plugin

    def whoever_bypasses_is_warned(self) -> str:
        gpus = "sets NVIDIA_VISIBLE_DEVICES itself"
        all_gpus = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
        from_map = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}
        privileged = {"securityContext": {"privileged": True}}
        prefix, mount = "takes variables from elsewhere", "mounts /var/run/nvidia-container-devices itself"

        def prefixed(text: str | None) -> dict:
            return {"envFrom": [{"configMapRef": {"name": "a"}, **({"prefix": text} if text is not None else {})}]}

        def mounted(path: str) -> dict:
            return {"volumeMounts": [{"name": "null", "mountPath": path}]}

        def warning(path: str, made: dict) -> str:
            answer = self.cluster.answer("POST", f"{path}?dryRun=All", made)
            if answer.status != 201:
                raise TestError(f"{path}: {answer.message}")
            return answer.warnings

        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        until("a pod that sets it is warned of", 30, lambda: gpus in warning(pods, _plain_pod("w", "", all_gpus)))
        cases = [
            (pods, _plain_pod("w", "", from_map), gpus),
            (pods, _plain_pod("w", "", {}, init=all_gpus), gpus),
            (pods, _plain_pod("w", "", privileged), "is privileged"),
            (pods, _plain_pod("w", "", {}, init=prefixed("NVIDIA_VISIBLE_")), prefix),
            (pods, _plain_pod("w", "", {}, init=mounted("/var/run/nvidia-container-devices/all")), mount),
            (pods, _plain_pod("w", ""), None),
            (pods.replace(NAMESPACE, "kube-system"), _plain_pod("w", "", all_gpus), None),
            (pods.replace(NAMESPACE, BERTH), _plain_pod("w", "", all_gpus), None),
        ]
        for text, wanted in (
            *((text, prefix) for text in ("N", "NVIDIA_", "NVIDIA_VISIBLE", "NVIDIA_VISIBLE_", "NVIDIA_VISIBLE_DEVICE")),
            *((text, None) for text in (None, "", "APP_", "NVIDIA_DRIVER_", "VISIBLE_", "nvidia_")),
        ):
            cases.append((pods, _plain_pod("w", "", prefixed(text)), wanted))
        for where in ("/var/run/nvidia-container-devices/all", "/var/run//nvidia-container-devices", "var/run/./nvidia-container-devices/0"):
            cases.append((pods, _plain_pod("w", "", mounted(where)), mount))
        cases.append((pods, _plain_pod("w", "", mounted("/var/run/devices")), None))
        for value in ("", "void", "none"):
            cases.append((pods, _plain_pod("w", "", {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]}), None))
        spec = _plain_pod("w", "", all_gpus)["spec"]
        template = {"metadata": {"labels": {"a": "b"}}, "spec": spec}
        selector = {"matchLabels": {"a": "b"}}
        apps, batch = f"/apis/apps/v1/namespaces/{NAMESPACE}", f"/apis/batch/v1/namespaces/{NAMESPACE}"
        once = {**template, "spec": {**spec, "restartPolicy": "Never"}}
        meta = {"name": "w"}
        cases += [
            (f"{apps}/deployments", {"metadata": meta, "spec": {"selector": selector, "template": template}}, gpus),
            (f"{apps}/daemonsets", {"metadata": meta, "spec": {"selector": selector, "template": template}}, gpus),
            (
                f"{apps}/statefulsets",
                {"metadata": meta, "spec": {"selector": selector, "template": template, "serviceName": "w"}},
                gpus,
            ),
            (f"{batch}/jobs", {"metadata": meta, "spec": {"template": {"spec": once["spec"]}}}, gpus),
            (
                f"{batch}/cronjobs",
                {"metadata": meta, "spec": {"schedule": "@daily", "jobTemplate": {"spec": {"template": once}}}},
                gpus,
            ),
        ]
        for path, made, wanted in cases:
            said = warning(path, made)
            if (wanted is None and "berth-bypass" in said) or (wanted is not None and wanted not in said):
                raise TestError(f"{path} {json.dumps(made['spec'])[:160]}: wanted {wanted!r}, warned {said!r}")
        # A container that is put into a pod that is there.
        self._made(pods, _plain_pod("to-debug", _ELSEWHERE))
        for more, wanted in ((all_gpus, gpus), (prefixed("NVIDIA_VISIBLE_"), prefix), ({}, None)):
            spec = {"ephemeralContainers": [{"name": "debug", "image": images.BUSYBOX, **more}]}
            path = f"{pods}/to-debug/ephemeralcontainers?dryRun=All"
            answer = self.cluster.answer("PATCH", path, {"spec": spec}, kind=_STRATEGIC)
            said = str(answer.warnings)
            if answer.status != 200 or ("berth-bypass" in said) != (wanted is not None) or (wanted or "") not in said:
                raise TestError(f"{more}: wanted {wanted!r}, warned {said!r} ({answer.message})")
        self._delete(f"{pods}/to-debug", "", False)
        return f"looked_at={len(cases) + 4}"

    def whoever_bypasses_may_be_refused(self) -> None:
        """With the binding's other action: as `bypassPolicy.validationActions: [Deny]` renders it."""
        path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/berth-bypass"
        made = _plain_pod("w", "", {"securityContext": {"privileged": True}})
        try:
            self.cluster.answer("PATCH", path, {"spec": {"validationActions": ["Deny"]}}, kind=_MERGE)
            pods = f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"
            until("it is refused", 30, lambda: _refused(self.cluster.answer("POST", pods, made), "is privileged"))
        finally:
            self.cluster.answer("PATCH", path, {"spec": {"validationActions": ["Warn"]}}, kind=_MERGE)

    # In a pod

    def a_labelled_node_gets_its_pod(self) -> str:
        begin = time.monotonic()
        self.cluster.kubectl("label", "node", kubelet.NODE_NAME, "nvidia.com/gpu.present=true")
        self._ready("berth")
        self._allocatable({_WHOLE: 2})
        return f"ready_and_listed_s={time.monotonic() - begin:.1f} image={self._image_of_pod()}"

    def it_has_no_more_than_it_needs(self) -> str:
        """As the kernel shows its process, which settings cannot change."""
        pid = self._pid()
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
        for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            if int(status[key], 16) != 0:
                raise TestError(f"{key} is {status[key]}")
        if status["Seccomp"] != "2" or status["NoNewPrivs"] != "1" or status["Uid"].split() != ["0"] * 4:
            raise TestError(f"seccomp {status['Seccomp']}, no_new_privs {status['NoNewPrivs']}, uid {status['Uid']}")
        mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
        options = {fields[4]: fields[5].split(",")[0] for fields in mounts}
        if options["/"] != "ro":
            raise TestError("its root can be written to")
        system = ("/proc", "/sys", "/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
        own = {p: o for p, o in options.items() if p != "/" and not p.startswith(system)}
        plugins = str(places.KUBELET / "device-plugins")
        account = "/run/secrets/kubernetes.io/serviceaccount"
        account = next((p for p in own if p.endswith(account)), account)
        pod_resources = str(places.KUBELET / "pod-resources")
        runtime = {"/etc/containerd": "ro", "/etc/crio": "ro", "/etc/cdi": "ro", "/var/run/cdi": "rw"}
        wanted = {"/etc/berth": "ro", "/var/lib/berth": "rw", plugins: "rw", pod_resources: "ro", account: "ro", **runtime}
        # An emptyDir: `config check` calls the stack's policies there.
        wanted["/tmp"] = "rw"
        if own != wanted:
            raise TestError(f"it has the mounts {own}, wanted {wanted}")
        return "capabilities=0 seccomp=filter root=ro"

    def it_finds_its_way_in_the_cluster(self) -> str:
        """`node check` in the pod would say the same; what it says over the API is what operators read."""
        shown = json.loads(self._cli("-o", "json", "gpu", "list"))
        if len(shown["items"]) != 2:
            raise TestError(f"GPUs: {shown}")
        self._cli("allocation", "list")
        return "gpus=2"

    def a_policy_is_compiled_there(self) -> str:
        """In the compiling child, under the container's seccomp filter and without capabilities."""
        shipped = places.REPO / "policies-wasm" / "prebuilt" / "binpack.wasm"
        # A custom section more, so that these bytes were never compiled.
        other = places.RUN / "other.wasm"
        other.write_bytes(shipped.read_bytes() + b"\x00\x05\x04e2e!")
        self._cli("policy", "push", other)
        return ""

    def it_evicts_and_tells_with_its_own_token(self) -> str:
        """The kubelet's token for the pod names the node, and so passes the policies that refuse others."""
        pod = self.node.run(Pod("drained", [Container("main", {_WHOLE: 1})], restart="Never"))
        self.node.running(pod)
        held = until("the allocation has its holder", 30, self._holder)
        gpu = held["gpus"][0]
        try:
            self._cli("gpu", "drain", gpu, "--evict", "--reason", "e2e", "--wait", seconds=120)
        except TestError:
            note(self._cli("gpu", "show", gpu))
            raise
        self.node.gone(pod)

        def has_condition() -> bool:
            conditions = {c["type"]: c for c in self.cluster.node()["status"]["conditions"]}
            if conditions.get("GPUUnavailable", {}).get("status") != "True":
                raise TestError(f"GPUUnavailable is {conditions.get('GPUUnavailable')}")
            return True

        until("the node's condition", 30, has_condition)

        def reported() -> bool:
            """Of the node in `default`, as the kubelet does it; of the pod in its namespace."""
            for namespace, kind in (("default", "Node"), (NAMESPACE, "Pod")):
                events = self.cluster.get(f"{_EVENTS}/{namespace}/events")["items"]
                ours = [e for e in events if e.get("reportingController") == "berth" and e["regarding"]["kind"] == kind]
                if not any(e["reportingInstance"] == kubelet.NODE_NAME for e in ours):
                    raise TestError(f"no event of a {kind} by berth")
            return True

        until("the events", 30, reported)
        self._cli("gpu", "uncordon", gpu)
        return f"gpu={gpu}"

    def its_pod_labels_the_node(self) -> str:
        """With its own token, past the policy that refused all that above. As `labels.node: true` renders it."""
        file = self.cluster.get(f"/api/v1/namespaces/{BERTH}/configmaps/berth")["data"]["config.yaml"]
        data = {"data": {"config.yaml": f"{file}labels: {{ node: true }}\n"}}
        self.cluster.kubectl("-n", BERTH, "patch", "configmap", "berth", "-p", json.dumps(data))
        self.cluster.kubectl("-n", BERTH, "rollout", "restart", "daemonset/berth")
        product = f"{_WHOLE}.product"

        def labelled() -> str:
            labels = self.cluster.node()["metadata"]["labels"]
            if labels.get(product, "").startswith("NVIDIA-H100") and labels.get(f"{_WHOLE}.count") == "2":
                return labels[product]
            raise TestError(f"the node has the labels {labels}")

        return f"{product}={until('the node is labelled', 120, labelled)}"

    # The admin API for others than the pod itself

    def over_tls_the_cluster_says_who(self) -> str:
        """`deploy/manifests/admin-tls.yaml`: TLS by a Secret, callers by TokenReview and SubjectAccessReview."""
        self._certificate("first")
        folder = places.RUN / "admin-tls"
        self.cluster.kubectl(
            *("-n", BERTH, "create", "secret", "tls", "berth-tls"),
            *(f"--cert={folder}/tls.crt", f"--key={folder}/tls.key"),
        )
        self._apply("admin-tls.yaml")
        self._ready_over_tls()
        # In the pod, as `kubectl exec POD -- berth` and so `kubectl berth` do it: by the socket, without a token.
        shown = json.loads(self._exec("-o", "json", "gpu", "list"))
        if len(shown["items"]) != 2:
            raise TestError(f"GPUs in the pod: {shown}")
        self.cluster.kubectl("create", "clusterrole", "berth-reader", "--verb=get", "--non-resource-url=/berth/*")
        for name in ("reader", "without-role"):
            self.cluster.kubectl("create", "serviceaccount", name)
        self.cluster.kubectl(
            *("create", "clusterrolebinding", "berth-reader", "--clusterrole=berth-reader"),
            f"--serviceaccount={NAMESPACE}:reader",
        )
        reader, without_role = self._account_token("reader", "berth"), self._account_token("without-role", "berth")
        elsewhere = self._account_token("reader", "another-audience")
        until("a reader reads", 30, lambda: json.loads(self._over_tls(reader, "-o", "json", "gpu", "list"))["items"])
        for what, token, method, wanted in (
            ("a reader reads", reader, "GET", 200),
            ("a reader changes", reader, "PUT", 403),
            ("an account without a role", without_role, "GET", 403),
            ("a token for another audience", elsewhere, "GET", 401),
            ("an unknown token", "x" * 43, "GET", 401),
            ("no token", "", "GET", 401),
        ):
            seen = self._status_over_tls(token, method, "/api/v1/stack")
            if seen != wanted:
                raise TestError(f"{what}: wanted {wanted}, it is {seen}")
        # The daemon's own token stays valid, and nothing is served without TLS.
        own = (_STATE / "token").read_text(encoding="ascii").strip()
        self._over_tls(own, "gpu", "cordon", "0", "--reason", "e2e")
        self._over_tls(own, "gpu", "uncordon", "0")
        try:
            self._cli("gpu", "list")
        except TestError:
            return "socket=ok reader=read only"
        raise TestError("the admin API answers without TLS")

    def a_renewed_certificate_is_taken(self) -> str:
        """As cert-manager does it: the Secret changes, and nothing is restarted."""
        begin, pid = time.monotonic(), self._pid()
        old = self._shown_certificate()
        self._certificate("second")
        folder = places.RUN / "admin-tls"
        data = {"data": {f"tls.{n}": base64.b64encode((folder / f"tls.{n}").read_bytes()).decode() for n in ("crt", "key")}}
        self.cluster.kubectl("-n", BERTH, "patch", "secret", "berth-tls", "-p", json.dumps(data))

        def renewed() -> bool:
            if self._shown_certificate() == old:
                raise TestError("it shows the one of before")
            return True

        # The kubelet is up to two minutes late, the daemon ten seconds.
        until("the new certificate is in force", 180, renewed, every=1)
        self._over_tls((_STATE / "token").read_text(encoding="ascii").strip(), "gpu", "list")
        if self._pid() != pid:
            raise TestError("it was restarted")
        return f"in_force_after_s={time.monotonic() - begin:.0f}"

    def the_chart_with_all_that_is_off_by_default(self) -> str:
        """Helm's rendering: a file for NFD, further tokens, client certificates, the socket on the host, limits."""
        features, socket = places.LIB / "features.d", places.RUN / "admin-socket"
        folder = places.RUN / "admin-tls"
        secret = "x" * 43
        self._signed("alice", "client", [])
        self.cluster.kubectl("-n", BERTH, "create", "secret", "generic", "berth-clients", f"--from-file={folder}/ca.crt")
        self.cluster.kubectl("-n", BERTH, "create", "secret", "generic", "berth-tokens", f"--from-literal=ci={secret}")
        values = {
            "config": {"gpus": "sim:2xh100", "log": "json"},
            "labels": {"nfdFile": str(features / "berth")},
            "admin": {
                "tls": {
                    "secretName": "berth-tls",
                    "clientCASecretName": "berth-clients",
                    "clients": [{"name": "alice", "right": "read"}],
                },
                "tokens": [{"name": "ci", "right": "change", "secretName": "berth-tokens", "key": "ci"}],
                "socket": {"hostDir": str(socket)},
                "limits": {"readsPerSecond": 200},
            },
        }
        shutil.rmtree(features, ignore_errors=True)
        self._install(values)
        product = "nvidia.com/gpu.product=NVIDIA-H100"
        file = features / "berth"
        until("the file for NFD is there", 120, lambda: file.exists() and product in file.read_text(encoding="ascii"))
        self._ready("berth")
        self._image_of_pod()
        # Root of the node, who has no token there.
        process.run([self._berth, "gpu", "list"], "berth by the socket", {"BERTH_SERVER": f"unix://{socket}/admin.sock"})
        self._over_tls(secret, "gpu", "cordon", "0", "--reason", "e2e")
        self._over_tls(secret, "gpu", "uncordon", "0")
        alice = ("--client-cert", folder / "client.crt", "--client-key", folder / "client.key")
        env = {"BERTH_SERVER": f"https://127.0.0.1:{_ADMIN_PORT}", "BERTH_CA_FILE": str(folder / "ca.crt")}
        process.run([self._berth, *alice, "gpu", "list"], "berth with a client certificate", env)
        try:
            process.run([self._berth, *alice, "gpu", "cordon", "0"], "a change with it", env)
        except TestError as why:
            if "may" not in str(why):
                raise
            return "file, token, certificate, socket"
        raise TestError("a client certificate that may only read has changed something")

    # Profiles

    def a_node_gets_what_its_profile_says(self) -> str:
        self.cluster.kubectl("-n", BERTH, "delete", "daemonset/berth", "configmap/berth", "--wait")
        until("the pod is gone", 60, lambda: not self._pods())
        shutil.rmtree(_STATE, ignore_errors=True)
        self._apply("profiles.yaml")
        label = ("label", "--overwrite", "node", kubelet.NODE_NAME)
        self.cluster.kubectl(*label, "berth/profile=exclusive")
        self._ready("berth-exclusive")
        self._allocatable({_WHOLE: 2})
        self.cluster.kubectl(*label, "berth/profile=shared")
        self._ready("berth-shared")
        self._allocatable({_SHARED: 10, _WHOLE: 0}, seconds=120)
        self.cluster.kubectl(*label, "berth/profile=none-of-them")
        until("the pod is gone", 60, lambda: not self._pods())
        return f"exclusive: {_WHOLE}=2; shared: {_SHARED}=10"

    def a_label_chooses_among_files_of_nvidias_plugin(self) -> str:
        """`config.map` and `gfd.enabled` as in NVIDIA's chart: another label is another file, in the same pod."""
        self.cluster.kubectl("-n", BERTH, "delete", "daemonset", "--all", "--wait")
        until("the pod is gone", 60, lambda: not self._pods())
        shutil.rmtree(_STATE, ignore_errors=True)
        sharing = {"timeSlicing": {"renameByDefault": True, "resources": [{"name": _WHOLE, "replicas": 4}]}}
        files = {"whole": {"version": "v1"}, "shared": {"version": "v1", "sharing": sharing}}
        configs = {name: json.dumps(file) for name, file in files.items()}
        self._install({"config": {"gpus": "sim:2xh100", "map": configs, "default": "whole"}, "gfd": {"enabled": True}})
        self._ready("berth")
        self._allocatable({_WHOLE: 2})
        pid = self._pid()
        label = ("label", "--overwrite", "node", kubelet.NODE_NAME)
        self.cluster.kubectl(*label, "nvidia.com/device-plugin.config=shared")
        self._allocatable({_SHARED: 8, _WHOLE: 0}, seconds=120)
        until("the labels follow", 60, lambda: self.cluster.node()["metadata"]["labels"].get(f"{_WHOLE}.replicas") == "4")
        if self._pid() != pid:
            raise TestError("the daemon's PID changed: the process was replaced")
        return f"whole: {_WHOLE}=2; shared: {_SHARED}=8"

    def a_changed_configmap_changes_sharing_while_a_pod_runs(self) -> str:
        """The kubelet's own writer exchanges the mounted file. The DaemonSet's template stays as it is."""
        self.cluster.kubectl("-n", BERTH, "delete", "daemonset", "--all", "--wait")
        until("the pod is gone", 60, lambda: not self._pods())
        shutil.rmtree(_STATE, ignore_errors=True)
        self.cluster.kubectl("label", "node", kubelet.NODE_NAME, "nvidia.com/device-plugin.config-")

        def install(stack: list[dict]) -> None:
            self._install({"config": {"gpus": "sim:2xh100", "stack": stack}})

        def configuration() -> dict:
            headers = {"Authorization": f"Bearer {(_STATE / 'token').read_text().strip()}"}
            request = urllib.request.Request(f"http://127.0.0.1:{_ADMIN_PORT}/api/v1/node", headers=headers)
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.load(reply)["configuration"]

        install([{"policy": "exclusive"}])
        self._ready("berth")
        self._allocatable({_WHOLE: 2})
        pid, name = self._pid(), self._pods()[0]["metadata"]["name"]
        pod = self.node.run(Pod("held", [Container("main", {_WHOLE: 1})], restart="Never"))
        self.node.running(pod)
        install([{"policy": "timeslice", "parameters": {"replicas": 4}}])
        # The kubelet reads a changed ConfigMap with the next sync of the pod, within some 90 s.
        self._allocatable({_SHARED: 4, _WHOLE: 1}, seconds=180)
        pod.beats("main")
        install([{"policy": "timeslize"}, {"policy": "binpak"}])

        def refused() -> bool:
            problems = (configuration().get("error") or {}).get("problems", [])
            if sorted(p["key"] for p in problems) != ["stack[0].policy", "stack[1].policy"]:
                raise TestError(f"problems: {problems}")
            if not all("line" in p for p in problems):
                raise TestError(f"no line: {problems}")
            return True

        until("the file is refused with all its errors", 180, refused)
        self._allocatable({_SHARED: 4, _WHOLE: 1})
        self.node.delete(pod)
        self.node.gone(pod)
        self._allocatable({_SHARED: 8, _WHOLE: 0}, seconds=180)
        if (self._pid(), self._pods()[0]["metadata"]["name"]) != (pid, name):
            raise TestError("the pod or the daemon's process was replaced")
        return f"{_WHOLE}=2, one held; then {_SHARED}=4, then 8"

    def the_driver_runs_in_its_pod(self) -> str:
        """The chart with `config.dra`: the pod's token publishes the GPUs of its node and of no other, and a claim gets one."""
        self.cluster.kubectl("-n", BERTH, "delete", "daemonset", "--all", "--wait")
        until("the pod is gone", 60, lambda: not self._pods())
        shutil.rmtree(_STATE, ignore_errors=True)
        config = {
            "gpus": "sim:2xh100",
            "dra": {"enabled": True},
            "timing": {"viaMs": 2000},
            "cdi": {"folders": [str(places.CDI_SPECS)], "generate": "never"},
            "containerEdits": {"deviceListStrategy": ["cdi-cri"]},
        }
        self._install({"config": config})
        self._ready("berth")
        self._allocatable({_WHOLE: 2})
        self._policy_checked("berth-dra-own-node")
        write_cdi_spec([gpu["uuid"] for gpu in json.loads(self._cli("-o", "json", "gpu", "list"))["items"]])

        def registered() -> bool:
            status = json.loads(self._cli("-o", "json", "node", "show"))["dra"]
            if not status["registered"]:
                raise TestError(f"the API shows {status}")
            return True

        until("the kubelet has registered the driver", 60, registered)
        self._cli("gpu", "via", "0", "dra", "--wait", seconds=120)
        slices = "/apis/resource.k8s.io/v1/resourceslices"
        driver = "gpu.nvidia.com"

        def of(node: str, **more) -> dict:
            pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
            return {"metadata": {"name": f"{node}-e2e"}, "spec": {"driver": driver, "pool": pool, "nodeName": node, **more}}

        own, free = self._token(_HERE), self._token(None)
        everywhere = of(_HERE, allNodes=True)
        del everywhere["spec"]["nodeName"]
        for what, token, asked in (
            ("another node's", own, of(_ELSEWHERE)),
            ("another driver's", own, of(_HERE, driver="gpu.example.com")),
            ("all nodes'", own, everywhere),
            ("by a token of no node", free, of(_HERE)),
        ):
            try:
                _refused(self.cluster.answer("POST", slices, asked, token), "may not change ResourceSlices")
            except TestError as why:
                raise TestError(f"a slice, {what}: {why}") from why
        (published,) = (s for s in self.cluster.get(slices)["items"] if s["spec"].get("devices"))
        of_this_node = f"{slices}/{published['metadata']['name']}"
        moved = {**published, "spec": {**published["spec"], "pool": {**published["spec"]["pool"], "generation": 99}}}
        for method, body in (("PUT", moved), ("DELETE", None)):
            _refused(self.cluster.answer(method, of_this_node, body, own), "may not change ResourceSlices")
        self._made(slices, of(_ELSEWHERE))
        _refused(self.cluster.answer("DELETE", f"{slices}/{_ELSEWHERE}-e2e", None, own), "may not change ResourceSlices")
        for method, path, body in (("POST", slices, of(_HERE)), ("DELETE", f"{slices}/{_HERE}-e2e", None)):
            answer = self.cluster.answer(method, path, body, own)
            if answer.status not in (200, 201):
                raise TestError(f"{method} of the own node's slice: {answer.message}")
        self.cluster.kubectl("delete", "resourceslice", f"{_ELSEWHERE}-e2e")
        devices = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": driver}}]}
        claim = {"metadata": {"name": "one"}, "spec": {"devices": devices}}
        self._made(f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims", claim)
        pod = self.node.run(Pod("claims", [Container("main", {}, claims=("one",))], claims=("one",), restart="Never"))
        pod.started("main")
        gpu = published["spec"]["devices"][0]["attributes"]["uuid"]["string"]
        if pod.environment("main").get(cdi_variable(gpu)) != "injected":
            raise TestError(f"the container has not got {gpu}")
        self.node.delete(pod)
        self.cluster.kubectl("-n", NAMESPACE, "delete", "resourceclaim", "one")
        self._cli("gpu", "via", "0", "device-plugin", "--wait", seconds=120)
        self._allocatable({_WHOLE: 2})
        return f"gpu={gpu}"

    def it_takes_part_in_the_fleet(self) -> str:
        """The chart with `config.fleet`: the pod's token reports its node and no other, and carries out a GPUMaintenance."""
        self.cluster.kubectl("-n", BERTH, "delete", "daemonset", "--all", "--wait")
        until("the pod is gone", 60, lambda: not self._pods())
        shutil.rmtree(_STATE, ignore_errors=True)
        self._install({"config": {"gpus": "sim:2xh100", "fleet": {"enabled": True}}})
        self._ready("berth")
        kinds = "/apis/fleet.berth.dev/v1alpha1"

        def reported() -> bool:
            status = self.cluster.get(f"{kinds}/gpunodes/{self.cluster.name}").get("status")
            return bool(status) and status["summary"]["available"] == 2

        until("the pod reports its node", 60, reported)
        self._policy_checked("berth-fleet-own-node")

        def of(node: str, kind: str, owner: str = "", **more) -> dict:
            uid = self.cluster.get(f"/api/v1/nodes/{owner or node}")["metadata"]["uid"]
            owners = [{"apiVersion": "v1", "kind": "Node", "name": owner or node, "uid": uid}]
            metadata = {"name": node, **({"ownerReferences": owners} if kind == "GPUNode" else {})}
            return {"apiVersion": "fleet.berth.dev/v1alpha1", "kind": kind, "metadata": metadata, **more}

        def report(path: str, node: str, kind: str, token: str) -> Answer:
            body = {"apiVersion": "fleet.berth.dev/v1alpha1", "kind": kind, "metadata": {"name": node}, "status": {}}
            query = "fieldManager=berth&force=true"
            return self.cluster.answer("PATCH", f"{kinds}/{path}/{node}/status?{query}", body, token, "application/apply-patch+yaml")

        own, free = self._token(_HERE), self._token(None)
        for node in (_HERE, _ELSEWHERE):
            spec = {"nodeName": node, "uuids": ["*"], "mode": "cordon"}
            self._made(f"{kinds}/gpumaintenances", of(node, "GPUMaintenance", spec=spec))
        self._made(f"{kinds}/gpunodes", of(_ELSEWHERE, "GPUNode", spec={}))
        made = f"{kinds}/gpunodes"
        stack = {"policy": "team", "revision": "0" * 12, "entries": []}
        for what, words, answer in (
            ("of another node", "of other nodes", self.cluster.answer("POST", made, of("rights-third", "GPUNode", _HERE, spec={}), own)),
            ("without a node", "of other nodes", self.cluster.answer("POST", made, of(_HERE, "GPUNode", spec={}), free)),
            ("with another owner", "only owner", self.cluster.answer("POST", made, of(_HERE, "GPUNode", _ELSEWHERE, spec={}), own)),
            ("with a stack", "must not set spec.stack", self.cluster.answer("POST", made, of(_HERE, "GPUNode", spec={"stack": stack}), own)),
            ("status of another node", "of other nodes", report("gpunodes", _ELSEWHERE, "GPUNode", own)),
            ("maintenance of another node", "of other nodes", report("gpumaintenances", _ELSEWHERE, "GPUMaintenance", own)),
        ):
            try:
                _refused(answer, words)
            except TestError as why:
                raise TestError(f"a report {what}: {why}") from why
        for answer in (
            self.cluster.answer("POST", made, of(_HERE, "GPUNode", spec={}), own),
            report("gpunodes", _HERE, "GPUNode", own),
            report("gpumaintenances", _HERE, "GPUMaintenance", own),
        ):
            if answer.status not in (200, 201):
                raise TestError(f"a report of the own node: {answer.message}")
        spec = {"nodeName": self.cluster.name, "uuids": ["*"], "mode": "cordon", "reason": "e2e"}
        self._made(f"{kinds}/gpumaintenances", of(self.cluster.name, "GPUMaintenance", spec=spec))
        self.cluster.kubectl("wait", f"gm/{self.cluster.name}", "--for=jsonpath={.status.state}=cordoned", "--timeout=30s")
        self._allocatable({_WHOLE: 0})
        self.cluster.kubectl("delete", "gm", "--all")
        self._allocatable({_WHOLE: 2})
        self.cluster.kubectl("delete", "gn", _HERE, _ELSEWHERE)
        return "refused=6"

    def _policy_checked(self, name: str) -> None:
        """Waits until the API server has checked the types of a policy, which must be right."""
        policy = f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{name}"

        def checked() -> bool:
            found = self.cluster.get(policy)
            if found.get("status", {}).get("observedGeneration") != found["metadata"]["generation"]:
                raise TestError("the policy is not checked yet")
            warnings = found["status"].get("typeChecking", {}).get("expressionWarnings")
            if warnings:
                raise Hopeless(f"the policy: {warnings}")
            return True

        until("the policy is checked", 60, checked)

    def the_chart_runs_the_guard(self) -> str:
        """In its own DaemonSet: it knows holders, refuses a pod that names all GPUs, and is updated as docs/guard.md says."""
        self.cluster.kubectl("-n", BERTH, "delete", "daemonset", "--all", "--wait")
        until("the pod is gone", 60, lambda: not self._pods())
        shutil.rmtree(_STATE, ignore_errors=True)
        guard = {
            "socket": str(places.RUN / "guard-pod" / "guard.sock"),
            "nriSocket": str(places.NRI_SOCKET),
            "cgroupRoot": str(machine.CGROUP2),
        }
        config = {"gpus": "sim:2xh100", "guard": guard, "bypass": {"action": "deny"}}
        # The guard alone: the API server's warning of a bypass has its own case.
        self.cluster.kubectl("delete", "validatingadmissionpolicybinding", "berth-bypass", "--ignore-not-found")
        self._install({"guard": {"enabled": True}, "config": config, "bypassPolicy": {"enabled": False}})
        here = ["pod", "-n", BERTH, "-l", "app.kubernetes.io/name=berth-guard"]
        here += ["--field-selector", f"spec.nodeName={kubelet.NODE_NAME}"]
        self._ready("berth")
        self._allocatable({_WHOLE: 2})

        def connected() -> bool:
            status = json.loads(self._cli("-o", "json", "node", "show"))["guard"]
            if not status["connected"] or status.get("bypassAction") != "deny":
                raise TestError(f"the API shows {status}")
            return True

        until("the guard is connected, and knows what to refuse", 120, connected)
        pod = self.node.run(Pod("drained", [Container("main", {_WHOLE: 1})], restart="Never"))
        pod.started("main")
        holder = self._holder()["holder"]
        if (holder["container"], holder["podUid"]) != ("main", pod.uid):
            raise TestError(f"the holder is {holder}")
        takes = self.node.run(Pod("takes", [Container("main", {}, env={"NVIDIA_VISIBLE_DEVICES": "all"})]))

        def refused() -> bool:
            statuses = self.node.status(takes)["status"].get("containerStatuses", [])
            return any(_WHOLE in s["state"].get("waiting", {}).get("message", "") for s in statuses)

        until("the pod that names all GPUs is refused", 60, refused)
        self.node.delete(takes)
        self.cluster.kubectl("delete", *here)
        until("the next guard is connected", 120, connected)
        pod.beats("main")
        self.node.delete(pod)
        return "bypass=denied"

    CASES = (
        manifests_are_taken,
        expressions_have_types,
        rights_end_at_the_own_node,
        nothing_else_of_the_own_node,
        events_are_of_the_own_node_and_by_berth,
        whoever_bypasses_is_warned,
        whoever_bypasses_may_be_refused,
        a_labelled_node_gets_its_pod,
        it_has_no_more_than_it_needs,
        it_finds_its_way_in_the_cluster,
        a_policy_is_compiled_there,
        it_evicts_and_tells_with_its_own_token,
        its_pod_labels_the_node,
        over_tls_the_cluster_says_who,
        a_renewed_certificate_is_taken,
        the_chart_with_all_that_is_off_by_default,
        a_node_gets_what_its_profile_says,
        a_label_chooses_among_files_of_nvidias_plugin,
        a_changed_configmap_changes_sharing_while_a_pod_runs,
        the_driver_runs_in_its_pod,
        it_takes_part_in_the_fleet,
        the_chart_runs_the_guard,
    )

    # By what means

    def _install(self, values: dict) -> None:
        """Helm's rendering of these values, with what is different on this machine."""
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(machine.API_SERVER_PORT)}
        here = {
            "image": {"digest": self._image.digest},
            "hostNetwork": True,
            "stateDir": str(_STATE),
            "extraEnv": [{"name": name, "value": value} for name, value in address.items()],
        }
        rendered = places.RUN / "rendered.yaml"
        text = "---\n".join(chart.render({**here, **values}))
        # This cluster has no network for pods, and the guard needs none.
        text = text.replace("\n      # The runtime gives process ids of the host.\n", "\n      hostNetwork: true\n")
        rendered.write_text(text, encoding="utf-8")
        self.cluster.kubectl("-n", BERTH, "apply", "-f", rendered)

    def _apply(self, manifest: str) -> None:
        """A manifest with what is different on this machine, by a kustomization as an operator would write it."""
        folder = places.RUN / "kustomize"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(MANIFESTS / manifest, folder / manifest)
        container = "/spec/template/spec/containers/0"
        simulated = {"name": "BERTH_GPUS", "value": "sim:2xh100"}
        # The API server's address within the cluster is not forwarded here.
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(machine.API_SERVER_PORT)}
        patch = [
            {"op": "add", "path": "/spec/template/spec/hostNetwork", "value": True},
            {"op": "add", "path": f"{container}/env/-", "value": simulated},
            {"op": "test", "path": "/spec/template/spec/volumes/1/name", "value": "state"},
            {"op": "replace", "path": "/spec/template/spec/volumes/1/hostPath/path", "value": str(_STATE)},
        ]
        for name, value in address.items():
            patch.append({"op": "add", "path": f"{container}/env/-", "value": {"name": name, "value": value}})
        patches = [{"target": {"kind": "DaemonSet"}, "patch": json.dumps(patch)}]
        settings = {"resources": [manifest], "patches": patches}
        (folder / "kustomization.yaml").write_text(json.dumps(settings), encoding="utf-8")
        self.cluster.kubectl("apply", "-n", BERTH, "-k", folder)

    def _ready(self, daemonset: str) -> None:
        """Waits until the node's pod of that DaemonSet is ready, and says why it is not."""

        def look() -> bool:
            self.node.kubelet.check()
            for pod in self._pods():
                if not pod["metadata"]["name"].startswith(f"{daemonset}-") or "deletionTimestamp" in pod["metadata"]:
                    continue
                conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
                if conditions.get("Ready") == "True":
                    return True
                raise TestError(str(pod["status"].get("containerStatuses", pod["status"])))
            raise TestError("there is none")

        until(f"the pod of {daemonset} is ready", 120, look)

    def _image_of_pod(self) -> str:
        """The ID of the image that the pod runs, as the kubelet reports it. It must be that of the archive."""
        [pod] = [pod for pod in self._pods() if "deletionTimestamp" not in pod["metadata"]]
        seen = pod["status"]["containerStatuses"][0]["imageID"]
        # By its digest if it has a name with one, and by its configuration otherwise.
        known = [self._image.digest, *(one.config for one in self._image.images)]
        if seen.rpartition("@")[2] not in known:
            raise TestError(f"the pod runs the image {seen}, wanted one of {known}")
        return seen

    def _pods(self) -> list[dict]:
        return self.cluster.get(f"/api/v1/namespaces/{BERTH}/pods?labelSelector=berth/daemonset")["items"]

    def _allocatable(self, wanted: dict[str, int], seconds: float = 60) -> None:
        def look() -> bool:
            seen = {name: self.cluster.allocatable(name) for name in wanted}
            if seen != wanted:
                raise TestError(f"it is {seen}")
            return True

        until(f"the node's allocatable is {wanted}", seconds, look)

    def _pid(self) -> int:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    args = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if args[:2] == [b"/usr/bin/berth", b"serve"]:
                    return int(entry.name)
        raise TestError("no process is /usr/bin/berth serve")

    def _holder(self) -> dict:
        items = json.loads(self._cli("-o", "json", "allocation", "list"))["items"]
        held = [a for a in items if (a.get("holder") or {}).get("pod") == "drained"]
        if not held:
            raise TestError(f"allocations: {items}")
        return held[0]

    def _cli(self, *args, seconds: float = 60) -> str:
        """An operator's command. `kubectl exec` and `port-forward` do not reach a kubelet on loopback."""
        env = {"BERTH_TOKEN_FILE": str(_STATE / "token")}
        return process.run([self._berth, *args], f"berth {' '.join(str(a) for a in args)}", env, seconds)

    def _exec(self, *args) -> str:
        """A command in the pod's container with the container's environment, which is what `kubectl exec` does."""
        pid = self._pid()
        pairs = (pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in pair)
        command = ["nsenter", f"--target={pid}", "--mount", "/usr/bin/berth", *args]
        return process.run(command, f"berth {' '.join(args)} in the pod", {name: value for name, _, value in pairs})

    def _over_tls(self, token: str, *args) -> str:
        """An operator's command over the network."""
        file = places.RUN / "caller.token"
        file.write_text(token, encoding="ascii")
        file.chmod(0o600)
        env = {
            "BERTH_SERVER": f"https://127.0.0.1:{_ADMIN_PORT}",
            "BERTH_CA_FILE": str(places.RUN / "admin-tls" / "ca.crt"),
            "BERTH_TOKEN_FILE": str(file),
        }
        return process.run([self._berth, *args], f"berth {' '.join(args)}", env)

    def _status_over_tls(self, token: str, method: str, path: str) -> int:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        body = b'{"entries": []}' if method == "PUT" else None
        request = urllib.request.Request(f"https://127.0.0.1:{_ADMIN_PORT}{path}", body, headers, method=method)
        trust = ssl.create_default_context(cafile=str(places.RUN / "admin-tls" / "ca.crt"))
        try:
            with urllib.request.urlopen(request, timeout=30, context=trust) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, OSError) as error:
            raise TestError(f"{method} {path}: {error}") from error

    def _ready_over_tls(self) -> None:
        """The pod with the certificate, and not the one of before, which the update takes away."""

        def look() -> bool:
            self._shown_certificate()
            return True

        until("the admin API speaks TLS", 120, look)
        self._ready("berth")

    def _shown_certificate(self) -> str:
        try:
            return ssl.get_server_certificate(("127.0.0.1", _ADMIN_PORT), timeout=5)
        except OSError as error:
            raise TestError(str(error)) from error

    def _certificate(self, name: str) -> None:
        """A certificate for a forwarded port, of an authority that is made with the first one."""
        folder = places.RUN / "admin-tls"
        folder.mkdir(exist_ok=True)
        if not (folder / "ca.crt").exists():
            authority = [*_NEW_CERTIFICATE, "-subj", "/CN=berth-e2e-admin"]
            process.run([*authority, "-keyout", folder / "ca.key", "-out", folder / "ca.crt"], "make an authority")
        self._signed(name, "tls", ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"])

    def _signed(self, name: str, file: str, more: list[str]) -> None:
        """A certificate of that authority with that common name, in FILE.crt and FILE.key."""
        folder = places.RUN / "admin-tls"
        leaf = [*_NEW_CERTIFICATE, "-subj", f"/CN={name}", "-keyout", folder / f"{file}.key", "-out", folder / f"{file}.crt"]
        leaf += ["-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
        process.run([*leaf, *more], "make a certificate (openssl 3)")

    def _account_token(self, account: str, audience: str) -> str:
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        answer = self.cluster.answer("POST", path, {"spec": {"audiences": [audience]}})
        if answer.status != 201:
            raise TestError(f"a token of {account}: {answer.message}")
        return answer.body["status"]["token"]

    def _made(self, path: str, what: dict) -> None:
        def made() -> bool:
            answer = self.cluster.answer("POST", path, what)
            if answer.status == 201:
                return True
            # The namespace's own service account comes a moment after the namespace.
            raise (TestError if "serviceaccount" in answer.message else Hopeless)(answer.message)

        until(f"POST {path}", 30, made)

    def _token(self, node: str | None) -> str:
        """A token of Berth's service account as the kubelet of that node would ask for it; None: bound to no pod."""
        spec: dict = {"audiences": []}
        if node is not None:
            pods = f"/api/v1/namespaces/{BERTH}/pods"
            if self.cluster.answer("GET", f"{pods}/on-{node}").status == 404:
                self._made(pods, _plain_pod(f"on-{node}", node, account=BERTH))
            uid = self.cluster.get(f"{pods}/on-{node}")["metadata"]["uid"]
            spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": f"on-{node}", "uid": uid}
        path = f"/api/v1/namespaces/{BERTH}/serviceaccounts/{BERTH}/token"
        answer = self.cluster.answer("POST", path, {"spec": spec})
        if answer.status != 201:
            raise TestError(f"a token: {answer.message}")
        return answer.body["status"]["token"]

    def _condition(self, node: str, token: str, dry: bool) -> Answer:
        path = f"/api/v1/nodes/{node}/status{'?dryRun=All' if dry else ''}"
        patch = {"status": {"conditions": [_a_condition("GPUUnavailable")]}}
        return self.cluster.answer("PATCH", path, patch, kind=_STRATEGIC, **_as(token))

    def _event(self, node: str, token: str, dry: bool) -> Answer:
        path = f"{_EVENTS}/default/events{'?dryRun=All' if dry else ''}"
        return self.cluster.answer("POST", path, _an_event(node, "e2e"), **_as(token))

    def _label(self, node: str, token: str, dry: bool) -> Answer:
        path = f"/api/v1/nodes/{node}{'?dryRun=All' if dry else ''}"
        patch = {"metadata": {"labels": {f"{_WHOLE}.product": "NVIDIA-E2E"}}}
        return self.cluster.answer("PATCH", path, patch, kind=_STRATEGIC, **_as(token))

    def _evict(self, pod: str, token: str, dry: bool) -> Answer:
        name = pod.rpartition("/")[2]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
        if dry:
            body["deleteOptions"] = {"dryRun": ["All"]}
        return self.cluster.answer("POST", f"{pod}/eviction{'?dryRun=All' if dry else ''}", body, **_as(token))

    def _delete(self, pod: str, token: str, dry: bool) -> Answer:
        return self.cluster.answer("DELETE", f"{pod}{'?dryRun=All' if dry else ''}", **_as(token))


def _as(token: str) -> dict:
    """Without a token: as the administrator."""
    return {"token": token} if token else {}


def _bind(ask, target: str):
    return lambda token, dry: ask(target, token, dry)


def _refused(answer: Answer, words: str) -> bool:
    if answer.status in (200, 201):
        raise TestError("it is allowed")
    if "ValidatingAdmissionPolicy" not in answer.message or words not in answer.message:
        raise TestError(f"{answer.status}: {answer.message}")
    return True


def _a_condition(kind: str) -> dict:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "type": kind,
        "status": "True",
        "reason": "E2E",
        "message": "e2e",
        "lastTransitionTime": now,
        "lastHeartbeatTime": now,
    }


def _an_event(node: str, name: str, regarding: dict | None = None) -> dict:
    """As the daemon of that node makes one; of the node if nothing else is said."""
    return {
        "metadata": {"name": f"{node}.{name}"},
        "eventTime": time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime()),
        "regarding": regarding or {"kind": "Node", "name": node, "uid": node},
        "reportingController": "berth",
        "reportingInstance": node,
        "action": "Scan",
        "reason": "E2E",
        "note": "e2e",
        "type": "Normal",
    }


def _plain_pod(name: str, node: str, more: dict | None = None, init: dict | None = None, account: str = "") -> dict:
    """A pod that is looked at and never run. `more` and `init`: what its container and its init container have besides."""
    spec: dict = {"containers": [{"name": "main", "image": images.BUSYBOX, **(more or {})}]}
    if init is not None:
        spec["initContainers"] = [{"name": "before", "image": images.BUSYBOX, **init}]
    mounts = [m for c in (more, init) for m in (c or {}).get("volumeMounts", [])]
    if mounts:
        spec["volumes"] = [{"name": name, "emptyDir": {}} for name in sorted({m["name"] for m in mounts})]
    if node:
        spec["nodeName"] = node
    if account:
        spec["serviceAccountName"] = account
    return {"metadata": {"name": name}, "spec": spec}


def main() -> int:
    parser = argparse.ArgumentParser(description="deploy/manifests on a real control plane and kubelet. Needs root and Go.")
    parser.add_argument("--berth", type=Path, default=places.REPO / "target" / "release" / "berth")
    parser.add_argument("--image", type=Path, help="an archive of `just image`, in place of --berth")
    parser.add_argument("--logs", type=Path, default=places.cache() / "logs" / "deployed")
    args = parser.parse_args()
    for sort in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sort, _interrupted)
    score = Score()
    try:
        held = machine.lock()
        machine.check_no_other_kubelet()
        machine.check_no_other_berth()
        if args.image and not args.image.is_file():
            raise TestError(f"{args.image} is not there: run `just image` first")
        if not args.image and not args.berth.is_file():
            raise TestError(f"{args.berth} is not there: run `cargo build --release` first")
        machine.install(machine.missing_packages())
        for module in (kubelet.MODULE, containerd.MODULE, controlplane.ETCD, controlplane.MODULE):
            module.build()
        shutil.rmtree(args.logs, ignore_errors=True)
        args.logs.mkdir(parents=True)
        # One that has NRI.
        with Node(args.logs, str(containerd.MODULE.folder)) as node:
            note(f"kubelet {kubelet.MODULE.version}; logs in {args.logs}")
            archive = args.image or _image_of(args.berth.resolve())
            image = oci.inspect(archive)
            node.containerd.take(archive)
            node.containerd.tag(build.name(), f"{build.REPOSITORY}@{image.digest}")
            node.join(service_accounts=True)
            node.renew()
            _play(Deployed(node, _program_of(archive), image), score)
    except TestError as reason:
        problem(str(reason))
        return 2
    except KeyboardInterrupt:
        problem("interrupted; everything is stopped and removed")
        return 2
    held.close()
    print(score.last_line(), flush=True)
    return 0 if score.failed == 0 and score.passed > 0 else 1


def _image_of(berth: Path) -> Path:
    """An image of that program for this machine."""
    archive = places.RUN / "berth.tar"
    try:
        build.image({program.native().name: berth}, archive, refresh=False)
    except (debian.PackageError, program.BuildError) as why:
        raise TestError(str(why)) from why
    return archive


def _program_of(archive: Path) -> Path:
    """The program of an image for this machine, as the operators' command."""
    _, layers = oci.read(archive, program.native().name)
    berth = places.RUN / "berth"
    with tarfile.open(fileobj=io.BytesIO(layers[-1])) as tar:
        berth.write_bytes(tar.extractfile("usr/bin/berth").read())
    berth.chmod(0o755)
    return berth


def _play(deployed: Deployed, score: Score) -> None:
    for case in Deployed.CASES:
        name = f"deployed.{case.__name__}"
        try:
            score.ok(name, case(deployed) or "")
        except Exception as why:  # noqa: BLE001 - whatever a case meets is its failure
            score.fail(name, why if str(why) else repr(why))


def _interrupted(*_) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
