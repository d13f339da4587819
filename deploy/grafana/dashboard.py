"""Writes the Grafana dashboard: python3 deploy/grafana/dashboard.py. To add a panel, add a line to its row below.

`just deploy-check` asks a running daemon whether it has every metric that is named here.
"""

from __future__ import annotations

import json
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "helm" / "berth" / "files" / "berth.json"

_DENIED = 'hook="admit", outcome=~"denied|refused"'


class Panel:
    """One panel. `series` are (query, legend); `unit` is Grafana's; `kind` is timeseries, stat, table or barchart."""

    def __init__(self, title: str, series, unit: str = "short", kind: str = "timeseries", width: int = 8, about: str = ""):
        self.title = title
        self.series = series
        self.unit = unit
        self.kind = kind
        self.width = width
        self.about = about


def _of(metric: str, matchers: str = "") -> str:
    """A metric of the chosen nodes."""
    return f'{metric}{{instance=~"$instance"{", " + matchers if matchers else ""}}}'


def _rate(metric: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({_of(metric, matchers)}[$__rate_interval]))"


def _quantile(q: float, metric: str, by: str) -> str:
    return f"histogram_quantile({q}, {_rate(f'{metric}_bucket', f'{by}, le')})"


#: What is shown, row by row, each row from left to right in 24 columns.
ROWS = [
    (
        "Daemons",
        [
            Panel("Nodes with Berth", [(f"count({_of('berth_build_info')})", "nodes")], kind="stat", width=4),
            Panel("Not answering", [('count(up{job=~".*berth.*"} == 0) or vector(0)', "nodes")], kind="stat", width=4),
            Panel("Versions", [(f"count by (version) ({_of('berth_build_info')})", "{{version}}")], kind="stat", width=4),
            Panel(
                "Activations of stacks",
                [(f"changes({_of('berth_stack_revision')}[1h])", "{{instance}}")],
                width=12,
                about="In the last hour. The revision itself is in `berth policy stack`.",
            ),
        ],
    ),
    (
        "Decisions",
        [
            Panel("Questions by what came of them", [(_rate("berth_decisions_total", "outcome"), "{{outcome}}")], "ops"),
            Panel("Questions by hook", [(_rate("berth_decisions_total", "hook"), "{{hook}}")], "ops"),
            Panel(
                "Denied or refused",
                [
                    (
                        f"sum by (instance) (increase({_of('berth_decisions_total', _DENIED)}[$__rate_interval]))",
                        "{{instance}}",
                    )
                ],
                about="Each is a pod that failed. `berth decision list --outcome denied` says which and why.",
            ),
        ],
    ),
    (
        "Policies",
        [
            Panel(
                "Calls",
                [(_rate("berth_policy_calls_total", "policy, hook"), "{{policy}} {{hook}}")],
                "ops",
            ),
            Panel(
                "Faults",
                [
                    (
                        f"sum by (policy, kind) (increase({_of('berth_policy_faults_total')}[$__rate_interval]))",
                        "{{policy}}: {{kind}}",
                    )
                ],
            ),
            Panel(
                "Time of a call",
                [
                    (_quantile(0.5, "berth_policy_call_duration_seconds", "hook"), "{{hook}} p50"),
                    (_quantile(0.99, "berth_policy_call_duration_seconds", "hook"), "{{hook}} p99"),
                ],
                "s",
                about="At 500 ms a call is ended.",
            ),
            Panel(
                "Suspended",
                [(f"{_of('berth_policy_suspended')} == 1", "{{policy}} on {{instance}}")],
                kind="table",
                width=24,
                about="Not asked any more, after five faults in a row: `berth policy unsuspend NAME`.",
            ),
        ],
    ),
    (
        "Record of decisions",
        [
            Panel("Size", [(_of("berth_journal_bytes"), "{{instance}}")], "bytes"),
            Panel("Decisions on the record", [(_of("berth_journal_kept"), "{{instance}}")]),
            Panel(
                "Dropped and lost",
                [
                    (_rate("berth_journal_dropped_total", "instance"), "dropped by {{instance}}"),
                    (_rate("berth_journal_lost_total", "instance"), "lost by {{instance}}"),
                ],
                "ops",
                about="Dropped: the oldest, for want of room. Lost: never put down.",
            ),
        ],
    ),
]


def _panel(panel: Panel, number: int, x: int, y: int) -> dict:
    targets = [
        {
            "refId": chr(ord("A") + n),
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "expr": query,
            "legendFormat": legend,
            **({"format": "table", "instant": True} if panel.kind == "table" else {}),
        }
        for n, (query, legend) in enumerate(panel.series)
    ]
    made = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": _height(panel)},
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
    if panel.about:
        made["description"] = panel.about
    return made


def _height(panel: Panel) -> int:
    return 6 if panel.kind == "table" else 8


def dashboard() -> dict:
    """The dashboard as Grafana 10 and newer import it."""
    panels, number, y = [], 1, 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        number, y, x, tallest = number + 1, y + 1, 0, 0
        for panel in row:
            if x + panel.width > 24:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel, number, x, y))
            number, x, tallest = number + 1, x + panel.width, max(tallest, _height(panel))
        y += tallest
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    nodes = {
        "name": "instance",
        "label": "Node",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(berth_build_info, instance)", "refId": "instance"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "berth",
        "title": "Berth",
        "tags": ["berth", "gpu", "kubernetes"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, nodes]},
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
