"""Whether a Prometheus that scrapes a daemon can answer every query of the dashboard and the alert rules.

    python3 tests/deploy/queries.py --berth target/release/berth     needs `prometheus` in PATH

That a query can be parsed and names what there is does not say that its parts fit: a join may find two partners. And one
whose numbers are all there, and which compares nothing, must give something.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import metrics

#: A rate needs two scrapes of a counter, and a counter that comes into being with an event some more.
_SCRAPES = 8
_SECONDS = 60


class TestError(Exception):
    """It cannot be tried."""


class Prometheus:
    """`with Prometheus(port) as one:` one that scrapes that port of loopback every second."""

    def __init__(self, scraped: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="berth-prometheus-")
        self.url = f"http://127.0.0.1:{metrics.free_port()}"
        targets = [{"targets": [f"127.0.0.1:{scraped}"]}]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "berth/berth", "static_configs": targets}],
        }
        file = Path(self._folder.name) / "prometheus.yml"
        file.write_text(json.dumps(config), encoding="utf-8")
        self._command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={self._folder.name}/data"]
        self._command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=error"]

    def __enter__(self) -> Prometheus:
        if not shutil.which("prometheus"):
            raise TestError("there is no prometheus here: `just deploy-tools`")
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def ask(self, query: str) -> list:
        """What it answers; `ValueError` with its words if it does not."""
        form = urllib.parse.urlencode({"query": query}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", form, timeout=10) as reply:
                return json.load(reply)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from error

    def scraped(self) -> None:
        """Waits until it has scraped often enough."""
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            try:
                found = self.ask('count_over_time(up{job="berth/berth"}[5m]) and up == 1')
                if found and int(found[0]["value"][1]) >= _SCRAPES:
                    return
            except (OSError, ValueError):
                pass
            if self._process.poll() is not None:
                raise TestError(f"prometheus ended: {self._process.communicate()[1][-800:]}")
            time.sleep(0.2)
        raise TestError(f"prometheus has not scraped the daemon {_SCRAPES} times in {_SECONDS} s")


def wrong(prometheus: Prometheus, text: str) -> tuple[list[str], int]:
    """What is wrong with any query, and how many give something. `text`: what the daemon shows."""
    with_series = set(re.findall(r"^([a-z_][a-z0-9_]*)[{ ]", text, flags=re.M))
    faults, giving = [], 0
    for where, query in metrics.queries().items():
        if "variable" in where:
            continue
        query = query.replace("$__rate_interval", "5m").replace("$instance", ".*")
        try:
            found = prometheus.ask(query)
        except ValueError as why:
            faults.append(f"{where}: {why}\n    {query}")
            continue
        giving += bool(found)
        bare = re.sub(r'"[^"]*"', '""', query)
        names = set(re.findall(r"\b(?:berth_[a-z0-9_]+|process_[a-z0-9_]+)\b", bare))
        # Matchers choose, too: what they choose may not be there.
        chooses = re.search(r"==|[<>]|\bunless\b", bare) or re.search(r'(?<!instance)(?<!job)(?:=~|!=|=)"', query)
        if not found and not chooses and names <= with_series:
            faults.append(f"{where}: it gives nothing\n    {query}")
    return faults, giving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--berth", type=Path, default=metrics.REPO / "target" / "release" / "berth")
    args = parser.parse_args()
    try:
        with metrics.Daemon(args.berth) as daemon, Prometheus(daemon.health) as prometheus:
            daemon.drained()
            prometheus.scraped()
            faults, giving = wrong(prometheus, daemon.metrics())
    except TestError as why:
        faults, giving = [str(why)], 0
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"queries: {len(metrics.queries())} asked, {giving} give something, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
