"""The broker's directory, and those who are told of its changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.services.broker.directory import Change, Directory, flaw
from stagemesh.services.broker.watchers import MAX_QUEUED, Updates, Watchers
from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.pb import broker_pb2
from tests.support.instances import DECODE, PREFILL, instance_of


def test_a_first_report_joins_and_a_later_one_replaces_it() -> None:
    directory = Directory()
    first = instance_of("p", PREFILL)
    later = instance_of("p", PREFILL, load=InstanceLoad(waiting=3), accepting=False)
    assert directory.report(first) == Change((first,))
    assert directory.report(later) == Change((later,))
    assert list(directory) == [later]
    assert directory.get(InstanceRef("p", 1)) == later


def test_a_later_epoch_replaces_an_earlier_one_and_says_so() -> None:
    directory = Directory()
    old, new = (instance_of("p", PREFILL, epoch=epoch) for epoch in (3, 4))
    directory.report(old)
    assert directory.report(new) == Change((new,), (old.ref,))
    assert (directory.get(old.ref), directory.get(new.ref)) == (None, new)


def test_a_report_of_an_earlier_epoch_changes_nothing() -> None:
    directory = Directory()
    new, old = (instance_of("p", PREFILL, epoch=epoch) for epoch in (4, 3))
    directory.report(new)
    assert directory.report(old) is None
    assert directory.remove(old.ref) is None
    assert list(directory) == [new]


def test_what_has_left_is_gone_once() -> None:
    directory = Directory()
    info = instance_of("d", DECODE)
    directory.report(info)
    assert directory.remove(info.ref) == Change(removed=(info.ref,))
    assert directory.remove(info.ref) is None
    assert directory.get(info.ref) is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.booleans()), max_size=30))
def test_changes_tell_all_that_there_is_to_know(moves: list[tuple[str, int, bool]]) -> None:
    """Whoever applies them in order has the directory."""
    directory = Directory()
    seen: dict[InstanceRef, InstanceInfo] = {}
    for name, epoch, joins in moves:
        info = instance_of(name, PREFILL, epoch=epoch)
        change = directory.report(info) if joins else directory.remove(info.ref)
        if change is None:
            continue
        for ref in change.removed:
            del seen[ref]
        seen |= {changed.ref: changed for changed in change.changed}
        assert seen == {info.ref: info for info in directory}
    assert len({ref.name for ref in seen}) == len(seen)


def drain(queue: Updates) -> list[broker_pb2.DirectoryUpdate | None]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def watched() -> tuple[Directory, Watchers]:
    directory = Directory()
    return directory, Watchers(directory, "b")


def test_a_watcher_begins_with_a_snapshot_and_goes_on_with_changes() -> None:
    async def body() -> None:
        directory, watchers = watched()
        directory.report(instance_of("p", PREFILL, epoch=1))
        queue = watchers.add()
        change = directory.report(instance_of("p", PREFILL, epoch=2))
        assert change is not None
        watchers.tell(change)
        snapshot, update = drain(queue)
        assert snapshot is not None
        assert update is not None
        assert (snapshot.snapshot, [(i.name, i.epoch) for i in snapshot.changed]) == (True, [("p", 1)])
        assert (update.snapshot, [(i.name, i.epoch) for i in update.changed]) == (False, [("p", 2)])
        assert [(ref.name, ref.epoch) for ref in update.removed] == [("p", 1)]

    asyncio.run(body())


def test_a_snapshot_of_nothing_says_so_and_whether_more_may_come() -> None:
    async def body() -> None:
        queue = (watchers := watched()[1]).add()
        watchers.gathered()
        first, last = drain(queue)
        assert first == broker_pb2.DirectoryUpdate(snapshot=True, broker="b", gathering=True)
        assert last == broker_pb2.DirectoryUpdate(snapshot=True, broker="b")

    asyncio.run(body())


def test_a_watcher_that_has_left_is_told_nothing() -> None:
    async def body() -> None:
        _, watchers = watched()
        gone, here = watchers.add(), watchers.add()
        watchers.remove(gone)
        watchers.remove(gone)
        watchers.tell(Change(removed=(InstanceRef("p", 1),)))
        assert (gone.qsize(), here.qsize(), len(watchers)) == (1, 2, 1)

    asyncio.run(body())


@pytest.mark.parametrize("num_watchers", [1, 2])
def test_a_watcher_that_does_not_keep_up_is_ended_and_holds_up_nobody(num_watchers: int) -> None:
    async def body() -> None:
        _, watchers = watched()
        slow = [watchers.add() for _ in range(num_watchers)]
        quick = watchers.add()
        for _ in range(MAX_QUEUED + 10):
            watchers.tell(Change(removed=(InstanceRef("p", 1),)))
            drain(quick)
        assert len(watchers) == 1
        for queue in slow:
            updates = drain(queue)
            assert len(updates) <= MAX_QUEUED
            assert updates.index(None) == len(updates) - 1  # the end, after everything that came before it

    asyncio.run(body())


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (replace(instance_of("i", PREFILL), address=""), "no address"),
        (replace(instance_of("i", PREFILL), stages=()), "do not cover 4 layers"),
        (instance_of("i", PREFILL, num_layers=5), "do not cover 5 layers"),
        (instance_of("i", PREFILL, page_size=0), "a size below 1"),
    ],
)
def test_a_description_that_nobody_could_rely_on_is_named(wrong: InstanceInfo, problem: str) -> None:
    assert problem in (flaw(wrong) or "")


def test_a_sound_description_has_no_flaw() -> None:
    assert flaw(instance_of("i", DECODE, sizes=(3, 1))) is None
