"""Answers of commands as tables, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stagemesh.shared.bus.events import MeshEvent

Row = Sequence[object]
WIDTH: Final = 140  # where the output is no terminal


def show(command: str, answer: Mapping[str, Any]) -> None:
    """On stdout."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    shown = _SHOWN.get(command)
    console.print(_pairs(answer) if shown is None else shown(answer))


def table(columns: str, rows: Sequence[Row], title: str | None = None) -> Table:
    """`columns` are names, with a > before those whose values are numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns.split():
        made.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        made.add_row(*(escape(str(value)) for value in row))
    return made


def event_line(event: MeshEvent) -> str:
    details = " ".join(f"{key}={value}" for key, value in event.details.items())
    return f"{_clock(event.at_s)} {event.event.value:<14} {event.name} {details}".rstrip()


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S.%f")[:-3]


def _pairs(answer: Mapping[str, Any]) -> Table:
    return table("what value", [(key, _text(value)) for key, value in answer.items()])


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def instances(answer: Mapping[str, Any]) -> Table:
    rows = [
        (
            i["name"],
            i["role"],
            i["state"],
            i["epoch"],
            i["running"],
            i["waiting"],
            f"{i['pages'] - i['pages_free']}/{i['pages']}",
            " ".join(f"[{s['layers'][0]},{s['layers'][1]})" for s in i["stages"]),
            " ".join(str(s["steps_done"]) for s in i["stages"]),
            f"{i['joined_s']:.0f}",
        )
        for i in answer["instances"]
    ]
    return table("name role state >epoch >running >waiting >pages layers >steps >up_s", rows)


def _requests(answer: Mapping[str, Any]) -> Table:
    rows = [
        (r["request_id"], f"{r['age_s']:.1f}", r["state"], r["waits_for"], _text(r["on"]), _text(r["details"]))
        for r in answer["requests"]
    ]
    silent = f"; no answer from {', '.join(answer['silent'])}" if answer["silent"] else ""
    title = f"{len(rows)} of {answer['total']} requests, the oldest{silent}"
    return table("request >age_s state waits_for on details", rows, title)


def _config(answer: Mapping[str, Any]) -> Table:
    rows = [
        (section, key, _text(value))
        for section, values in answer["config"].items()
        for part in (values if isinstance(values, list) else [values])
        for key, value in part.items()
    ]
    return table("section key value", rows)


def _events(answer: Mapping[str, Any]) -> Table:
    rows = [
        (_clock(e["at_s"]), e["event"], e["name"], " ".join(f"{k}={v}" for k, v in e["details"].items()))
        for e in answer["events"]
    ]
    return table("at event name details", rows, f"the last of {answer['subject']}, {answer['dropped']} dropped")


_SHOWN: Final[Mapping[str, Callable[[Mapping[str, Any]], Table]]] = {
    "instance.list": instances,
    "request.list": _requests,
    "config.get": _config,
    "events": _events,
}
