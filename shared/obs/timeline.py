"""Reads the spans of a mesh: what ran at the same time, and a picture of it. Pure.

Spans, by name: `forward` (a step on a stage), `issue` and `result` (a step leaves and comes back to its head),
`kv_write` (pages of a prompt on their way), `hop` (activations on their way).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from stagemesh.shared.errors import ProtocolViolation

Span = dict[str, Any]
ATTRIBUTES: Final = {"forward": ("microbatch", "tokens", "rows"), "issue": ("step", "microbatch"), "result": ("step",)}
"""By name of a span, those that are read here: all are whole numbers."""


def read_spans(data: bytes) -> list[Span]:
    """The spans of a process, as its tracer dumps them. Raises ProtocolViolation for what is none."""
    try:
        spans = msgspec.json.decode(data, type=list[Span])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no array of spans: {error}") from None
    for span in spans:
        whole = ("start_ns", "end_ns", *ATTRIBUTES.get(str(span.get("name")), ()))
        if not all(isinstance(span.get(key), str) for key in ("name", "process")):
            raise ProtocolViolation(f"a span without name or process: {span}")
        if not all(type(span.get(key)) is int for key in whole):
            raise ProtocolViolation(f"a span needs whole numbers as {', '.join(whole)}: {span}")
    return spans


@dataclass(frozen=True, slots=True)
class Overlaps:
    """How often the mesh did two things at once. `share` fields are 0..1."""

    concurrent_microbatches: int  # pairs of forwards of two microbatches, on two stages of a decode instance, at once
    steps_ahead: int  # decode steps issued before their microbatch's previous step was back
    steps: int  # decode steps that had a previous one
    writes_under_compute: int  # KV writes that ran while their own stage computed the next chunk
    writes: int
    hidden_share: float  # of the time of KV writes, how much lay under computation on the same stage


def overlaps(spans: Iterable[Span], decode: Iterable[str]) -> Overlaps:
    """`decode` names the decode instances; a span's process is `instance/rank`."""
    by_process: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_process[span["process"]].append(span)
    instances = set(decode)
    lanes = {process: items for process, items in by_process.items() if process.partition("/")[0] in instances}
    ahead, steps = _run_ahead(lanes)
    under, writes, hidden = _hidden_writes(by_process)
    return Overlaps(_concurrent(lanes), ahead, steps, under, writes, hidden)


def _concurrent(lanes: dict[str, list[Span]]) -> int:
    forwards = sorted((s for items in lanes.values() for s in items if s["name"] == "forward"), key=_start)
    count, open_spans = 0, list[Span]()
    for span in forwards:
        open_spans = [other for other in open_spans if other["end_ns"] > span["start_ns"]]
        count += sum(1 for o in open_spans if _instance(o) == _instance(span) and _differ(o, span))
        open_spans.append(span)
    return count


def _differ(one: Span, other: Span) -> bool:
    return bool(one["microbatch"] != other["microbatch"] and one["process"] != other["process"])


def _run_ahead(lanes: dict[str, list[Span]]) -> tuple[int, int]:
    ahead = steps = 0
    for items in lanes.values():
        issued = sorted((s for s in items if s["name"] == "issue"), key=_start)
        back = {s["step"]: s["start_ns"] for s in items if s["name"] == "result"}
        previous: dict[int, int] = {}
        for span in issued:
            before = previous.get(span["microbatch"])
            if before is not None and before in back:
                steps += 1
                ahead += span["start_ns"] < back[before]
            previous[span["microbatch"]] = span["step"]
    return ahead, steps


def _hidden_writes(by_process: dict[str, list[Span]]) -> tuple[int, int, float]:
    under = count = total_ns = hidden_ns = 0
    for items in by_process.values():
        forwards = sorted((s for s in items if s["name"] == "forward"), key=_start)
        for write in (s for s in items if s["name"] == "kv_write"):
            shared = sum(_shared_ns(write, forward) for forward in forwards)
            count += 1
            under += shared > 0
            total_ns += write["end_ns"] - write["start_ns"]
            hidden_ns += min(shared, write["end_ns"] - write["start_ns"])
    return under, count, hidden_ns / total_ns if total_ns else 0.0


def _shared_ns(one: Span, other: Span) -> int:
    return int(max(0, min(one["end_ns"], other["end_ns"]) - max(one["start_ns"], other["start_ns"])))


def picture(spans: Sequence[Span], *, columns: int = 100, window_ns: int = 1_000_000_000) -> list[str]:
    """A line a process: the microbatch (or `#` for a prefill chunk) that it computed, `~` where only KV was on its way,
    over the busiest window of `window_ns`."""
    forwards = [s for s in spans if s["name"] in ("forward", "kv_write")]
    if not forwards:
        return []
    start_ns = _busiest(forwards, window_ns)
    shown = [s for s in forwards if s["end_ns"] >= start_ns and s["start_ns"] <= start_ns + window_ns]
    # what writes KV then is a prefill instance: of a cached prompt, or a short one, it computes a single token too
    writers = {_instance(s) for s in shown if s["name"] == "kv_write"}
    lines = []
    for process in sorted({s["process"] for s in forwards}):
        cells = [" "] * columns
        mine = [s for s in shown if s["process"] == process]
        for span in sorted(mine, key=lambda s: s["name"], reverse=True):  # forwards over writes
            first = max(0, (span["start_ns"] - start_ns) * columns // window_ns)
            last = min(columns - 1, (span["end_ns"] - start_ns) * columns // window_ns)
            for column in range(first, last + 1):
                cells[column] = _symbol(span, writes=_instance(span) in writers)
        lines.append(f"{process:>14} |{''.join(cells)}|")
    return lines


def _busiest(spans: Sequence[Span], window_ns: int) -> int:
    """The start of the window in which all processes together computed longest."""
    busy: dict[int, int] = defaultdict(int)
    for span in spans:
        if span["name"] == "forward":
            busy[span["start_ns"] // window_ns] += span["end_ns"] - span["start_ns"]
    return max(busy, key=lambda window: busy[window], default=0) * window_ns


def _symbol(span: Span, *, writes: bool) -> str:
    if span["name"] == "kv_write":
        return "~"
    return "#" if writes or span["tokens"] != span["rows"] else str(span["microbatch"] % 10)


def _start(span: Span) -> int:
    return int(span["start_ns"])


def _instance(span: Span) -> str:
    return str(span["process"]).partition("/")[0]
