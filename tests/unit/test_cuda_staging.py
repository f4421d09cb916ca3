"""What a step sends to its GPU lies in its slot, each part beside the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.model.cuda.staging import Staging

PARTS = st.lists(st.tuples(st.sampled_from([np.int32, np.int64]), st.integers(0, 300)), max_size=8)


@given(PARTS, st.integers(0, 5))
def test_all_parts_of_a_step_are_there_at_once(parts: list[tuple[type, int]], number: int) -> None:
    stage = Staging(3, 8 * 8 * 300 + 8 * 256 + 4, pin=False).begin(number)
    rng = np.random.default_rng(1)
    values: list[npt.NDArray[Any]] = [rng.integers(0, 1 << 30, count).astype(kind) for kind, count in parts]
    placed = [stage.pinned(each) for each in values]
    for each, tensor in zip(values, placed, strict=True):
        assert tensor.numpy().dtype == each.dtype
        assert tensor.tolist() == each.tolist()


def test_steps_of_other_slots_leave_it_alone_and_one_of_the_same_begins_anew() -> None:
    staging = Staging(2, 1000, pin=False)
    first = staging.begin(4).pinned(np.arange(100))
    staging.begin(5).pinned(np.zeros(100, dtype=np.int64))
    assert first.tolist() == list(range(100))
    again = staging.begin(6).pinned(np.full(100, 7))
    assert again.data_ptr() == first.data_ptr()


@pytest.mark.parametrize("num_bytes", [1, 4, 257])
def test_a_slot_begins_where_any_part_may_lie(num_bytes: int) -> None:
    staging = Staging(3, num_bytes, pin=False)
    for number in range(3):
        assert staging.begin(number).pinned(np.arange(16)).tolist() == list(range(16))
