"""Makes stagemesh.json, the dashboard, from the table below. `--check` fails if the committed file is another.

A panel is a title, a unit of Grafana's, and queries with what their series are called. Three panels fill a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

OUTPUT: Final = Path(__file__).with_name("stagemesh.json")
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 8, 8, 3
M: Final = "stagemesh_"
RATE: Final = "[$__rate_interval]"


def rate(name: str, by: str = "") -> str:
    return f"sum by ({by}) (rate({M}{name}{RATE}))"


def quantiles(name: str, by: str = "") -> list[tuple[str, str]]:
    """50, 95 and 99 of a hundred."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        (f"histogram_quantile(0.{q}, sum by ({labels}) (rate({M}{name}_bucket{RATE})))", f"p{q}{legend}")
        for q in (50, 95, 99)
    ]


def mean(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({M}{name}_sum{RATE})) / sum by ({by}) (rate({M}{name}_count{RATE}))"


STAGE: Final = "instance, pp_rank"
AT_STAGE: Final = "{{instance}}/{{pp_rank}}"
FORWARD, BUBBLE = rate("forward_seconds_total", STAGE), rate("bubble_seconds_total", STAGE)
Panel = tuple[str, str, list[tuple[str, str]]]
ROWS: Final[list[tuple[str, list[Panel]]]] = [
    (
        "Requests",
        [
            ("Requests by outcome", "reqps", [(rate("requests_total", "outcome"), "{{outcome}}")]),
            ("Tokens", "short", [(rate("tokens_total", "kind"), "{{kind}} a second")]),
            ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
            ("Time per output token", "s", quantiles("time_per_output_token_seconds")),
            (
                "Requests that wait for a first token",
                "short",
                [(f"sum by (reason) ({M}waiting_requests)", "{{reason}}"), (f"sum({M}live_requests)", "live")],
            ),
            ("Oldest without a token", "s", [(f"max({M}oldest_waiting_seconds)", "oldest")]),
        ],
    ),
    (
        "Pipelines",
        [
            (
                "Bubble: idle with sequences on the stage",
                "percentunit",
                [(f"{BUBBLE} / ({BUBBLE} + {FORWARD})", AT_STAGE)],
            ),
            ("Sequences in a decode step", "short", [(mean("step_rows", "instance"), "{{instance}}")]),
            ("Prompt tokens in a prefill step", "short", [(mean("chunk_tokens", "instance"), "{{instance}}")]),
            ("Sequences by state", "short", [(f"sum by (instance, state) ({M}sequences)", "{{instance}} {{state}}")]),
            ("Steps outstanding", "short", [(f"sum by (instance) ({M}steps_outstanding)", "{{instance}}")]),
            (
                "Activations to the next stage",
                "s",
                [(f"{rate('hop_seconds_total', STAGE)} / {rate('hops_total', STAGE)}", AT_STAGE)],
            ),
        ],
    ),
    (
        "Memory",
        [
            ("Pages by state", "short", [(f"sum by (instance, state) ({M}pages)", "{{instance}} {{state}}")]),
            (
                "Retracted, resumed, recomputed",
                "ops",
                [
                    (rate("retractions_total", "instance"), "retracted {{instance}}"),
                    (rate("resumed_sequences_total", "instance"), "resumed {{instance}}"),
                    (rate("recomputed_sequences_total", "instance"), "recomputed {{instance}}"),
                ],
            ),
            ("From a retraction until it may run again", "s", quantiles("retracted_seconds", "instance")),
            ("Prompt tokens by where their KV came from", "short", [(rate("prefill_tokens_total", "how"), "{{how}}")]),
            ("Wait for pages on the decode side", "s", quantiles("reserve_wait_seconds", "role")),
            ("Host memory of retracted sequences", "bytes", [(f"sum by ({STAGE}) ({M}host_kv_bytes)", AT_STAGE)]),
            ("Resident memory", "bytes", [("process_resident_memory_bytes", "{{job}} {{instance}}")]),
        ],
    ),
    (
        "KV transfer",
        [
            ("KV arrived", "Bps", [(rate("kv_bytes_total", STAGE), AT_STAGE)]),
            ("Writes by how they ended", "ops", [(rate("kv_writes_total", "state"), "{{state}}")]),
            (
                "Writes in doubt, and restarts for them",
                "short",
                [
                    (f"sum by ({STAGE}) ({M}kv_in_doubt_total)", AT_STAGE),
                    (f"sum by (reason) ({M}instances_renewed_total)", "restarts, {{reason}}"),
                ],
            ),
            ("Tickets by state", "short", [(f"sum by (state) ({M}tickets)", "{{state}}")]),
            ("Tickets closed", "ops", [(rate("tickets_closed_total", "outcome"), "{{outcome}}")]),
            ("Placement and ticket of a request", "s", quantiles("ticket_seconds")),
        ],
    ),
    (
        "Processes",
        [
            ("Instances", "short", [(f"max by (role) ({M}instances)", "{{role}}")]),
            ("Lag of the event loop, p99", "s", quantiles("loop_lag_seconds", "role")[2:]),
            ("Age of the last sample", "s", [(f"time() - {M}sampled_timestamp_seconds", "{{role}} " + AT_STAGE)]),
            ("Invariants that do not hold", "short", [(f"{M}integrity_violation", "{{role}} " + AT_STAGE)]),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": position(0, y, 24, 1)})
        y += 1
        for index, panel in enumerate(row):
            place = position(
                index % COLUMNS * PANEL_WIDTH, y + index // COLUMNS * PANEL_HEIGHT, PANEL_WIDTH, PANEL_HEIGHT
            )
            panels.append(graph(panel, len(panels) + 1, place))
        y += -(-len(row) // COLUMNS) * PANEL_HEIGHT
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": "stagemesh",
        "title": "stagemesh",
        "tags": ["stagemesh"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    title, unit, queries = panel
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": source}
        for index, (expression, legend) in enumerate(queries)
    ]
    return {
        "type": "timeseries",
        "title": title,
        "id": number,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def position(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


if __name__ == "__main__":
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in sys.argv:
        sys.exit(None if OUTPUT.read_text() == text else f"{OUTPUT} is not what {Path(__file__).name} makes")
    OUTPUT.write_text(text)
