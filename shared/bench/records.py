"""What became of one request, as its client saw it. All times are seconds after the start of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """`message_s` are the times at which messages with tokens came, `message_tokens` how many each had. `failure` says
    why it does not count; empty for a success. `cached_tokens` of its input the mesh had already, as that says."""

    index: int
    input_tokens: int
    wanted_tokens: int
    arrival_s: float
    sent_s: float  # later than its arrival while it waited for one of the concurrency slots
    end_s: float
    message_s: tuple[float, ...]
    message_tokens: tuple[int, ...]
    failure: str = ""
    cached_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        """As received, whatever was asked for or reported."""
        return sum(self.message_tokens)

    @property
    def latency_s(self) -> float:
        """From its arrival, also while it waited for a slot, to its last message."""
        return self.end_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return self.message_s[0] - self.arrival_s if self.message_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token without the first one."""
        if self.output_tokens < 2:
            return None
        return (self.message_s[-1] - self.message_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies, one a token but the first. Tokens that share a message: the first of them has waited
        since the message before, the others not at all."""
        gaps = [0.0] * (self.message_tokens[0] - 1) if self.message_tokens else []
        for (before, now), count in zip(pairwise(self.message_s), self.message_tokens[1:], strict=True):
            gaps += (now - before, *[0.0] * (count - 1))
        return gaps


def failure_of(
    *, finish_reason: str, received: int, wanted: int, reported: int, input_tokens: int, reported_input: int
) -> str:
    """Why an answer that came to its end is a failure all the same; empty if it is none."""
    if finish_reason != "length":
        return f"ended with finish_reason {finish_reason or 'unspecified'}"
    if received != wanted:
        return f"{'fewer' if received < wanted else 'more'} tokens received than asked for"
    if reported != received:
        return "usage reports another number of tokens than was received"
    if reported_input != input_tokens:
        return "usage reports another number of prompt tokens than was sent"
    return ""
