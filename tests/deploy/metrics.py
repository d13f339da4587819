"""Whether a daemon has every metric, with every label and value, that the dashboard and the alert rules name.

A name that the daemon does not show is wrong. A label of a family that has no series yet is looked up in
deploy/METRICS.md, which `cargo test` holds equal to the daemon; so are values of labels, beside those that are shown.

    python3 tests/deploy/metrics.py --berth target/release/berth     starts one with simulated GPUs
    python3 tests/deploy/metrics.py --url http://127.0.0.1:9471      asks one that runs
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
DASHBOARD = REPO / "deploy" / "grafana" / "berth.json"
RULES = REPO / "deploy" / "prometheus" / "rules.yaml"
PAGE = REPO / "deploy" / "METRICS.md"

#: Prometheus makes these itself, with these labels, and adds these labels to all it scrapes.
_OF_PROMETHEUS = {"up"}
_OF_SCRAPES = {"job", "instance", "node", "pod", "namespace", "container", "endpoint", "le"}

#: Values of labels that no help text lists: hooks, methods of gRPC, NVIDIA's codes of what applications cause.
_VALUES = {
    "hook": {"offer", "place", "admit", "triage"},
    "method": {"Allocate", "GetPreferredAllocation", "ListAndWatch"},
    "code": {"13", "31", "43", "45", "68", "109"},
    "check": {"labels", "tls"},
    "inbox": {"kubelet", "other"},
    "job": {".*berth.*"},
    "instance": {"$instance"},
    "route": {"/livez", "/readyz"},
}

#: Families that no panel or alert needs.
_UNUSED = {"berth_gpu_present", "process_virtual_memory_bytes", "process_start_time_seconds"}

#: What a metric of each type is called in queries.
_SUFFIXES = {"counter": ["_total"], "gauge": [""], "info": ["_info"], "histogram": ["_bucket", "_sum", "_count"]}


def queries() -> dict[str, str]:
    """Every query by where it stands."""
    found = {}
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            # By number as well: two panels may have one title.
            found[f"dashboard: {panel['id']} {panel['title']} {target['refId']}"] = target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found[f"dashboard: variable {variable['name']}"] = variable["query"]["query"]
    text = RULES.read_text(encoding="utf-8")
    pattern = r"- alert: (\S+)\n\s+expr: (?:>-\n((?:\s{10,}.*\n)+)|(.*)\n)"
    for alert in re.finditer(pattern, text):
        found[f"rules: {alert.group(1)}"] = " ".join((alert.group(2) or alert.group(3)).split())
    if len(re.findall(r"^\s+expr:", text, flags=re.M)) != sum(where.startswith("rules:") for where in found):
        raise SystemExit("an expr of rules.yaml is not written in a way that this script reads")
    return found


class Metric:
    """A name as queries use it: its labels, what its help says, and the values of its labels that were seen."""

    def __init__(self, labels: set[str], about: str) -> None:
        self.labels = labels
        self.about = about
        self.seen: dict[str, set[str]] = {}


def documented() -> dict[str, Metric]:
    """What deploy/METRICS.md says that there is, by name as queries use it."""
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| ([a-z]+) \| ([^|]*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    names = {}
    for family, kind, labels, about in rows:
        family = family.removesuffix("_total") if kind == "counter" else family.removesuffix("_info") if kind == "info" else family
        for suffix in _SUFFIXES[kind]:
            names[family + suffix] = Metric(set(re.findall(r"`([a-z_]+)`", labels)), about)
    return names


def metrics_of(text: str) -> tuple[dict[str, Metric], list[str]]:
    """What the daemon shows, by name; and where it differs from deploy/METRICS.md."""
    page = documented()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.M))
    shown = {family + suffix for family, kind in types.items() for suffix in _SUFFIXES[kind]}
    faults = [f"{name} is in deploy/METRICS.md, and the daemon has none" for name in sorted(set(page) - shown)]
    faults += [f"{name} of the daemon is not in deploy/METRICS.md" for name in sorted(shown - set(page))]
    metrics = {name: page.get(name, Metric(set(), "")) for name in shown}
    for name, inside in re.findall(r"^([a-z_][a-z0-9_]*)(?:\{(.*)\})? \S+$", text, flags=re.M):
        for label, value in re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', inside):
            metrics[name].seen.setdefault(label, set()).add(value)
        more = set(metrics[name].seen) - metrics[name].labels - {"le"}
        faults += [f"{name} has the label {label}, which is not in deploy/METRICS.md" for label in sorted(more)]
    return metrics, sorted(set(faults))


def wrong(query: str, metrics: dict[str, Metric]) -> list[str]:
    """What a daemon has not got of a query."""
    bare = re.sub(r'"[^"]*"', '""', query)
    names = set(re.findall(r"\b(?:berth_[a-z0-9_]+|process_[a-z0-9_]+|up)\b", bare))
    if not names:
        return ["it names no metric"]
    found = [f"there is no {name}" for name in sorted(names - _OF_PROMETHEUS - set(metrics))]
    if found:
        return found
    known = [metrics[name] for name in names - _OF_PROMETHEUS]
    labels = {label for inside in re.findall(r"\{([^}]*)\}", bare) for label in re.findall(r"([a-z_]+)\s*[=!]", inside)}
    for group in re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", bare):
        labels.update(label.strip() for label in group.split(",") if label.strip())
    all_known = set().union(_OF_SCRAPES, *(metric.labels for metric in known))
    found += [f"no label {label} of {', '.join(sorted(names))}" for label in sorted(labels - all_known)]
    for label, values in re.findall(r'([a-z_]+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', query):
        for value in values.split("|"):
            is_known = any(value in metric.seen.get(label, ()) or _lists(metric.about, value) for metric in known)
            if not is_known and value not in _VALUES.get(label, ()):
                found.append(f"{label} is never {value}")
    return found


def _lists(about: str, value: str) -> bool:
    return value in re.findall(r"[A-Za-z0-9]+", about)


class Daemon:
    """`with Daemon(berth) as daemon:` one with two simulated GPUs, one of which reports an XID, and a policy that is asked."""

    def __init__(self, berth: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="berth-metrics-")
        folder = Path(self._folder.name)
        (folder / "kubelet" / "device-plugins").mkdir(parents=True)
        self._machine = folder / "gpus.yaml"
        self._machine.write_text(json.dumps({"model": "h100", "count": 2}), encoding="utf-8")
        #: The ports of both listeners.
        self.health, self._admin = free_port(), free_port()
        self._token = folder / "state" / "token"
        settings = {
            "gpus": f"sim:{self._machine}",
            "apiServer": "off",
            "kubeletDir": f"{folder}/kubelet",
            "stateDir": f"{folder}/state",
            "adminListen": f"127.0.0.1:{self._admin}",
            "healthListen": f"127.0.0.1:{self.health}",
            "stack": [{"policy": "timeslice"}],
        }
        config = folder / "config.yaml"
        config.write_text(json.dumps(settings), encoding="utf-8")
        self._command = [berth, "serve", "--config", config]

    def __enter__(self) -> Daemon:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        try:
            # The policy was called for its offers.
            self._wait("berth_policy_calls_total{")
            # Events that are there from the start are over.
            draft = self._machine.with_suffix(".new")
            events = [{"seq": 1, "gpu": 0, "xid": 48}]
            draft.write_text(json.dumps({"model": "h100", "count": 2, "events": events}), encoding="utf-8")
            draft.rename(self._machine)
            self._wait("berth_gpu_xids_total{")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def metrics(self) -> str:
        return fetch(f"http://127.0.0.1:{self.health}")

    def drained(self) -> None:
        """Orders a drain with a deadline of each GPU: one alone would have any partner in a join."""
        for gpu in json.loads(self._ask("GET", "/gpus"))["items"]:
            self._ask("PUT", f"/gpus/{gpu['uuid']}/drain", {"reason": "a check", "deadlineSeconds": 3600})

    def _ask(self, method: str, path: str, body: dict | None = None) -> str:
        token = self._token.read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{self._admin}/api/v1{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.read().decode()

    def _wait(self, words: str) -> None:
        end = time.monotonic() + 30
        while True:
            try:
                if words in self.metrics():
                    return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise SystemExit(f"the daemon shows no metrics: {self._process.communicate()[1][-800:]}")
            time.sleep(0.05)


def fetch(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        return reply.read().decode()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--berth", type=Path, default=REPO / "target" / "release" / "berth")
    parser.add_argument("--url")
    args = parser.parse_args()
    if args.url:
        text = fetch(args.url)
    else:
        with Daemon(args.berth) as daemon:
            text = daemon.metrics()
    metrics, faults = metrics_of(text)
    asked = queries()
    for where, query in asked.items():
        faults += [f"{where}: {what}\n    {query}" for what in wrong(query, metrics)]
    words = " ".join(asked.values())
    families = {re.sub(r"_(total|bucket|sum|count|info)$", "", name) for name in metrics}
    unused = sorted(family for family in families if family not in words and family not in _UNUSED)
    faults += [f"{family} is neither on the dashboard nor in a rule" for family in unused]
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"metrics: {len(asked)} queries, {len(faults)} faults; {len(metrics)} names at the daemon")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
