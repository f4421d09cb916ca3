"""Chat messages to prompt text, by the model's own Jinja template, in a sandbox.

The sandbox keeps a template from our objects, not from our time and memory: `ChatRenderer` runs it in a process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stagemesh.shared.errors import Rejected

MAX_SOURCE_BYTES: Final = 1 << 20


class GenerationBlock(Extension):
    """`{% generation %}` marks what training learns from; in a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class types it as a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def check_syntax(source: str) -> None:
    """Raises Rejected for what is no template. Runs nothing of it: compiling would, where an expression is constant."""
    if (size := len(source.encode(errors="replace"))) > MAX_SOURCE_BYTES:
        raise Rejected("model", f"the chat template has {size} bytes, at most {MAX_SOURCE_BYTES} are taken")
    try:
        _environment().parse(source)
    except (TemplateError, RecursionError, ValueError) as error:
        raise _broken(error) from error


class ChatTemplate:
    """One compiled template. `special_tokens` are its variables bos_token, eos_token and the like."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        check_syntax(source)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # constant expressions are computed here, and fail in ways of their own
            raise _broken(error) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt. Raises Rejected if the messages have no role and content or the template refuses them."""
        checked = check_messages(messages)
        try:
            return self._template.render(
                messages=checked,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template may do whatever Python's own values can
            reason = str(error) or type(error).__name__
            raise Rejected("messages", f"the model's chat template refuses them: {reason}") from error


def _broken(error: Exception) -> Rejected:
    return Rejected("model", f"the chat template is broken: {str(error) or type(error).__name__}")


def check_messages(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Copies of them. Raises Rejected if one has no role or content."""
    if not messages:
        raise Rejected("messages", "must not be empty")
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise Rejected("messages", f"message {number} must have a text {key!r}")
    return [dict(message) for message in messages]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As it is, not escaped for HTML as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
