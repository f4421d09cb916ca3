"""Stop strings over text that comes in pieces: never shown in part, found wherever they begin."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stagemesh.services.router.stop import StopMatcher

alphabet = st.sampled_from("abß🗼 ")
texts = st.text(alphabet, max_size=30)
stops = st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=64)


def cut(text: str, cuts: list[int]) -> list[str]:
    """`text` in pieces that end at `cuts`."""
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def first_match(pieces: list[str], wanted: list[str]) -> tuple[int, str] | None:
    """The match that a reader of whole prefixes sees first: after the fewest pieces, then at the lowest place."""
    seen = ""
    for piece in pieces:
        seen += piece
        found = [(at, len(stop), stop) for stop in wanted if (at := seen.find(stop)) >= 0]
        if found:
            return min(found)[0], min(found)[2]
    return None


@given(texts, stops, st.lists(st.integers(0, 100)), st.booleans())
def test_what_is_shown_is_the_text_up_to_the_match(
    text: str, wanted: list[str], cuts: list[int], include: bool
) -> None:
    pieces = cut(text, cuts)
    matcher, shown = StopMatcher(wanted, include=include), ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is None:
            assert not any(stop in shown for stop in wanted)
    match = first_match(pieces, wanted)
    if match is None:
        assert shown + matcher.finish() == text
        assert matcher.matched is None
        return
    at, stop = match
    assert matcher.matched == stop
    assert shown == (text[: at + len(stop)] if include else text[:at])
    assert matcher.push("more") == ""


def test_a_beginning_that_comes_to_nothing_is_shown_in_full() -> None:
    matcher = StopMatcher(["STOP", "TOES"])
    assert [matcher.push(piece) for piece in ("a S", "TO", "E ", "S", "T")] == ["a ", "", "STOE ", "", ""]
    assert matcher.finish() == "ST"


def test_of_two_stop_strings_the_one_that_begins_first_counts() -> None:
    matcher = StopMatcher(["world", "o w"], include=True)
    assert matcher.push("hello world") == "hello w"
    assert matcher.matched == "o w"
