"""The reference of the config says what the classes say, and the committed one is today's."""

from __future__ import annotations

import tomllib

import msgspec

from stagemesh.shared.config import Config
from stagemesh.shared.config.reference import comments, markdown, sections, toml
from tests.support.mesh import ROOT

COMMITTED = ROOT / "deploy" / "config.md"


def test_the_committed_reference_is_what_is_made_now() -> None:
    assert COMMITTED.read_text() == markdown(), "run: stagemesh config reference > deploy/config.md"


def test_every_key_of_every_section_is_in_both_forms() -> None:
    found = {section.title: {key.name for key in section.keys} for section in sections()}
    fields = msgspec.structs.fields(Config)
    assert len(found) == len(fields)
    for field in fields[:-1]:
        assert found[f"[{field.name}]"] == {key.name for key in msgspec.structs.fields(field.type)}
    text = markdown()
    for title, names in found.items():
        for name in names:
            assert f"| `{name}` |" in text, title
            assert f"\n# {name} =" in toml(), title


def test_a_key_has_its_type_its_range_its_default_and_its_comment() -> None:
    text = markdown()
    assert "| `page_size` | whole number, at least 1, at most 1024 | `16` | tokens |" in text
    assert "| `seed` | whole number, at least 0, at most 2^63 - 1 | `0` | |" in text
    assert "| `pool_bytes` | whole number, at least 2^20, at most 2^42 | `536870912` | |" in text
    assert "| `stages` | list of: text | required | |" in text
    assert "| `memory_fraction` | number, above 0, at most 0.98 | `0.45` | |" in text


def test_the_form_to_fill_in_is_toml() -> None:
    assert tomllib.loads(toml()).keys() == {"instance", *_names()}


def _names() -> list[str]:
    return [field.name for field in msgspec.structs.fields(Config) if field.name != "instances"]


def test_comments_above_and_behind_a_field_are_its_note_and_those_elsewhere_are_not() -> None:
    source = (
        "class A(Struct):\n"
        '    """Text # no comment."""\n'
        "\n"
        "    # of nobody\n"
        "\n"
        "    # one line\n"
        "    # and two\n"
        '    one: str = "#none"  # and behind\n'
        "    two: int = 2\n"
        "\n"
        "    def method(self) -> None:  # no field\n"
        "        pass\n"
    )
    assert comments(source) == {"one": "one line and two and behind"}
