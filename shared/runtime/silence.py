"""How long a peer has been silent, by looks at even intervals.

A look counts as one whenever it comes: time in which this process itself did not run (stopped, starved) hardly counts,
since what has come meanwhile is read before the next look.
"""

from __future__ import annotations

from typing import Final

LOST_AFTER_S: Final = 2.0
LOOKS: Final = 8
LOOK_S: Final = LOST_AFTER_S / LOOKS


class Silence:
    """Of one peer."""

    def __init__(self) -> None:
        self._quiet = 0

    def heard(self) -> None:
        """Something has come."""
        self._quiet = -1  # the look that is under way

    def look(self) -> bool:
        """To be called every LOOK_S. True once nothing has come for LOST_AFTER_S."""
        self._quiet += 1
        return self._quiet >= LOOKS
