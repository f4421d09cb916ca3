"""The dashboard without Grafana: asks a Prometheus for every panel's queries and draws them as one SVG page.

    python deploy/grafana/page.py http://127.0.0.1:9090 300 > page.svg      # the last 300 seconds

For a look at a host that has no Grafana, and for the tests, which check that every panel shows something.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

DASHBOARD: Final = Path(__file__).with_name("stagemesh.json")
CELL: Final = (60, 26)  # of Grafana's grid, in pixels
MARGIN: Final = 8
HEADER, LEGEND = 22, 12
POINTS: Final = 120
COLOURS: Final = ("#3274d9", "#e0752d", "#37872d", "#c4162a", "#8f3bb8", "#b8860b", "#1f9e9e", "#777777")
LEGENDS: Final = 6  # series named below a panel


@dataclass(frozen=True, slots=True)
class Series:
    """(unix seconds, value) in order."""

    name: str
    points: tuple[tuple[float, float], ...]


def ask(server: str, expression: str, legend: str, *, end_s: float, span_s: float) -> list[Series]:
    """The series of a query over the last `span_s`. Raises OSError if the server does not answer or refuses it."""
    rated = expression.replace("$__rate_interval", f"{max(4, round(span_s / 10))}s")
    values = {"query": rated, "start": end_s - span_s, "end": end_s, "step": max(1.0, span_s / POINTS)}
    url = f"{server}/api/v1/query_range?{urllib.parse.urlencode(values)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        results = json.load(response)["data"]["result"]
    return [Series(_named(legend, result["metric"]), tuple(_points(result["values"]))) for result in results]


def _points(values: Sequence[tuple[float, str]]) -> Iterator[tuple[float, float]]:
    for at, text in values:
        value = float(text)
        if value == value and abs(value) != float("inf"):  # a quantile of nothing is NaN
            yield float(at), value


def _named(legend: str, labels: dict[str, str]) -> str:
    for label in ("role", "instance", "pp_rank", "state", "outcome", "kind", "reason", "how", "job"):
        legend = legend.replace(f"{{{{{label}}}}}", labels.get(label, ""))
    return legend.strip()


def page(server: str, span_s: float = 300.0, now_s: float | None = None) -> str:
    """The whole dashboard."""
    end_s = time.time() if now_s is None else now_s
    panels = json.loads(DASHBOARD.read_text())["panels"]
    width = 24 * CELL[0]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) * CELL[1]
    body = "".join(_panel(server, panel, end_s, span_s) for panel in panels)
    style = "text{font:11px sans-serif;fill:#222}.t{font-weight:bold;font-size:12px}.r{font-size:14px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#f4f5f5"/>{body}</svg>\n'
    )


def _panel(server: str, panel: dict[str, Any], end_s: float, span_s: float) -> str:
    place = panel["gridPos"]
    x, y = place["x"] * CELL[0], place["y"] * CELL[1]
    width, height = place["w"] * CELL[0] - MARGIN, place["h"] * CELL[1] - MARGIN
    if panel["type"] == "row":
        return f'<text class="t r" x="{x + MARGIN}" y="{y + 18}">{escape(panel["title"])}</text>'
    series = [
        found
        for target in panel["targets"]
        for found in ask(server, target["expr"], target["legendFormat"], end_s=end_s, span_s=span_s)
        if found.points
    ]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    inside = _plot(series, unit, end_s - span_s, span_s, width, height) if series else _nothing(width, height)
    return (
        f'<g class="panel" transform="translate({x},{y})"><rect width="{width}" height="{height}" fill="#fff" '
        f'stroke="#ccc"/><text class="t" x="6" y="15">{escape(panel["title"])}</text>{inside}</g>'
    )


def _nothing(width: int, height: int) -> str:
    return f'<text class="empty" x="{width // 2 - 25}" y="{height // 2}">no data</text>'


def _plot(series: Sequence[Series], unit: str, start_s: float, span_s: float, width: int, height: int) -> str:
    named = series[:LEGENDS]
    top, bottom = HEADER, height - LEGEND * -(-len(named) // 2) - MARGIN
    highest = max(value for found in series for _, value in found.points) or 1.0
    lines = [f'<text x="6" y="{top + 10}">{shown(highest, unit)}</text>']
    for index, found in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        places = " ".join(
            f"{(at - start_s) / span_s * width:.1f},{bottom - value / highest * (bottom - top):.1f}"
            for at, value in found.points
        )
        lines.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for index, found in enumerate(named):
        x, y = 6 + index % 2 * width // 2, bottom + LEGEND * (index // 2 + 1)
        colour, last = COLOURS[index % len(COLOURS)], shown(found.points[-1][1], unit)
        lines.append(f'<text x="{x}" y="{y}" style="fill:{colour}">{escape(found.name)}: {last}</text>')
    return "".join(lines)


def shown(value: float, unit: str) -> str:
    """A value with its unit, in three digits."""
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{_BASES.get(unit, '')}"
    return f"{value:.3g} {_BASES.get(unit, '')}".strip()


_BASES: Final = {"bytes": "B", "Bps": "B/s", "reqps": "/s", "ops": "/s"}

if __name__ == "__main__":
    _, server, seconds, *_ = (*sys.argv, *("http://127.0.0.1:9090", "300")[len(sys.argv) - 1 :])
    print(page(server, float(seconds)), end="")
