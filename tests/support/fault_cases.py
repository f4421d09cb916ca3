"""What is done to a mesh, in which phase of a request, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

KV, ACTIVATIONS = "kv", "activations"
"""As the other end of a link: wherever KV goes; the other stage, by the way that activations take."""


class Blow(Enum):
    KILL = "kill"
    STOP = "stop"
    CUT = "cut"


class Phase(Enum):
    """Of a request, as its ticket, its stream and the decode head show it."""

    QUEUED = "queued"  # no page is its own yet, or nothing has been begun
    PREFILL = "prefill chunk"  # writes have been announced; its first token has not come
    TRANSFER = "mid-transfer"  # its first token has come; not all of its KV has been reported
    COMMITTED = "committed"  # all KV is there; the decode side has not said so, or has made no token
    DECODING = "decoding"
    RETRACTED = "retracted"  # its KV is in host memory, on its way there, or back


class Outcome(Enum):
    EXACT = "exact"
    ERROR = "true error"  # after nothing but right tokens
    WRONG = "wrong"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Case:
    """`victim` is `router`, `broker`, `nats` or a stage such as `prefill-0/1`; for CUT a link, from the one that has
    connected: `router>decode-0/0`, `decode-0/0>decode-0/1`, `decode-0/0>broker`, `prefill-0/1>kv`,
    `decode-0/0>activations`."""

    victim: str
    blow: Blow
    phase: Phase

    @property
    def process(self) -> str:
        return self.victim.partition(">")[0]

    @property
    def target(self) -> str:
        """The other end of a link."""
        return self.victim.partition(">")[2]

    @property
    def group(self) -> str:
        """What is started again with it."""
        return self.process.partition("/")[0]

    @property
    def is_stage(self) -> bool:
        return "/" in self.process

    @property
    def is_loss(self) -> bool:
        """Something must be started again: a process is gone, or an instance is none any more."""
        ends_it = self.target in ("broker", ACTIVATIONS) or self.target.startswith(f"{self.group}/")
        return self.blow is not Blow.CUT or (self.is_stage and ends_it)

    @property
    def concerned(self) -> str:
        """The instance whose requests are meant; empty for all."""
        return self.group if self.is_stage else self.target.partition("/")[0] if "/" in self.target else ""

    def __str__(self) -> str:
        return f"{self.victim} {self.blow.name} {self.phase.value}"


@dataclass(slots=True)
class Result:
    """`hit` counts the requests in the phase. `acted_s` is from the blow until the router knows that a stage is lost,
    the heads have let go of all that a router had there, or a broker or bus is reaped; None where nothing is lost.
    `renewed`: it left a write in doubt, and the instance was started again for that."""

    case: Case
    hit: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    acted_s: float | None = None
    renewed: bool = False
    took_s: float = 0.0

    def row(self) -> str:
        counts = "".join(f"{self.outcomes[outcome]:>11}" for outcome in Outcome)
        acted = "-" if self.acted_s is None else f"{self.acted_s:.2f} s"
        return f"{self.case!s:<44}{self.hit:>5}{counts}{acted:>9}{self.took_s:>8.1f} s"


def table(results: Iterable[Result]) -> str:
    head = "".join(f"{outcome.value:>11}" for outcome in Outcome)
    lines = [f"{'case':<44}{'hit':>5}{head}{'acted':>9}{'took':>10}"]
    for result in results:
        lines.append(result.row())
        lines += [f"    {count} x {error}" for error, count in result.errors.most_common(3)]
    return "\n".join(lines)
