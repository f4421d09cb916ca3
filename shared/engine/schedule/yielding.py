"""Who yields to whom where prefill and decode share their cores or GPUs: decode, for a while, to prompts that are about
to join it.

A step of a few sequences reads all weights, as a step of many does, and takes the time for it from the prefill that
would make it a step of many. So steps are held while prompts of this instance are being computed, but no longer than a
bound; after that they run until a moment comes in which no prompt is.
"""

from __future__ import annotations


class YieldPolicy:
    """`bound_s` 0: decode never waits."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._since_s: float | None = None

    def holds(self, now_s: float, *, filling: bool) -> bool:
        """Whether steps are held now. `filling`: prompts are being computed whose KV comes here."""
        if not filling or not self._bound_s:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s < self._since_s + self._bound_s

    @property
    def again_s(self) -> float | None:
        """When held steps are to be looked at again, whatever happens until then."""
        return None if self._since_s is None else self._since_s + self._bound_s
