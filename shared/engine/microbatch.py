"""Which sequence travels in which microbatch, and whose turn it is.

Sizes never differ by more than one. A new sequence joins the microbatch whose turn is next, since its first step would
wait for any other; if that becomes too large, one that has been there longest moves on to the smallest, where its next
step comes a turn or more later, once. Where one leaves a microbatch that becomes too small, another moves there from
the largest. Turns go round the microbatches that have something to run, so that two steps of one microbatch never
follow each other while another could run between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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

    def join(self, handle: int, keeps: Callable[[int], bool] = lambda _: False) -> int:
        """Adds `handle` to the microbatch whose turn is next. Returns its index. If one has to move on from there, it
        is none of those that `keeps` names (they have not had a step yet), unless there are no others.

        What moves on has its latest step out before those of the microbatch that it moves to, so no step waits for it.
        """
        if handle in self._where:
            raise Bug(f"sequence {handle} is in a microbatch already")
        joined, *others = self._in_turn()
        members = self._members[joined]
        smallest = min(others, key=lambda index: len(self._members[index]), default=joined)
        if len(members) > len(self._members[smallest]):
            self._move(min(members, key=keeps), smallest)
        members.append(handle)
        self._where[handle] = joined
        return joined

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
            smallest = min(range(count), key=lambda index: len(self._members[index]))
            self._members[smallest].append(handle)
            self._where[handle] = smallest
        for index in range(count):
            while self._even_out(index, cost):
                pass
        self._last_turn = min(self._last_turn, count - 1)

    def _even_out(self, index: int, cost: Callable[[int], int]) -> bool:
        """Moves a sequence there from the largest, if it is too small. False if it was not."""
        largest = max(self._members, key=len)
        if len(largest) <= len(self._members[index]) + 1:
            return False
        self._move(min(reversed(largest), key=cost), index)
        return True

    def _move(self, handle: int, index: int) -> None:
        self._members[self._where[handle]].remove(handle)
        self._members[index].append(handle)
        self._where[handle] = index

    def next_turn(self, has_work: Callable[[int], bool]) -> int | None:
        """The next microbatch in turn that has something to run, or None. Does not take the turn."""
        return next((index for index in self._in_turn() if has_work(index)), None)

    def take_turn(self, index: int) -> None:
        self._last_turn = index

    def _in_turn(self) -> Iterator[int]:
        count = len(self._members)
        return ((self._last_turn + offset) % count for offset in range(1, count + 1))

    def check_integrity(self) -> None:
        """Raises Bug unless every sequence is in exactly the microbatch that it is said to be in, and they are even."""
        found = {handle: index for index, members in enumerate(self._members) for handle in members}
        if found != self._where or sum(self.sizes) != len(found):
            raise Bug(f"microbatches do not add up: {self._members} against {self._where}")
        if max(self.sizes) > min(self.sizes) + 1:
            raise Bug(f"microbatches are uneven: {self.sizes}")
