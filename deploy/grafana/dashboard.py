"""Writes the Grafana dashboard: python3 deploy/grafana/dashboard.py. To add a panel, add a line to its row below.

`just deploy-check` checks that a running daemon has every metric that is used here.
"""

from __future__ import annotations

import json
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "helm" / "berth" / "files" / "berth.json"

_DENIED = 'hook="admit", outcome=~"denied|refused"'
_SICK = 'state!="healthy"'
_TAKEN_OUT = 'state!="active"'
_FAILED = 'status=~"4xx|5xx"'
#: These metrics have the same names for every process that Prometheus scrapes.
_OURS = 'job=~".*berth.*"'


class Panel:
    """One panel. `series` are (query, legend); `unit` is Grafana's; `kind` is timeseries, stat, table or barchart.

    `least`: where its axis begins; None: where its values do. `stacked`: its series add up.
    """

    def __init__(
        self,
        title: str,
        series,
        unit: str = "short",
        kind: str = "timeseries",
        width: int = 8,
        about: str = "",
        least: int | None = 0,
        stacked: bool = False,
    ):
        self.title = title
        self.series = series
        self.unit = unit
        self.kind = kind
        self.width = width
        self.about = about
        self.least = least
        self.stacked = stacked


def _of(metric: str, matchers: str = "") -> str:
    """A metric of the chosen nodes."""
    return f'{metric}{{instance=~"$instance"{", " + matchers if matchers else ""}}}'


def _rate(metric: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({_of(metric, matchers)}[$__rate_interval]))"


def _sum(metric: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) ({_of(metric, matchers)})"


def _increase(metric: str, matchers: str = "") -> str:
    return f"increase({_of(metric, matchers)}[$__rate_interval])"


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
                "NVIDIA's drivers",
                [(f"count by (driver_version, cuda_version) ({_of('berth_nvidia_info')})", "{{driver_version}}, CUDA {{cuda_version}}")],
                kind="stat",
                width=4,
            ),
            Panel(
                "Not healthy",
                [
                    (f"{_of('berth_live')} == 0", "/livez {{check}} on {{instance}}"),
                    (f"{_of('berth_ready')} == 0", "/readyz {{check}} on {{instance}}"),
                ],
                kind="table",
                about="By check. /livez, /readyz and the pod's log show the reason.",
            ),
            Panel(
                "Warnings of labels, TLS and other checks",
                [(f"{_of('berth_check_warning')} == 1", "{{check}} on {{instance}}")],
                kind="table",
                width=12,
                about="labels: the node's labels do not match its GPUs. tls: renewed files cannot be used, the old ones stay in effect.",
            ),
            Panel(
                "Activations of stacks",
                [(f"changes({_of('berth_stack_revision')}[1h])", "{{instance}}")],
                width=12,
                about="In the last hour. The revision itself is in `berth policy stack`.",
            ),
        ],
    ),
    (
        "GPUs",
        [
            Panel("Models", [(f"count by (model) ({_of('berth_gpu_info')})", "{{model}}")], kind="stat"),
            Panel("Health", [(_sum("berth_gpu_health", "state"), "{{state}}")]),
            Panel(
                "Not healthy",
                [(f"{_of('berth_gpu_health', _SICK)} == 1", "GPU {{gpu}} of {{instance}} is {{state}}")],
                kind="table",
            ),
            Panel(
                "Memory in use",
                [
                    (
                        f"{_of('berth_gpu_memory_used_bytes')} / {_of('berth_gpu_memory_capacity_bytes')}",
                        "GPU {{gpu}} of {{instance}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Utilisation",
                [(_of("berth_gpu_utilization_ratio"), "GPU {{gpu}} of {{instance}}")],
                "percentunit",
            ),
            Panel("Temperature", [(_of("berth_gpu_temperature_celsius"), "GPU {{gpu}} of {{instance}}")], "celsius"),
            Panel("Power", [(_of("berth_gpu_power_watts"), "GPU {{gpu}} of {{instance}}")], "watt"),
            Panel(
                "Processes",
                [
                    (_sum("berth_gpu_processes", "instance"), "{{instance}}"),
                    (_sum("berth_gpu_bypasses", "instance"), "{{instance}} without an allocation"),
                ],
                about="Those without an allocation: `berth process bypass`.",
            ),
            Panel(
                "What the guard enforces",
                [
                    (_sum("berth_memory_limits", "state"), "memory limits: {{state}}"),
                    (_sum("berth_bypass_containers", "outcome"), "bypasses: {{outcome}}"),
                    (f"count({_of('berth_guard_connected')} == 0)", "guards that are not connected"),
                ],
                about="Only nodes with `berth guard`.",
            ),
            Panel(
                "Memory of containers with limits",
                [(_of("berth_memory_limit_used_bytes"), "GPU {{gpu}} of {{instance}}")],
                "bytes",
            ),
            Panel(
                "XIDs and changes of health",
                [
                    (f"sum by (instance, gpu, code) ({_increase('berth_gpu_xids_total')})", "XID {{code}} of GPU {{gpu}} of {{instance}}"),
                    (f"sum by (state) ({_increase('berth_gpu_health_changes_total')})", "to {{state}}"),
                ],
            ),
            Panel(
                "Duration of a scan",
                [
                    (_quantile(0.5, "berth_gpu_scan_duration_seconds", "instance"), "{{instance}} p50"),
                    (_quantile(0.99, "berth_gpu_scan_duration_seconds", "instance"), "{{instance}} p99"),
                ],
                "s",
                about="All GPUs of a node, by NVML.",
            ),
            Panel("Scans", [(_rate("berth_gpu_scans_total", "outcome"), "{{outcome}}")], "ops"),
            Panel("Since the last scan", [(f"time() - {_of('berth_gpu_scan_timestamp_seconds')}", "{{instance}}")], "s"),
        ],
    ),
    (
        "Drain",
        [
            Panel("States", [(_sum("berth_gpu_drain", "state", _TAKEN_OUT), "{{state}}")]),
            Panel(
                "Remaining pods",
                [
                    (_of("berth_gpu_drain_holders"), "GPU {{gpu}} of {{instance}}"),
                    (f"{_of('berth_gpu_drain_blockers')} > 0", "GPU {{gpu}} of {{instance}}: blocked"),
                ],
                about="`berth gpu show GPU` shows them, and what each waits for.",
            ),
            Panel(
                "Time until the deadline",
                [(f"{_of('berth_gpu_drain_deadline_timestamp_seconds')} - time()", "GPU {{gpu}} of {{instance}}")],
                "s",
                about="Below zero: late.",
                least=None,
            ),
            Panel(
                "Out of use, since",
                [
                    (
                        f"(time() - {_of('berth_gpu_drain_since_timestamp_seconds')}) * on (instance, uuid)"
                        f" group_right () ({_of('berth_gpu_drain', _TAKEN_OUT)} == 1)",
                        "GPU {{gpu}} of {{instance}} is {{state}}",
                    )
                ],
                "s",
                kind="table",
                width=24,
            ),
        ],
    ),
    (
        "Devices and allocations",
        [
            Panel("Devices", [(_sum("berth_devices", "resource, state"), "{{resource}} {{state}}")], stacked=True),
            Panel("Live allocations", [(_sum("berth_allocations", "resource, instance"), "{{resource}} on {{instance}}")]),
            Panel(
                "Granted and ended",
                [
                    (_rate("berth_allocations_granted_total", "how"), "{{how}}"),
                    (_rate("berth_allocations_ended_total", "reason"), "ended: {{reason}}"),
                ],
                "ops",
            ),
            Panel(
                "Refused",
                [(f"sum by (instance, kind) ({_increase('berth_allocate_refusals_total')})", "{{kind}} on {{instance}}")],
                about="Each is a pod that failed.",
            ),
            Panel(
                "On hold",
                [(f"{_of('berth_allocations_on_hold')} == 1", "{{instance}}")],
                kind="table",
                width=16,
                about="No allocation ends there, since the kubelet's records contradict each other.",
            ),
        ],
    ),
    (
        "Decisions",
        [
            Panel("Decisions by outcome", [(_rate("berth_decisions_total", "outcome"), "{{outcome}}")], "ops"),
            Panel("Decisions by hook", [(_rate("berth_decisions_total", "hook"), "{{hook}}")], "ops"),
            Panel(
                "Denied or refused",
                [
                    (
                        f"sum by (instance) (increase({_of('berth_decisions_total', _DENIED)}[$__rate_interval]))",
                        "{{instance}}",
                    )
                ],
                about="Each is a pod that failed. `berth decision list --outcome denied` shows which and why.",
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
                "Duration of a call",
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
                about="No longer called after five consecutive faults: `berth policy unsuspend NAME`.",
            ),
        ],
    ),
    (
        "The ledger and its store",
        [
            Panel(
                "Waiting for the ledger's writer",
                [(f"max by (instance, inbox) ({_of('berth_keeper_queue_length')})", "{{inbox}} on {{instance}}")],
                about="At most 64 of the kubelet and 256 of others.",
            ),
            Panel(
                "Duration of a command",
                [
                    (_quantile(0.5, "berth_keeper_turn_duration_seconds", "instance"), "{{instance}} p50"),
                    (_quantile(0.99, "berth_keeper_turn_duration_seconds", "instance"), "{{instance}} p99"),
                ],
                "s",
            ),
            Panel(
                "Duration of an append",
                [
                    (_quantile(0.5, "berth_store_append_duration_seconds", "instance"), "{{instance}} p50"),
                    (_quantile(0.99, "berth_store_append_duration_seconds", "instance"), "{{instance}} p99"),
                ],
                "s",
                about="Until a change is durable; an Allocate waits for it.",
            ),
            Panel("Changes", [(f"rate({_of('berth_ledger_generation')}[$__rate_interval])", "{{instance}}")], "ops"),
            Panel("Size of the store", [(_of("berth_store_size_bytes"), "{{instance}}")], "bytes"),
            Panel(
                "Trouble",
                [
                    (f"{_of('berth_store_failed')} == 1", "{{instance}} cannot write"),
                    (f"sum by (instance) ({_increase('berth_store_append_failures_total')})", "failed appends of {{instance}}"),
                ],
            ),
        ],
    ),
    (
        "The kubelet",
        [
            Panel(
                "Registrations",
                [(_sum("berth_kubelet_registration", "resource, state"), "{{resource}} {{state}}")],
                about="contested: another plugin registers the resource.",
            ),
            Panel(
                "Streams of devices",
                [(_of("berth_list_and_watch_streams"), "{{resource}} on {{instance}}")],
                about="Normally one each.",
            ),
            Panel(
                "Registrations",
                [(f"sum by (instance, outcome) ({_increase('berth_kubelet_registrations_total')})", "{{outcome}} on {{instance}}")],
            ),
            Panel("Calls", [(_rate("berth_grpc_calls_total", "method, code"), "{{method}} {{code}}")], "ops"),
            Panel(
                "Duration of a call",
                [
                    (_quantile(0.5, "berth_grpc_call_duration_seconds", "method"), "{{method}} p50"),
                    (_quantile(0.99, "berth_grpc_call_duration_seconds", "method"), "{{method}} p99"),
                ],
                "s",
            ),
            Panel(
                "Reconcile passes",
                [
                    (_rate("berth_reconcile_passes_total", "outcome"), "{{outcome}}"),
                    (_quantile(0.99, "berth_reconcile_duration_seconds", "instance"), "{{instance}} p99, seconds"),
                ],
            ),
        ],
    ),
    (
        "The admin API",
        [
            Panel("Requests", [(_rate("berth_http_requests_total", "method, status"), "{{method}} {{status}}")], "ops"),
            Panel(
                "Duration of a request, by route",
                [(_quantile(0.99, "berth_http_request_duration_seconds", "route, method"), "{{method}} {{route}} p99")],
                "s",
            ),
            Panel(
                "Failed and refused, by route",
                [
                    (
                        f"sum by (route, method, status) ({_increase('berth_http_requests_total', _FAILED)})",
                        "{{method}} {{route}} {{status}}",
                    )
                ],
            ),
        ],
    ),
    (
        "Processes",
        [
            Panel("Processor", [(_rate("process_cpu_seconds_total", "instance", _OURS), "{{instance}}")], "none"),
            Panel("Memory", [(_of("process_resident_memory_bytes", _OURS), "{{instance}}")], "bytes"),
            Panel(
                "Open files",
                [(f"{_of('process_open_fds', _OURS)} / {_of('process_max_fds', _OURS)}", "{{instance}}")],
                "percentunit",
            ),
            Panel("Spans of traces", [(_rate("berth_trace_spans_total", "outcome"), "{{outcome}}")], "ops"),
        ],
    ),
    (
        "Record of decisions",
        [
            Panel("Size", [(_of("berth_journal_bytes"), "{{instance}}")], "bytes"),
            Panel("Recorded decisions", [(_of("berth_journal_kept"), "{{instance}}")]),
            Panel(
                "Dropped and lost",
                [
                    (_rate("berth_journal_dropped_total", "instance"), "dropped by {{instance}}"),
                    (_rate("berth_journal_lost_total", "instance"), "lost by {{instance}}"),
                ],
                "ops",
                about="Dropped: the oldest, to limit the size. Lost: never recorded.",
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
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "targets": targets,
    }
    if panel.about:
        made["description"] = panel.about
    return made


def _defaults(panel: Panel) -> dict:
    made: dict = {"unit": panel.unit}
    if panel.least is not None:
        made["min"] = panel.least
    if panel.stacked:
        made["custom"] = {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
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
