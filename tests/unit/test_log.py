"""Every line of a process says who speaks, and in the form that its reader wants."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Form, Log, choose_form, configure


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("stagemesh")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before[0], before[1], before[2]


def make(form: Form) -> tuple[Log, io.StringIO]:
    stream = io.StringIO()
    return configure("decode", "decode-0", 1, form=form, stream=stream), stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_a_line_of_json_with_identity_and_bound_fields() -> None:
    log, stream = make("json")
    log.bind(epoch=3).bind(request_id="r1", attempt=0).info("100% joined\nby hand", ticket_id="t", pages=None)
    [said] = lines(stream)
    assert said.pop("ts").endswith("Z")
    assert said == {
        "level": "info",
        "service": "decode",
        "instance": "decode-0",
        "pp_rank": 1,
        "epoch": 3,
        "request_id": "r1",
        "attempt": 0,
        "ticket_id": "t",
        "msg": "100% joined\nby hand",
    }


def test_an_error_carries_its_traceback() -> None:
    log, stream = make("json")
    try:
        raise ValueError("odd")
    except ValueError as error:
        log.error("failed", error=error, reason=error)
    [said] = lines(stream)
    assert said["exc"].endswith("ValueError: odd")
    assert said["reason"] == "odd"


def test_binding_leaves_the_log_it_came_from_as_it_was() -> None:
    log, stream = make("json")
    log.bind(epoch=3)
    log.info("plain")
    assert "epoch" not in lines(stream)[0]


def test_libraries_are_heard_from_warnings_on_and_debug_only_if_asked_for() -> None:
    log, stream = make("json")
    log.debug("too much")
    logging.getLogger("library").info("too much")
    logging.getLogger("library").warning("beware of %s", "it")
    assert [(said["msg"], said["service"]) for said in lines(stream)] == [("beware of it", "decode")]


def test_the_text_form_is_one_line_for_people() -> None:
    log, stream = make("text")
    log.warning("slow", lag_s=0.5)
    assert stream.getvalue()[13:] == "WARNING decode-0/1 slow lag_s=0.5\n"


def test_a_form_that_there_is_not_is_refused() -> None:
    with pytest.raises(Rejected, match="STAGEMESH_LOG: must be json or text, got 'odd'"):
        choose_form({"STAGEMESH_LOG": "odd"}, io.StringIO())


@pytest.mark.parametrize(("environ", "form"), [({}, "json"), ({"STAGEMESH_LOG": "text"}, "text")])
def test_without_a_terminal_the_form_is_json_unless_asked_otherwise(environ: dict[str, str], form: str) -> None:
    assert choose_form(environ, io.StringIO()) == form
