"""The other half of a cluster: etcd, API server, scheduler, controller manager, and kubectl to talk to them.

All of it is built from Go modules once, listens on loopback only, and starts with an empty etcd.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import machine
import process
from gomodule import GoModule
from kubelet import NODE_NAME
from places import LIB, REPO, RUN
from pods import NAMESPACE
from say import TestError, until

MODULE = GoModule(
    "controlplane",
    "k8s.io/kubernetes",
    ["cmd/kube-apiserver", "cmd/kube-scheduler", "cmd/kube-controller-manager", "cmd/kubectl"],
    with_version=True,
)
ETCD = GoModule("etcd", "go.etcd.io/etcd/server/v3", [""])

SERVER = f"https://127.0.0.1:{machine.API_SERVER_PORT}"
_ETCD = f"http://127.0.0.1:{machine.ETCD_PORT}"
_ETCD_PEER = f"http://127.0.0.1:{machine.ETCD_PEER_PORT}"

_FOLDER = RUN / "controlplane"
_CA = _FOLDER / "ca.crt"
_CERTIFICATE, _KEY = _FOLDER / "server.crt", _FOLDER / "server.key"

#: Tokens are of this test alone and worth nothing outside it: the API server listens on loopback while the test runs.
_ADMIN, _BERTH = "e2e-admin", "e2e-berth"

#: The rights that the documents name for Berth, so that the test shows that they suffice.
_BERTH_ROLES_FILE = REPO / "deploy" / "cluster-role.yaml"
_BERTH_ROLES = ("berth", "berth-events", "berth-evict", "berth-delete", "berth-review", "berth-label", "berth-dra", "berth-fleet")

#: Those of the controller, of which the second is for its namespace.
_CONTROLLER_ROLE, _LEASE_ROLE = "berth-controller", "berth-controller-lease"

#: What `ControlPlane.empty` takes away, in this order: what makes pods before the pods.
_KINDS = "deployments,statefulsets,replicasets,jobs,poddisruptionbudgets,pods,resourceclaims,resourceclaimtemplates"
_GATES = "--feature-gates="
_API_SERVER = "/kube-apiserver"


class Answer:
    """Status, body and warnings of an answer."""

    def __init__(self, status: int, body: dict, warnings: list[str]) -> None:
        self.status = status
        self.body = body
        self.warnings = " ".join(warnings)

    @property
    def message(self) -> str:
        return self.body.get("message", "")


class ControlPlane:
    """`name` is that of its node. `service_accounts`: pods have tokens, and what is in deploy/ is left to the test. `only_api_server`:
    etcd and API server alone. `controllers`: users with the rights of Berth's controller; the API server logs what they write."""

    name = NODE_NAME

    def __init__(
        self, logs: Path, service_accounts: bool = False, only_api_server: bool = False, controllers: tuple[str, ...] = ()
    ) -> None:
        self._only_api_server = only_api_server
        self._users = controllers
        self._audit = logs / "audit.log"
        self._service_accounts = service_accounts
        binaries = MODULE.build()
        #: kubectl.
        self.program = binaries / "kubectl"
        #: For clients with all rights: the kubelet, the scheduler, the controller manager, kubectl.
        self.kubeconfig = _FOLDER / "admin.kubeconfig"
        #: For Berth.
        self.berth_kubeconfig = _FOLDER / "berth.kubeconfig"

        def program(path: Path, *args) -> process.Process:
            return process.Process(path.name, [path, *args], logs / f"{path.name}.log")

        self._etcd = process.Process(
            "etcd",
            [
                ETCD.build() / "server",
                f"--data-dir={LIB}/etcd",
                f"--listen-client-urls={_ETCD}",
                f"--advertise-client-urls={_ETCD}",
                f"--listen-peer-urls={_ETCD_PEER}",
                f"--initial-advertise-peer-urls={_ETCD_PEER}",
                f"--initial-cluster=default={_ETCD_PEER}",
                # Nothing of it is to survive a power cut.
                "--unsafe-no-fsync",
            ],
            logs / "etcd.log",
        )
        self._api = program(
            binaries / "kube-apiserver",
            f"--etcd-servers={_ETCD}",
            "--bind-address=127.0.0.1",
            f"--secure-port={machine.API_SERVER_PORT}",
            # The address of the `kubernetes` service, which no client uses. It must not be loopback.
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={_CERTIFICATE}",
            f"--tls-private-key-file={_KEY}",
            f"--token-auth-file={_FOLDER}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={_CERTIFICATE}",
            f"--service-account-signing-key-file={_KEY}",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--allow-privileged",
            # Most pods of this test need no service account.
            *([] if service_accounts else ["--disable-admission-plugins=ServiceAccount"]),
            *([f"--audit-policy-file={_FOLDER}/audit.json", f"--audit-log-path={self._audit}"] if controllers else []),
        )
        client = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--secure-port=0")
        self._controllers = program(
            binaries / "kube-controller-manager",
            *client,
            f"--service-account-private-key-file={_KEY}",
            f"--root-ca-file={_CA}",
        )
        self._scheduler = program(binaries / "kube-scheduler", *client)
        self._trust: ssl.SSLContext | None = None

    def start(self) -> None:
        """Starts all of it and waits until pods can be made."""
        _FOLDER.mkdir(exist_ok=True)
        _make_certificates()
        tokens = "".join(f"e2e-{user},{user},{user}\n" for user in self._users)
        (_FOLDER / "tokens.csv").write_text(f'{_ADMIN},admin,admin,"system:masters"\n{_BERTH},berth,berth\n{tokens}')
        for user in self._users:
            self.kubeconfig_of(user).write_text(json.dumps(_kubeconfig(f"e2e-{user}"), indent=1), encoding="utf-8")
        (_FOLDER / "audit.json").write_text(json.dumps(_audit_policy(self._users)), encoding="utf-8")
        for path, token in ((self.kubeconfig, _ADMIN), (self.berth_kubeconfig, _BERTH)):
            path.write_text(json.dumps(_kubeconfig(token), indent=1), encoding="utf-8")
            path.chmod(0o600)
        self._trust = ssl.create_default_context(cafile=str(_CA))
        self._etcd.start()
        self._start_servers()
        self.kubectl("create", "namespace", NAMESPACE)
        if self._service_accounts:
            return
        self.kubectl("create", "-f", _BERTH_ROLES_FILE)
        for role in _BERTH_ROLES:
            self.kubectl("create", "clusterrolebinding", role, f"--clusterrole={role}", "--user=berth")
        for user in self._users:
            self.kubectl("create", "clusterrolebinding", user, f"--clusterrole={_CONTROLLER_ROLE}", f"--user={user}")
            self.kubectl("create", "rolebinding", user, f"--clusterrole={_LEASE_ROLE}", f"--user={user}")

    def kubeconfig_of(self, user: str) -> Path:
        """For one of the controllers."""
        return _FOLDER / f"{user}.kubeconfig"

    def writes_of(self, user: str) -> list[dict]:
        """What a controller has written, oldest first: what and when the API server received it (RFC 3339). Its lease is left out."""
        lines = self._audit.read_text(encoding="utf-8").splitlines() if self._audit.exists() else []
        events = [event for event in map(json.loads, lines) if event["user"]["username"] == user]
        return [event for event in events if event.get("objectRef", {}).get("resource") != "leases" and event["responseStatus"]["code"] < 300]

    def restart_api_server(self, down_seconds: float) -> None:
        """The API server is away for so long."""
        self._api.stop(seconds=30)
        time.sleep(down_seconds)
        self._start_api_server()

    def _start_api_server(self) -> None:
        self._api.start()

        def answers() -> bool:
            self.check()
            return self._ask("/readyz") == "ok"

        until("the API server is ready", 60, answers)

    def _start_servers(self) -> None:
        self._start_api_server()
        if self._only_api_server:
            return
        self._controllers.start()
        self._scheduler.start()

    def restart(self, feature_gates: dict[str, bool], server: Path | None = None) -> None:
        """Restarts all but etcd with these feature gates. `server`: the folder of another API server."""
        gates = [_GATES + ",".join(f"{name}={str(on).lower()}" for name, on in feature_gates.items())] if feature_gates else []
        for part in (self._scheduler, self._controllers, self._api):
            part.stop(seconds=30)
            part.args = [one for one in part.args if not one.startswith(_GATES)] + gates
        program = f"{server or MODULE.build()}{_API_SERVER}"
        self._api.args = [program if one.endswith(_API_SERVER) else one for one in self._api.args]
        self._start_servers()

    def stop(self) -> None:
        for part in (self._scheduler, self._controllers, self._api, self._etcd):
            part.stop()

    def check(self) -> None:
        for part in (self._etcd, self._api):
            part.check()

    def ready(self) -> None:
        """Waits until the node is Ready and pods may be scheduled on it."""

        def look() -> bool:
            self._controllers.check()
            self._scheduler.check()
            node = self.node()
            conditions = {c["type"]: c for c in node["status"].get("conditions", [])}
            if conditions.get("Ready", {}).get("status") != "True":
                raise TestError(conditions.get("Ready", {}).get("message", "it has not said yet"))
            if node["spec"].get("taints"):
                raise TestError(f"it has taints {node['spec']['taints']}")
            return True

        until("the node is ready for pods", 60, look)

    def empty(self) -> None:
        """Deletes all that cases have made, at once."""
        self.kubectl("delete", _KINDS, "--all", "--force", "--grace-period=0", "--wait=false")

        def nothing() -> bool:
            return not self.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]

        until("all pods are deleted", 60, nothing)

    def kubectl(self, *args, seconds: float = 120) -> str:
        """kubectl as an operator would type it, in the namespace of the cases."""
        command = [self.program, "--kubeconfig", self.kubeconfig, "-n", NAMESPACE, *args]
        return process.run(command, f"kubectl {' '.join(str(a) for a in args)}", seconds=seconds)

    def create(self, manifest: str) -> dict:
        """kubectl create. Returns the object as the API server has it."""
        draft = _FOLDER / "create.json"
        draft.write_text(manifest, encoding="utf-8")
        return json.loads(self.kubectl("create", "-f", draft, "-o", "json"))

    def node(self) -> dict:
        return self.get(f"/api/v1/nodes/{self.name}")

    def allocatable(self, resource: str) -> int:
        """How many devices of a resource the scheduler sees on the node."""
        return int(self.node()["status"].get("allocatable", {}).get(resource, "0"))

    def capacity(self, resource: str) -> int:
        """How many devices of a resource the kubelet has been shown, unhealthy ones among them."""
        return int(self.node()["status"].get("capacity", {}).get(resource, "0"))

    def pods(self) -> list[dict]:
        """The pods of the cases, as the API server has them."""
        return self.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]

    def pod(self, name: str) -> dict:
        return self.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")

    def get(self, path: str) -> dict:
        return json.loads(self._ask(path))

    def answer(self, method: str, path: str, body: dict | None = None, token: str = _ADMIN, kind: str = "") -> Answer:
        """The API server's response to a client with the token. `kind`: of the body, if it is not JSON as it is."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind or "application/json"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{SERVER}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._trust) as reply:
                return Answer(reply.status, json.load(reply), reply.headers.get_all("Warning") or [])
        except urllib.error.HTTPError as error:
            return Answer(error.code, json.load(error), error.headers.get_all("Warning") or [])
        except (urllib.error.URLError, OSError) as error:
            raise TestError(f"{method} {path}: {error}") from error

    def _ask(self, path: str) -> str:
        request = urllib.request.Request(f"{SERVER}{path}", headers={"Authorization": f"Bearer {_ADMIN}"})
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._trust) as reply:
                return reply.read().decode()
        except urllib.error.HTTPError as error:
            raise TestError(f"GET {path}: {error.code}: {error.read().decode(errors='replace')[:300]}") from error
        except (urllib.error.URLError, OSError) as error:
            raise TestError(f"GET {path}: {error}") from error


def _audit_policy(users: tuple[str, ...]) -> dict:
    """Logs what these users write, without bodies."""
    rule = {"level": "Metadata", "users": list(users), "verbs": ["create", "update", "patch", "delete"], "omitStages": ["RequestReceived"]}
    return {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [rule] if users else [{"level": "None"}]}


def _kubeconfig(token: str) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": SERVER, "certificate-authority": str(_CA)}}],
        "users": [{"name": "e2e", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
        "current-context": "e2e",
    }


def _make_certificates() -> None:
    """An authority of two days, and a certificate of it for loopback."""
    new = [
        "openssl",
        "req",
        "-x509",
        "-days",
        "2",
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
    ]
    authority = [*new, "-subj", "/CN=berth-e2e", "-keyout", _FOLDER / "ca.key", "-out", _CA]
    process.run(authority, "make a certificate authority")
    server = [*new, "-subj", "/CN=kube-apiserver", "-keyout", _KEY, "-out", _CERTIFICATE, "-CA", _CA]
    server += ["-CAkey", _FOLDER / "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    server += ["-addext", "subjectAltName=IP:127.0.0.1"]
    process.run(server, "make the API server's certificate (openssl 3)")
