"""How many tokens a chunk has. A prompt that comes alone is cut into as many as keep all stages at work, and its KV
leaves while the rest is computed; where there is much to do, chunks are as large as they may be.

One chunk of 8,000 tokens on two stages: each idles half of the time, and all KV leaves at the end. Four of 2,000: a
fifth, and a quarter of the KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CHUNKS_A_STAGE: Final = 8
"""Of what there is to do: with k chunks on n stages each idles (n - 1) / (k + n - 1) of the time."""
MOST_PROMPTS: Final = 1024
"""That are looked at: with more of them there is enough to do."""


class ChunkSize:
    """Between `least` and `most` tokens. It grows with what comes, and begins anew when the stages have run empty: to
    cut the last chunks of many prompts short would win nothing, since the stages are all at work then."""

    def __init__(self, most: int, least: int, pp_size: int) -> None:
        self._most, self._least, self._parts = most, min(least, most), CHUNKS_A_STAGE * pp_size
        self.tokens = self._least

    def update(self, expected: Iterable[int], *, is_empty: bool) -> None:
        """`expected` tokens of each prompt are to be computed; `is_empty`: no chunk is out."""
        if is_empty:
            self.tokens = self._least
        if self.tokens == self._most:
            return
        total = 0
        for number, tokens in enumerate(expected):
            total += tokens
            if total >= self._parts * self._most or number == MOST_PROMPTS:
                self.tokens = self._most
                return
        self.tokens = max(self.tokens, total // self._parts)
