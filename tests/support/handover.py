"""From the last prefill chunk of a prompt to its first decode step, from the spans of a mesh on one host. Pure.

chunk through on the last stage --> KV written --> reported to the broker --> committed at the decode head --.
                              `--> first token, by way of the router, at the decode head -------------------+--> ...
... --> a step with its first row issued --> that step begins on the first decode stage
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Span = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Handover:
    """Of one ticket, once each of these has been. CLOCK_MONOTONIC in nanoseconds."""

    chunk_ns: int
    written_ns: int
    reported_ns: int
    committed_ns: int
    first_token_ns: int
    issued_ns: int
    begun_ns: int

    @property
    def wait_ms(self) -> float:
        return (self.begun_ns - self.chunk_ns) / 1e6

    @property
    def parts_ms(self) -> dict[str, float]:
        """They add up to the wait; all but the first token, which comes on a way of its own, beside the KV's."""
        joined_ns = max(self.committed_ns, self.first_token_ns)
        return {
            "KV written": (self.written_ns - self.chunk_ns) / 1e6,
            "reported": (self.reported_ns - self.written_ns) / 1e6,
            "committed": (self.committed_ns - self.reported_ns) / 1e6,
            "first token later": (joined_ns - self.committed_ns) / 1e6,
            "issued": (self.issued_ns - joined_ns) / 1e6,
            "begun": (self.begun_ns - self.issued_ns) / 1e6,
        }


def handovers(spans: Iterable[Span], prefill_last: str, decode_first: str) -> list[Handover]:
    """Of all tickets whose whole way is in `spans`. The two names are those of the last prefill stage's process and the
    first decode stage's."""
    named: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        named[span["name"]].append(span)
    chunks = sorted(s["end_ns"] for s in named["forward"] if s["process"] == prefill_last)
    begun = {s["step"]: s["start_ns"] for s in named["forward"] if s["process"] == decode_first}
    issued = {s["step"]: s["start_ns"] for s in named["issue"] if s["process"] == decode_first}
    first_tokens = {s["request"]: s["start_ns"] for s in named["first_token"]}
    of_ticket: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for name in ("kv_write", "report", "committed"):
        for span in named[name]:
            of_ticket[span["ticket"]][name].append(span)
    found = []
    for first in named["first_step"]:
        way, step = of_ticket[first["ticket"]], first["step"]
        last_write = max((s["start_ns"] for s in way["kv_write"] if s["process"] == prefill_last), default=0)
        chunk_ns = max((end_ns for end_ns in chunks if end_ns <= last_write), default=0)
        if chunk_ns and way["report"] and way["committed"] and step in begun and first["request"] in first_tokens:
            found.append(
                Handover(
                    chunk_ns=chunk_ns,
                    written_ns=max(s["end_ns"] for s in way["kv_write"]),
                    reported_ns=max(s["start_ns"] for s in way["report"]),
                    committed_ns=way["committed"][0]["start_ns"],
                    first_token_ns=first_tokens[first["request"]],
                    issued_ns=issued[step],
                    begun_ns=begun[step],
                )
            )
    return found


def cycles_ms(spans: Iterable[Span], decode_first: str) -> list[float]:
    """From the beginning of a step on the first decode stage to that of the next one of the same microbatch."""
    latest: dict[int, int] = {}
    cycles = []
    steps = [s for s in spans if s["name"] == "forward" and s["process"] == decode_first]
    for span in sorted(steps, key=lambda span: int(span["step"])):
        if (before := latest.get(span["microbatch"])) is not None:
            cycles.append((span["start_ns"] - before) / 1e6)
        latest[span["microbatch"]] = span["start_ns"]
    return cycles


def hidden_share(write: Span, chunks: list[Span]) -> float:
    """The share of a write's time that lies under prefill's computation."""
    start, end = write["start_ns"], write["end_ns"]
    covered = at = start
    total = 0
    for span in sorted(chunks, key=lambda span: int(span["start_ns"])):
        begun, done = max(at, span["start_ns"]), min(end, span["end_ns"])
        if done > begun:
            total, at = total + done - begun, done
    return float(total / max(1, end - covered))
