"""Stop strings: text is shown only once it cannot be the beginning of one. Pure.

push("Hel") -> "Hel"    push("lo EN") -> "lo "  (holds "EN": it may become "END")    push("D!") -> ""  matched "END"
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of `stops` in a text that comes in pieces; with `include`, the match is shown too."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """What can be shown now. Nothing more comes after a match."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = self._find(text)
        if found is not None:
            at, stop = found
            self.matched, self._held = stop, ""
            return text[: at + len(stop)] if self._include else text[:at]
        held = self._beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text has ended without a match: what was held back is shown."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """The match that begins first; of several there, the shortest, which was complete first."""
        matches = [(at, len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not matches:
            return None
        at, _, stop = min(matches)
        return at, stop

    def _beginning(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
