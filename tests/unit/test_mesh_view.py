"""The router's view of the directory: who can be talked to, and where a request goes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stagemesh.services.router.directory import MeshView
from stagemesh.services.router.prefixes import PrefixIndex
from stagemesh.shared.codec.mesh import instance_to_pb, ref_to_pb
from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import Retryable
from stagemesh.shared.pb import broker_pb2
from tests.support.instances import DECODE, PREFILL, instance_of

PROMPT = list(range(30))
INSTANCES = [instance_of("p1", PREFILL), instance_of("p2", PREFILL), instance_of("d", DECODE)]


class Session:
    """One that is up."""

    up, ended = True, False

    def close(self) -> None:
        self.up = False


class View:
    """A MeshView, fed by hand."""

    def __init__(self, prefixes: PrefixIndex | None = None) -> None:
        nobody = cast("Any", None)
        self.mesh = MeshView(nobody, "router", lambda *_: cast("Any", Session()), nobody, prefixes)
        self.report(*INSTANCES)

    def report(self, *instances: InstanceInfo, removed: tuple[InstanceRef, ...] = ()) -> None:
        gone, changed = map(ref_to_pb, removed), map(instance_to_pb, instances)
        self.mesh._take(broker_pb2.DirectoryUpdate(changed=changed, removed=gone))

    def send(self, token_ids: list[int] | None = None) -> str:
        """Where it goes."""
        prompt = PROMPT if token_ids is None else token_ids
        placement = self.mesh.place(prompt, 4)
        assert placement.decode is not None
        self.mesh.note_sent(placement.decode.ref, [])
        self.mesh.note_sent(placement.prefill.ref, prompt)
        return placement.prefill.ref.name


def test_a_request_goes_where_its_beginning_went_before() -> None:
    view = View()
    assert [view.send(), view.send([7] * 20), view.send(), view.send([7] * 20)] == ["p1", "p2", "p1", "p2"]


def test_a_queue_that_is_longer_than_what_is_cached_is_avoided() -> None:
    view = View()
    assert view.send() == "p1"
    view.report(instance_of("p1", PREFILL, load=InstanceLoad(waiting=1, waiting_tokens=29)))
    assert view.send() == "p2"


def test_a_report_counts_what_was_sent_before_it() -> None:
    view = View()
    assert [view.send([n] * length) for n, length in enumerate((20, 10, 9))] == ["p1", "p2", "p2"]
    view.report(*INSTANCES)
    assert view.send([9] * 20) == "p1"


def test_a_new_epoch_has_nothing_cached() -> None:
    view = View()
    view.send()
    later = instance_of("p1", PREFILL, epoch=2, load=InstanceLoad(waiting=1, waiting_tokens=1))
    view.report(later, removed=(INSTANCES[0].ref,))
    assert view.send() == "p2"
    assert view.mesh.session(later.ref).up
    with pytest.raises(Retryable, match="p1@1 has just gone"):
        view.mesh.session(INSTANCES[0].ref)


def test_an_instance_that_is_gone_is_forgotten() -> None:
    prefixes = PrefixIndex()
    view = View(prefixes)
    view.send()
    assert prefixes.num_pages == 7
    view.report(removed=(INSTANCES[0].ref,))
    assert prefixes.num_pages == 0
    assert view.send() == "p2"


def test_where_nothing_is_cached_only_the_queues_count() -> None:
    view = View(PrefixIndex(max_pages=0))
    assert [view.send() for _ in range(4)] == ["p1", "p2", "p1", "p2"]


def test_a_new_epoch_in_what_a_gathering_broker_shows_ends_the_session_with_the_old_one() -> None:
    view = View()
    (before,) = (s for ref, s in view.mesh._sessions.items() if ref.name == "d")
    later = instance_to_pb(instance_of("d", DECODE, epoch=2))
    view.mesh._take(broker_pb2.DirectoryUpdate(changed=[later], snapshot=True, gathering=True))
    assert not before.up
    assert sorted(str(ref) for ref in view.mesh._sessions) == ["d@2", "p1@1", "p2@1"]
