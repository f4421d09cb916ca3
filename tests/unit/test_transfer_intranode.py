"""Mappings of peers' GPU memory, with a mapper that only counts."""

from __future__ import annotations

from collections import Counter

import pytest

from stagemesh.shared.errors import PeerLost
from stagemesh.shared.transfer.intranode import Mappings

PEER = "127.0.0.1:7"


class CountingMapper:
    """Opens a handle at an address of its own, and counts what is open there."""

    def __init__(self) -> None:
        self.open_at: Counter[int] = Counter()

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle)
        self.open_at[address] += 1
        return address

    def close(self, address: int) -> None:
        self.open_at[address] -= 1
        assert self.open_at[address] >= 0


def test_a_peer_that_is_gone_leaves_nothing_mapped() -> None:
    mapper = CountingMapper()
    mappings = Mappings(mapper)
    with mappings.used(PEER, b"\x05"):
        mapper.open(b"\x05")  # the engine's
    assert mappings.known == [PEER]
    assert mappings.drop(PEER)
    assert mapper.open_at == {5: 0}
    assert mappings.num_open == 0
    with pytest.raises(PeerLost), mappings.used(PEER, b"\x05"):
        pass
    mappings.close()
    assert mapper.open_at == {5: 0}


def test_a_mapping_stays_while_a_batch_is_copied_to_it() -> None:
    mapper = CountingMapper()
    mappings = Mappings(mapper)
    with mappings.used(PEER, b"\x05"):
        mapper.open(b"\x05")
        assert not mappings.drop(PEER)
        assert mapper.open_at == {5: 2}
    assert mappings.drop(PEER)


def test_the_end_closes_what_was_opened_here() -> None:
    mapper = CountingMapper()
    mappings = Mappings(mapper)
    for _ in range(2):
        with mappings.used(PEER, b"\x05"):
            pass
    mapper.open(b"\x05")
    mappings.close()
    assert mapper.open_at == {5: 1}  # the engine closes its own
