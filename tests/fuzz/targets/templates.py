"""Chat templates: real ones damaged, and pieces that loop, grow and recurse, put together at random. One is refused
when it is opened or when it is used, and takes no more than its time and memory either way."""

from __future__ import annotations

import resource
from pathlib import Path
from random import Random
from typing import Final

from stagemesh.shared.model.chat_renderer import ChatRenderer
from stagemesh.shared.model.chat_template import check_syntax
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import junk_text, mutate_bytes
from tests.support.tiny_models import CHAT_TEMPLATE

SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>"}
MAX_RSS_KIB: Final = 700 << 10
SEEDS: Final = (
    CHAT_TEMPLATE,
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{%- macro say(m) %}[{{ m.role | upper }}]{{ m.content | tojson }}{% endmacro %}{{ say(messages[0]) }}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}{{ strftime_now('%d %b %Y') }}",
)
PIECES: Final = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999999) %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[0]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ messages | batch(1) | list | tojson(indent=100000000) }}",
    "{{ lipsum(n=1000000) }}",
    "{{ messages | map('center', 1000000000) | list }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception('a' * 100000) }}",
    "{{ strftime_now('%' * 1000) }}",
    "{{ 1 / 0 }}",
    "{{ undefined.x.y }}",
    "{{ messages | sum }}",
    "{{ '\\ud800' }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% break %}",
    "{% set x = '(' * 10000 %}",
    "{{ dict(a=1) | dictsort | string | length }}",
    "{{ '" + "a" * 200 + "!' | wordwrap(1) | urlize }}",
)
NESTED: Final = (
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{{ 1" + "+1" * 9000 + " }}",
)


def template_of(rng: Random) -> str:
    match rng.randrange(8):
        case 0:
            return rng.choice(PIECES)
        case 1:
            return rng.choice(NESTED) if rng.random() < 0.2 else junk_text(rng)
        case 2:
            return "".join(rng.choices((*PIECES, *SEEDS), k=rng.randrange(1, 4)))
        case _:
            return mutate_bytes(rng, rng.choice((*SEEDS, *SEEDS, *PIECES)).encode()).decode(errors="replace")


def messages_of(rng: Random) -> list[dict[str, str]]:
    return [{"role": rng.choice(("user", "x")), "content": junk_text(rng)} for _ in range(rng.randrange(1, 4))]


def open_renderings(folder: Path) -> Try:
    def attempt(rng: Random) -> None:
        renderer = ChatRenderer(template_of(rng), SPECIAL, cpu_limit_s=0.5)
        try:
            renderer.render(messages_of(rng), add_generation_prompt=True).encode()
        finally:
            renderer.close()
            held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            assert held < MAX_RSS_KIB, f"{held} KiB"

    return attempt


def open_syntax(folder: Path) -> Try:
    return lambda rng: check_syntax(template_of(rng))


TARGETS: Final = (Target("template-syntax", 12, open_syntax), Target("template-render", 1, open_renderings))
