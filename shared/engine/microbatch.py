"""Which sequence travels in which microbatch, and whose turn it is.

Sizes never differ by more than one: a new sequence joins the smallest, and where one leaves a microbatch that becomes
too small, another moves there from the largest. Turns go round the microbatches that
have something to run, so that two steps of one microbatch never follow each other while another could run between.
"""

from __future__ import annotations

from collections.abc import Callable

from stagemesh.shared.errors import Bug


class Microbatches:
    """Handles of sequences in `count` microbatches."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"there must be at least one microbatch, got {count}")
        self._members: list[list[int]] = [[] for _ in range(count)]
        self._where: dict[int, int] = {}
        self._last_turn = count - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(members) for members in self._members)

    def members(self, index: int) -> tuple[int, ...]:
        return tuple(self._members[index])

    def join(self, handle: int) -> int:
        """Adds `handle` to the smallest microbatch and returns that one's index."""
        if handle in self._where:
            raise Bug(f"sequence {handle} is in a microbatch already")
        smallest = min(range(len(self._members)), key=lambda index: len(self._members[index]))
        self._members[smallest].append(handle)
        self._where[handle] = smallest
        return smallest

    def leave(self, handle: int, cost: Callable[[int], int]) -> None:
        """`cost` is what it costs to move a sequence: the cheapest one moves, and of several the latest."""
        left = self._where.pop(handle)
        self._members[left].remove(handle)
        self._even_out(left, cost)

    def resize(self, count: int, cost: Callable[[int], int]) -> None:
        """From now on there are `count` of them, as even as before. `cost` as in `leave`."""
        if count < 1:
            raise ValueError(f"there must be at least one microbatch, got {count}")
        gone = self._members[count:]
        self._members = self._members[:count] + [[] for _ in range(count - len(self._members))]
        for handle in (handle for members in gone for handle in members):
            del self._where[handle]
            self.join(handle)
        for index in range(count):
            while self._even_out(index, cost):
                pass
        self._last_turn = min(self._last_turn, count - 1)

    def _even_out(self, index: int, cost: Callable[[int], int]) -> bool:
        """Moves a sequence there from the largest, if it is too small. False if it was not."""
        largest = max(self._members, key=len)
        if len(largest) <= len(self._members[index]) + 1:
            return False
        mover = min(reversed(largest), key=cost)
        largest.remove(mover)
        self._members[index].append(mover)
        self._where[mover] = index
        return True

    def next_turn(self, has_work: Callable[[int], bool]) -> int | None:
        """The next microbatch in turn that has something to run, or None. Does not take the turn."""
        count = len(self._members)
        for offset in range(1, count + 1):
            index = (self._last_turn + offset) % count
            if has_work(index):
                return index
        return None

    def take_turn(self, index: int) -> None:
        self._last_turn = index

    def check_integrity(self) -> None:
        """Raises Bug unless every sequence is in exactly the microbatch that it is said to be in, and they are even."""
        found = {handle: index for index, members in enumerate(self._members) for handle in members}
        if found != self._where or sum(self.sizes) != len(found):
            raise Bug(f"microbatches do not add up: {self._members} against {self._where}")
        if max(self.sizes) > min(self.sizes) + 1:
            raise Bug(f"microbatches are uneven: {self.sizes}")
