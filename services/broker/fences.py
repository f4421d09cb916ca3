"""Which processes of which epochs have been reaped, as whoever started them reports. Pure.

A stage is started again only after the one before it has been reaped: a report is about its epoch and all before it.
"""

from __future__ import annotations

from collections import defaultdict

from stagemesh.shared.core.identity import InstanceRef


class Fences:
    """Grows with the number of stages, not with time."""

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}  # instance -> its last epoch that is lost
        self._whole: dict[str, int] = {}  # instance -> the last epoch all of whose stages are reaped
        self._by_rank: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def lose(self, ref: InstanceRef) -> None:
        """Nothing that this epoch says counts any more."""
        self._lost[ref.name] = max(ref.epoch, self._lost.get(ref.name, 0))

    def is_lost(self, ref: InstanceRef) -> bool:
        return ref.epoch <= self._lost.get(ref.name, 0)

    def reaped(self, ref: InstanceRef, pp_rank: int | None) -> None:
        """The process of that stage; None: of every stage. An epoch that has lost one is lost."""
        self.lose(ref)
        if pp_rank is None:
            self._whole[ref.name] = max(ref.epoch, self._whole.get(ref.name, 0))
        else:
            ranks = self._by_rank[ref.name]
            ranks[pp_rank] = max(ref.epoch, ranks.get(pp_rank, 0))

    def are_reaped(self, ref: InstanceRef, num_stages: int) -> bool:
        """Every process of that epoch."""
        ranks, whole = self._by_rank.get(ref.name, {}), self._whole.get(ref.name, 0)
        return all(max(whole, ranks.get(rank, 0)) >= ref.epoch for rank in range(num_stages))
