"""A chat template in a process of its own, which bounds its time and memory: a template comes with a model, is a
program, and may loop for ever or build gigabytes out of one message.

parent --template--> child: compiled --messages--> child: rendered ... --end of stdin--> gone

A line of JSON each way. The child limits itself, so that it ends also when its parent has been killed; one that has
gone over a limit is dead, and the next messages get another. It is started by `start` or the first messages.
"""

from __future__ import annotations

import json
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.model.chat_template import ChatTemplate, check_messages, check_syntax

CPU_LIMIT_S: Final = 2.0  # for one rendering, which takes milliseconds
MEMORY_LIMIT_BYTES: Final = 512 << 20  # beyond what the process has at its start
ANSWER_LIMIT_S: Final = 60.0  # of the clock: a host that has no CPU time to give
MAX_GROWTH: Final = 4  # characters of prompt for one of messages, beyond the following
FIXED_CHARACTERS: Final = 1 << 20


class ChatRenderer:
    """Renders one template. May be used by several threads: they wait for each other."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        """Raises Rejected for what is no template."""
        check_syntax(source)
        self._cpu_limit_s = cpu_limit_s
        self._template = {"source": source, "special_tokens": dict(special_tokens)}
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._end: Callable[[], object] | None = None  # also called when this object or the process ends

    def start(self) -> None:
        """Starts the process now, so that no request waits for it. Raises Rejected if the template cannot be
        compiled."""
        with self._lock:
            self._running()

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt. Raises Rejected if the messages have no role and content, the template refuses them, or it takes
        more time or memory than it may."""
        request = {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
        with self._lock:
            return str(self._ask(self._running(), "messages", request))

    def close(self) -> None:
        """Ends the process; more messages would start another."""
        with self._lock:
            self._drop()

    def _running(self) -> _Child:
        if self._child is None:
            child = self._child = _Child(self._cpu_limit_s)
            self._end = weakref.finalize(self, child.stop)
            self._ask(child, "model", self._template)
        return self._child

    def _ask(self, child: _Child, field: str, request: Mapping[str, Any]) -> object:
        reply = child.ask(request)
        if reply is None:
            self._drop()
            limits = f"{self._cpu_limit_s:g} s and {MEMORY_LIMIT_BYTES >> 20} MiB"
            raise Rejected(field, f"the model's chat template takes more than {limits}")
        if "rejected" in reply:
            if field == "model":  # it has no template, and would take the next messages for one
                self._drop()
            raise Rejected(*reply["rejected"])
        return reply["text"]

    def _drop(self) -> None:
        if self._end is not None:
            self._end()
        self._child = self._end = None


class _Child:
    """The process, from its start to its end."""

    def __init__(self, cpu_limit_s: float) -> None:
        command = [sys.executable, "-m", __name__, str(cpu_limit_s)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise Retryable(f"the process for the chat template cannot be started: {error}") from error

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """None if it has ended, or does not answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        poll = select.poll()  # takes any descriptor, which select does not
        poll.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if poll.poll(ANSWER_LIMIT_S * 1000) else b""
        reply: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return reply

    def stop(self) -> None:
        """Idempotent."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # half a request was left in it
                stream.close()
        self._process.wait()


# -- in the child --


def serve(cpu_limit_s: float) -> None:
    """Takes the template, then messages, until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which lets the requests of its clients end
        signal.signal(number, signal.SIG_IGN)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_LIMIT_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: ChatTemplate | None = None
    for line in sys.stdin.buffer:
        # its default action ends the process, in the middle of a loop of C too
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        request = json.loads(line)
        try:
            if template is None:
                template, text = ChatTemplate(**request), ""
            else:
                text = _render(template, request)
            reply: dict[str, Any] = {"text": text}
        except Rejected as error:
            reply = {"rejected": [error.field, str(error).removeprefix(f"{error.field}: ")]}
        sys.stdout.write(json.dumps(reply) + "\n")
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.flush()


def _render(template: ChatTemplate, request: Mapping[str, Any]) -> str:
    text = template.render(request["messages"], add_generation_prompt=request["add_generation_prompt"])
    size = sum(len(value) for message in request["messages"] for value in message.values())
    if len(text) > (limit := FIXED_CHARACTERS + MAX_GROWTH * size):
        raise Rejected("messages", f"the model's chat template makes {len(text)} characters of them, over {limit}")
    if any("\ud800" <= character <= "\udfff" for character in set(text)):
        raise Rejected("messages", "the model's chat template makes half a character of them")
    return text


if __name__ == "__main__":
    serve(float(sys.argv[1]))
