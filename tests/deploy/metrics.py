"""Whether a daemon has every metric, with every label, that the dashboard and the alert rules name.

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
import urllib.error
import urllib.request
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
DASHBOARD = REPO / "deploy" / "grafana" / "berth.json"
RULES = REPO / "deploy" / "prometheus" / "rules.yaml"

#: Prometheus makes these itself, with these labels, and adds these labels to all it scrapes.
_OF_PROMETHEUS = {"up"}
_OF_SCRAPES = {"job", "instance", "node", "pod", "namespace", "container", "endpoint", "le"}

#: What a metric of each type is called in queries.
_SUFFIXES = {"counter": ["_total"], "gauge": [""], "info": ["_info"], "histogram": ["_bucket", "_sum", "_count"]}


def queries() -> dict[str, str]:
    """Every query by where it stands."""
    found = {}
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            found[f"dashboard: {panel['title']} {target['refId']}"] = target["expr"]
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


def metrics_of(text: str) -> dict[str, set[str] | None]:
    """Names as queries use them, each with its labels; None where the daemon shows no series of it yet."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.M))
    names: dict[str, set[str] | None] = {f + s: None for f, kind in types.items() for s in _SUFFIXES[kind]}
    for name, labels in re.findall(r"^([a-z_][a-z0-9_]*)(?:\{(.*)\})? \S+$", text, flags=re.M):
        seen = set(re.findall(r'([a-z_]+)="', labels))
        names[name] = (names.get(name) or set()) | seen
    return names


def wrong(query: str, metrics: dict[str, set[str] | None]) -> list[str]:
    """What a daemon has not got of a query."""
    bare = re.sub(r'"[^"]*"', '""', query)
    names = set(re.findall(r"\b(?:berth_[a-z0-9_]+|up)\b", bare))
    if not names:
        return ["it names no metric"]
    found = [f"there is no {name}" for name in sorted(names - _OF_PROMETHEUS - set(metrics))]
    known = [metrics.get(name) for name in names - _OF_PROMETHEUS]
    if found or None in known:
        return found
    labels = {label for inside in re.findall(r"\{([^}]*)\}", bare) for label in re.findall(r"([a-z_]+)\s*[=!]", inside)}
    for group in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", bare):
        labels.update(label.strip() for label in group.split(",") if label.strip())
    all_known = set().union(_OF_SCRAPES, *known)
    return [f"no label {label} of {', '.join(sorted(names))}" for label in sorted(labels - all_known)]


def scrape(berth: Path) -> str:
    """The metrics of a daemon with simulated GPUs and a policy that is asked."""
    with tempfile.TemporaryDirectory(prefix="berth-metrics-") as folder:
        (Path(folder) / "kubelet" / "device-plugins").mkdir(parents=True)
        config = Path(folder) / "config.yaml"
        health = f"127.0.0.1:{_free_port()}"
        settings = {
            "gpus": "sim:2xh100",
            "apiServer": "off",
            "kubeletDir": f"{folder}/kubelet",
            "stateDir": f"{folder}/state",
            "adminListen": f"127.0.0.1:{_free_port()}",
            "healthListen": health,
            "stack": [{"policy": "timeslice"}],
        }
        config.write_text(json.dumps(settings), encoding="utf-8")
        daemon = subprocess.Popen([berth, "serve", "--config", config], stderr=subprocess.PIPE, text=True)
        try:
            return _asked(f"http://{health}", daemon)
        finally:
            daemon.terminate()
            daemon.wait()


def _asked(url: str, daemon: subprocess.Popen) -> str:
    end = time.monotonic() + 30
    while True:
        try:
            text = fetch(url)
            # The policy was asked what it offers.
            if "berth_policy_calls_total{" in text:
                return text
        except (urllib.error.URLError, OSError):
            pass
        if daemon.poll() is not None or time.monotonic() > end:
            daemon.kill()
            raise SystemExit(f"the daemon shows no metrics: {daemon.communicate()[1][-800:]}")
        time.sleep(0.05)


def fetch(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        return reply.read().decode()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--berth", type=Path, default=REPO / "target" / "release" / "berth")
    parser.add_argument("--url")
    args = parser.parse_args()
    metrics = metrics_of(fetch(args.url) if args.url else scrape(args.berth))
    asked = queries()
    faults = [f"{where}: {what}" for where, query in asked.items() for what in wrong(query, metrics)]
    for fault in faults:
        print(f"{fault}\n    {asked[fault.rpartition(': ')[0]]}", file=sys.stderr)
    print(f"metrics: {len(asked)} queries, {len(faults)} wrong; {len(metrics)} names at the daemon")
    words = set(re.findall(r"berth_[a-z0-9_]+", " ".join(asked.values())))
    unseen = sorted(name for name in words if name in metrics and metrics[name] is None)
    if unseen:
        print(f"labels not checked, since nothing of it happened yet: {', '.join(unseen)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
