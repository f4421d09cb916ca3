"""Which pair of instances a request gets: a function of the directory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.services.router.placement import Drained, Placement, Sent, max_request_tokens, place
from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad, Manifest, Role, mismatch
from stagemesh.shared.errors import Retryable
from tests.support.instances import DECODE, MANIFEST, PREFILL, instance_of

LOADS = st.builds(
    InstanceLoad,
    waiting=st.integers(0, 3),
    running=st.integers(0, 3),
    pages_free=st.integers(0, 16),
    waiting_tokens=st.integers(0, 100),
)
INSTANCES = st.lists(
    st.builds(
        instance_of,
        st.sampled_from("abcdef"),
        st.sampled_from([PREFILL, DECODE]),
        load=LOADS,
        accepting=st.booleans(),
        num_pages=st.sampled_from([2, 16]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=6,
    unique_by=lambda info: info.ref.name,
)


NAMES = st.sampled_from("abcdef")


def queued_at(info: InstanceInfo, sent: dict[str, Sent]) -> int:
    return info.load.waiting + info.load.running + sent.get(info.ref.name, Sent()).requests


def cost_of(info: InstanceInfo, prompt: int, sent: dict[str, Sent], cached: dict[str, int]) -> int:
    """Tokens that are computed until the prompt is through."""
    name = info.ref.name
    return info.load.waiting_tokens + sent.get(name, Sent()).tokens + prompt - cached.get(name, 0)


def candidates(instances: list[InstanceInfo], prompt: int, new: int) -> list[tuple[InstanceInfo, InstanceInfo | None]]:
    """Every placement that is possible at all."""

    def able(role: Role, tokens: int) -> list[InstanceInfo]:
        return [i for i in instances if i.role is role and i.accepting and tokens <= i.manifest.num_pages * 4]

    prefills = able(PREFILL, prompt)
    if new == 1:
        return [(prefill, None) for prefill in prefills]
    decodes = able(DECODE, prompt + new - 1)
    return [(p, d) for p in prefills for d in decodes if mismatch(p.manifest, d.manifest) is None]


@given(
    INSTANCES,
    st.integers(1, 60),
    st.integers(1, 30),
    st.dictionaries(NAMES, st.builds(Sent, st.integers(0, 3), st.integers(0, 50))),
    st.dictionaries(NAMES, st.integers(0, 60)),
)
def test_a_placement_is_possible_and_none_is_better(
    instances: list[InstanceInfo], prompt: int, new: int, sent: dict[str, Sent], cached: dict[str, int]
) -> None:
    possible = candidates(instances, prompt, new)
    try:
        chosen = place(instances, prompt_tokens=prompt, max_tokens=new, sent=sent, cached=cached)
    except Retryable:
        assert not possible
        return
    assert (chosen.prefill, chosen.decode) in possible
    costs = [cost_of(prefill, prompt, sent, cached) for prefill, _ in possible]
    assert cost_of(chosen.prefill, prompt, sent, cached) == min(costs)
    mates = [decode for prefill, decode in possible if prefill == chosen.prefill and decode is not None]
    if chosen.decode is not None:
        assert queued_at(chosen.decode, sent) == min(queued_at(decode, sent) for decode in mates)


@given(INSTANCES, st.integers(1, 60), st.integers(1, 30), st.data())
def test_the_order_of_the_directory_does_not_matter(
    instances: list[InstanceInfo], prompt: int, new: int, data: st.DataObject
) -> None:
    def outcome(order: list[InstanceInfo]) -> Placement | None:
        try:
            return place(order, prompt_tokens=prompt, max_tokens=new)
        except Retryable:
            return None

    assert outcome(instances) == outcome(data.draw(st.permutations(instances)))


def test_requests_just_sent_count_as_load() -> None:
    instances = [instance_of(name, PREFILL) for name in ("p1", "p2")] + [instance_of(n, DECODE) for n in ("d1", "d2")]
    sent: dict[str, Sent] = {}
    pairs = []
    for _ in range(4):
        placement = place(instances, prompt_tokens=4, max_tokens=4, sent=sent)
        assert placement.decode is not None
        names = placement.prefill.ref.name, placement.decode.ref.name
        pairs.append(names)
        for name in names:
            sent[name] = Sent(sent.get(name, Sent()).requests + 1)
    assert pairs == [("p1", "d1"), ("p2", "d2"), ("p1", "d1"), ("p2", "d2")]


def test_tokens_decide_between_prefill_instances_and_pages_between_equally_busy_decode_instances() -> None:
    instances = [
        instance_of("p1", PREFILL, load=InstanceLoad(waiting=1, waiting_tokens=60)),
        instance_of("p2", PREFILL, load=InstanceLoad(waiting=2, waiting_tokens=10)),
        instance_of("d1", DECODE, load=InstanceLoad(running=1, pages_free=3)),
        instance_of("d2", DECODE, load=InstanceLoad(running=1, pages_free=9)),
    ]
    placement = place(instances, prompt_tokens=4, max_tokens=4)
    assert placement.decode is not None
    assert (placement.prefill.ref.name, placement.decode.ref.name) == ("p2", "d2")


@pytest.mark.parametrize(("queued", "chosen"), [(0, "p1"), (31, "p1"), (33, "p2")])
def test_a_cached_prefix_is_weighed_against_the_queue_before_it(queued: int, chosen: str) -> None:
    instances = [
        instance_of("p1", PREFILL, load=InstanceLoad(waiting=3, waiting_tokens=queued)),
        instance_of("p2", PREFILL),
    ]
    assert place(instances, prompt_tokens=40, max_tokens=1, cached={"p1": 32}).prefill.ref.name == chosen


def test_one_token_needs_no_decode_instance() -> None:
    prefill = instance_of("p", PREFILL)
    assert place([prefill], prompt_tokens=4, max_tokens=1) == Placement(prefill, None)


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        pytest.param([], "no prefill instance", id="nobody"),
        pytest.param([instance_of("d", DECODE)], "no prefill instance", id="no prefill"),
        pytest.param([instance_of("p", PREFILL, accepting=False)], "no prefill instance", id="drains"),
        pytest.param([instance_of("p", PREFILL)], "no decode instance", id="no decode"),
        pytest.param(
            [instance_of("p", PREFILL), instance_of("d", DECODE, num_pages=1)], "no decode instance", id="too small"
        ),
        pytest.param(
            [instance_of("p", PREFILL), instance_of("d", DECODE, dtype="bfloat16")],
            "fit together: dtype: 'float32' against 'bfloat16'",
            id="unlike",
        ),
    ],
)
def test_where_there_is_no_pair_the_error_says_what_is_missing(instances: list[InstanceInfo], message: str) -> None:
    with pytest.raises(Retryable, match=message):
        place(instances, prompt_tokens=4, max_tokens=4)


def test_a_role_of_which_all_are_drained_is_told_from_one_that_is_not_there() -> None:
    prefills = [instance_of(name, PREFILL, accepting=False) for name in ("p", "q")]
    with pytest.raises(Drained, match="no prefill instance takes new requests"):
        place(prefills, prompt_tokens=4, max_tokens=4)
    taken_back = instance_of("p", PREFILL)
    with pytest.raises(Drained, match="no decode instance takes new requests"):
        place([taken_back, instance_of("d", DECODE, accepting=False)], prompt_tokens=4, max_tokens=4)
    with pytest.raises(Retryable) as nobody:
        place([taken_back, prefills[1]], prompt_tokens=4, max_tokens=4)
    assert not isinstance(nobody.value, Drained)


def test_a_request_fits_to_the_last_slot() -> None:
    instances = [instance_of("p", PREFILL), instance_of("d", DECODE, num_pages=2)]
    assert place(instances, prompt_tokens=4, max_tokens=5).decode is not None  # the last token's KV is never held
    with pytest.raises(Retryable, match="no decode instance"):
        place(instances, prompt_tokens=4, max_tokens=6)


PAIRED = [name for name in MANIFEST if name not in ("num_pages", "max_context")]


@pytest.mark.parametrize("name", PAIRED)
def test_a_mismatch_names_the_field_and_both_values(name: str) -> None:
    one = Manifest(**MANIFEST)
    other = Manifest(**{**MANIFEST, name: MANIFEST[name] * 2})
    assert mismatch(one, other) == f"{name}: {MANIFEST[name]!r} against {MANIFEST[name] * 2!r}"


@pytest.mark.parametrize("name", ["num_pages", "max_context"])
def test_pool_and_context_may_differ(name: str) -> None:
    assert mismatch(Manifest(**MANIFEST), Manifest(**{**MANIFEST, name: 7})) is None


def test_the_largest_request_is_that_of_the_largest_decode_instance() -> None:
    instances = [
        instance_of("p", PREFILL, num_pages=99, max_context=999),
        instance_of("d1", DECODE, num_pages=4, max_context=64),
        instance_of("d2", DECODE, num_pages=99, max_context=20),
    ]
    assert max_request_tokens(instances) == 20
    assert max_request_tokens(instances[:1]) is None


def test_instances_to_avoid_are_taken_where_there_is_no_other() -> None:
    busy = InstanceLoad(waiting=3, waiting_tokens=90)
    idle = [instance_of("p0", PREFILL), instance_of("d0", DECODE)]
    others = [instance_of("p1", PREFILL, load=busy), instance_of("d1", DECODE, load=busy)]
    avoid = {info.ref for info in idle}
    placed = place([*idle, *others], prompt_tokens=4, max_tokens=4, avoid=avoid)
    assert placed == Placement(*others)
    placed = place([*idle, others[0]], prompt_tokens=4, max_tokens=4, avoid=avoid)
    assert placed == Placement(others[0], idle[1])
