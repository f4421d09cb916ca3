"""A chat template is a program that comes with a model: it ends, in time and memory, whatever it does."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.chat_renderer import ChatRenderer
from stagemesh.shared.model.chat_template import MAX_SOURCE_BYTES

MESSAGES = [{"role": "user", "content": "hello"}]
LIMIT_S = 0.5
PLAIN = "{{ messages[0].content }}"
SWITCHED = "{% if messages[0].role == 'bad' %}BAD{% endif %}{{ messages[0].content }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
LONG = "{% for i in range(90000) %}{{ messages[0].content }}{{ 'x' * 100 }}{% endfor %}"


def render(renderer: ChatRenderer, role: str = "user") -> str:
    return renderer.render([{"role": role, "content": "hello"}], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (ENDLESS, "takes more than 0.5 s and 512 MiB"),
        (HUGE, "MemoryError|takes more than"),
        (LONG, "makes 9450005 characters of them, over"),
        ("{{ '\\ud800' }}", "half a character"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ 9 ** (9 ** (messages[0].content | length + 4)) }}", "takes more than 0.5 s"),
    ],
    ids=["endless", "huge", "long", "half", "recursive", "power"],
)
def test_messages_over_a_limit_are_refused_and_the_next_ones_rendered(bad: str, problem: str) -> None:
    renderer = ChatRenderer(SWITCHED.replace("BAD", bad), {}, cpu_limit_s=LIMIT_S)
    assert render(renderer) == "hello"
    with pytest.raises(Rejected, match=problem) as caught:
        render(renderer, "bad")
    assert caught.value.field == "messages"
    assert render(renderer) == "hello"
    renderer.close()


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 11 }}", "{{ 9 ** (9 ** 9) }}", "{{ 1 / 0 }}{% include 'x' %}"])
def test_what_is_computed_when_a_template_is_compiled_is_bounded_too(source: str) -> None:
    renderer = ChatRenderer(source, {}, cpu_limit_s=LIMIT_S)
    with pytest.raises(Rejected, match="chat template"):
        render(renderer)
    renderer.close()


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000, "a" * (MAX_SOURCE_BYTES + 1)])
def test_what_is_no_template_starts_no_process(source: str) -> None:
    with pytest.raises(Rejected, match="chat template"):
        ChatRenderer(source, {})


def test_threads_share_one_process() -> None:
    renderer = ChatRenderer(PLAIN, {})
    renderer.start()
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(render(renderer))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["hello"] * 8
    assert len(children()) == 1
    renderer.close()
    assert not children()


def test_a_process_that_was_killed_is_started_again() -> None:
    renderer = ChatRenderer(PLAIN, {})
    renderer.start()
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Rejected, match="takes more than"):
        render(renderer)
    assert render(renderer) == "hello"
    renderer.close()


def test_it_ends_with_its_owner() -> None:
    renderer = ChatRenderer(PLAIN, {})
    assert render(renderer) == "hello"
    assert len(children()) == 1
    del renderer
    assert not children()


def children() -> list[int]:
    """Of this process, by their command."""
    pids = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = [int(pid) for path in pids for pid in path.read_text().split()]
    return [pid for pid in found if b"chat_renderer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
