"""Values survive the wire, and what is cut short or unknown is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.codec.arrays import bytes_to_floats, floats_to_bytes, to_array, to_bytes, to_tuple
from stagemesh.shared.codec.commands import (
    command_from_pb,
    command_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from stagemesh.shared.codec.mesh import instance_from_pb, instance_to_pb, request_from_pb, request_to_pb
from stagemesh.shared.codec.session import output_from_pb, outputs_to_pb
from stagemesh.shared.core.commands import ROW_WIDTH, Command, Join, SendPlan, Step, TokenLogprobs
from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad, Manifest, RegionKey, Role, StageInfo
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.pb import instance_pb2, mesh_pb2, stage_pb2

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64, UINT32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
COUNT = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.lists(INT64, max_size=4).map(tuple)
REQUEST = st.builds(RequestRef, TEXT, UINT32)
FLOATS = st.floats(allow_nan=False)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=COUNT,
    temperature=FLOATS,
    top_k=COUNT,
    top_p=FLOATS,
    seed=UINT64,
    ignore_eos=st.booleans(),
    eos_token_ids=IDS,
    stop_token_ids=IDS,
    min_tokens=COUNT,
    min_p=FLOATS,
    logprobs=st.none() | st.integers(0, 20),
)
REGION = st.builds(RegionKey, TEXT, UINT64, UINT64)
LAYERS = st.builds(LayerRange, UINT32, UINT32)
STAGE = st.builds(StageInfo, UINT32, LAYERS, TEXT, REGION)
STAGES = st.lists(STAGE, max_size=2).map(tuple)
PLAN = st.builds(SendPlan, TEXT, UINT32, IDS, STAGES)
JOIN = st.builds(Join, COUNT, REQUEST, SAMPLING, st.none() | PLAN, COUNT)
LOGPROBS = st.lists(st.tuples(INT64, FLOATS), max_size=3).flatmap(
    lambda top: st.builds(TokenLogprobs, FLOATS, st.just(tuple(i for i, _ in top)), st.just(tuple(p for _, p in top)))
)
MANIFEST = st.builds(Manifest, UINT32, TEXT, TEXT, UINT32, UINT32, UINT32, UINT32, TEXT, UINT32, UINT32)
INSTANCE = st.builds(
    InstanceInfo,
    ref=st.builds(InstanceRef, TEXT, UINT64),
    role=st.sampled_from(Role),
    address=TEXT,
    manifest=MANIFEST,
    stages=STAGES,
    load=st.builds(InstanceLoad, UINT32, UINT32, UINT32, UINT64),
    accepting=st.booleans(),
)
OUTPUT = st.builds(
    SequenceOutput,
    request=REQUEST,
    token_ids=IDS,
    end=st.none() | st.sampled_from(SequenceEnd),
    error=TEXT,
    logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
)
calm = settings(max_examples=40, deadline=None)


def ints(*shape: int) -> st.SearchStrategy[Any]:
    size = math.prod(shape)
    return st.lists(INT64, min_size=size, max_size=size).map(lambda v: np.array(v, dtype=np.int64).reshape(shape))


@st.composite
def commands(draw: st.DrawFn) -> Command:
    step = None
    if draw(st.booleans()):
        rows, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 4))
        step = Step(draw(UINT64), draw(UINT32), draw(ints(rows, ROW_WIDTH)), draw(ints(tokens)))
    joins = tuple(draw(st.lists(JOIN, max_size=2)))
    drops, cancels, retracts, resumes = (draw(IDS) for _ in range(4))
    deltas = draw(ints(draw(st.integers(0, 4))))
    return Command(draw(UINT64), drops, cancels, joins, retracts, resumes, deltas, step)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@calm
@given(commands())
def test_a_command(command: Command) -> None:
    back = command_from_pb(over_the_wire(command_to_pb(command)))
    for name in ("number", "drops", "cancels", "joins", "retracts", "resumes"):
        assert getattr(back, name) == getattr(command, name)
    np.testing.assert_array_equal(back.page_deltas, command.page_deltas, strict=True)
    assert (back.step is None) == (command.step is None)
    if back.step is not None and command.step is not None:
        assert (back.step.number, back.step.microbatch) == (command.step.number, command.step.microbatch)
        np.testing.assert_array_equal(back.step.rows, command.step.rows, strict=True)
        np.testing.assert_array_equal(back.step.tokens, command.step.tokens, strict=True)


@calm
@given(SAMPLING)
def test_sampling_parameters(params: SamplingParams) -> None:
    assert sampling_from_pb(over_the_wire(sampling_to_pb(params))) == params


@calm
@given(INSTANCE)
def test_an_instance(info: InstanceInfo) -> None:
    assert instance_from_pb(over_the_wire(instance_to_pb(info))) == info


@calm
@given(st.lists(OUTPUT, max_size=3))
def test_outputs(outputs: list[SequenceOutput]) -> None:
    assert [output_from_pb(over_the_wire(message)) for message in outputs_to_pb(outputs)] == outputs


@given(REQUEST)
def test_a_request(ref: RequestRef) -> None:
    assert request_from_pb(over_the_wire(request_to_pb(ref))) == ref


@given(st.lists(INT64, max_size=8), st.lists(FLOATS, max_size=8))
def test_arrays(values: list[int], floats: list[float]) -> None:
    assert to_tuple(to_bytes(values)) == tuple(values)
    assert to_tuple(to_bytes(np.array(values, dtype=np.int64))) == tuple(values)
    assert to_array(to_bytes(values)).dtype == np.int64
    assert bytes_to_floats(floats_to_bytes(floats)) == tuple(floats)


def test_arrays_are_little_endian() -> None:
    assert to_bytes([1, -2]) == b"\x01" + b"\x00" * 7 + b"\xfe" + b"\xff" * 7


@given(st.binary(max_size=40))
def test_bytes_are_whole_numbers_or_refused(data: bytes) -> None:
    for read in (to_array, to_tuple, bytes_to_floats):
        if len(data) % 8 == 0:
            assert len(read(data)) == len(data) // 8
        else:
            with pytest.raises(ProtocolViolation, match=f"of {len(data)} bytes"):
                read(data)


STEP = stage_pb2.Step(number=7, rows=to_bytes(range(2 * ROW_WIDTH)), tokens=to_bytes([1, 2]))
WHOLE = stage_pb2.Command(
    number=3,
    drops=to_bytes([1]),
    cancels=to_bytes([2]),
    retracts=to_bytes([3]),
    resumes=to_bytes([4]),
    page_deltas=to_bytes([5, 1, 9]),
    joins=[stage_pb2.Join(handle=5, send=stage_pb2.SendPlan(pages=to_bytes([1, 2])))],
    step=STEP,
)
PLACES = ["drops", "cancels", "retracts", "resumes", "page_deltas", "step.rows", "step.tokens", "joins.send.pages"]


def cut(place: str, num_bytes: int) -> stage_pb2.Command:
    """WHOLE, with the end of one field missing."""
    command = stage_pb2.Command()
    command.CopyFrom(WHOLE)
    holder: Any = command
    *path, name = place.split(".")
    for part in path:
        holder = getattr(holder, part)
        holder = holder[0] if part == "joins" else holder
    setattr(holder, name, getattr(holder, name)[:-num_bytes])
    return command


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_bytes", [1, 4, 7])
def test_a_command_that_is_cut_short_is_refused(place: str, num_bytes: int) -> None:
    assert command_from_pb(WHOLE).number == 3
    with pytest.raises(ProtocolViolation, match="bytes"):
        command_from_pb(cut(place, num_bytes))


@pytest.mark.parametrize("num_numbers", [1, 5])
def test_rows_that_are_cut_short_are_refused(num_numbers: int) -> None:
    with pytest.raises(ProtocolViolation, match=r"step 7: .* no whole rows"):
        command_from_pb(cut("step.rows", 8 * num_numbers))
    assert command_from_pb(cut("step.rows", 8 * ROW_WIDTH)).step is not None


def test_log_probabilities_that_do_not_match_their_tokens_are_refused() -> None:
    message = logprobs_to_pb(TokenLogprobs(-1.0, (1, 2), (-1.0, -2.0)))
    message.top_ids = message.top_ids[:8]
    with pytest.raises(ProtocolViolation, match="2 log probabilities of 1 tokens"):
        logprobs_from_pb(message)


@pytest.mark.parametrize("role", [0, 77])
def test_an_unknown_role_is_refused(role: int) -> None:
    message = mesh_pb2.InstanceInfo(name="p")
    message.MergeFromString(mesh_pb2.InstanceInfo(role=role).SerializeToString())  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation, match=f"instance p: unknown role {role}"):
        instance_from_pb(message)


def test_an_unknown_end_is_refused() -> None:
    message = instance_pb2.SequenceOutput(end=77)  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation, match="unknown end of a sequence: 77"):
        output_from_pb(message)


def test_every_end_has_a_word_on_the_wire() -> None:
    ref = RequestRef("r", 0)
    ends = [message.end for message in outputs_to_pb(SequenceOutput(ref, end=end) for end in (None, *SequenceEnd))]
    assert sorted(ends) == sorted(instance_pb2.SequenceEnd.values())
