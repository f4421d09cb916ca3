"""GGUF files: header, metadata, tensor table and data, each damaged on its own, and all of it by flips."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.source import GgufSource
from tests.fuzz.gguf_bytes import INT32, UINT32, GgufParts, Value, parse_parts
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import INTEGERS, junk_text, mutate_bytes
from tests.fuzz.targets.model_dirs import check_names_tensor, load, say
from tests.fuzz.tiny import write_model
from tests.support.tiny_gguf import write_gguf

KINDS: Final = 14


def use(path: Path) -> None:
    source = GgufSource(path)
    assert len(source.fingerprint) == 32
    try:
        load(source)
    except Rejected as error:
        check_names_tensor(error)
        raise
    finally:
        say(source)


def open_bytes(folder: Path) -> Try:
    """Flips and cuts: most of the file is data, so half of them hit the header."""
    data = write_gguf(write_model(folder / "model"), folder / "original.gguf").read_bytes()
    header, path = parse_parts(data).header_bytes, folder / "damaged.gguf"

    def attempt(rng: Random) -> None:
        match rng.randrange(4):
            case 0:
                changed = data[: rng.randrange(len(data))]
            case 1:
                changed = mutate_bytes(rng, data)
            case 2:
                changed = rng.randbytes(rng.randrange(64)) if rng.random() < 0.2 else data[: rng.randrange(header)]
            case _:
                changed = mutate_bytes(rng, data[:header]) + data[header:]
        path.write_bytes(changed)
        use(path)

    return attempt


def open_fields(folder: Path) -> Try:
    """Metadata and tensor entries that are whole, and wrong."""
    parts = parse_parts(write_gguf(write_model(folder / "model"), folder / "original.gguf").read_bytes())
    path = folder / "damaged.gguf"

    def attempt(rng: Random) -> None:
        changed = parts.copy()
        for _ in range(rng.choice((1, 1, 2, 4))):
            (_wrong_metadata if rng.random() < 0.7 else _wrong_tensor)(rng, changed)
        path.write_bytes(changed.to_bytes(alignment=32))
        use(path)

    return attempt


def _wrong_metadata(rng: Random, parts: GgufParts) -> None:
    key = rng.choice([*parts.metadata, "general.alignment", "tokenizer.ggml.scores", "llama.rope.scaling.type"])
    match rng.randrange(5):
        case 0:
            parts.metadata.pop(key, None)
        case 1:
            parts.metadata[key] = Value.text(junk_text(rng))
        case 2:
            parts.metadata[key] = Value.number(UINT32, rng.choice(INTEGERS) & 0xFFFFFFFF)
        case 3:
            parts.metadata[key] = _array(rng)
        case _:
            changed = parts.metadata.get("tokenizer.ggml.model")
            assert changed is None or isinstance(changed, Value)
            parts.metadata["tokenizer.ggml.model"] = Value.text(rng.choice(("llama", "gpt2", "bert")))
            parts.metadata["tokenizer.ggml.scores"] = Value.floats([rng.random() for _ in range(rng.choice((320, 3)))])


def _array(rng: Random) -> Value:
    match rng.randrange(5):
        case 0:
            return Value.texts([junk_text(rng) for _ in range(rng.choice((0, 1, 5, 320)))])
        case 1:
            return Value.numbers(INT32, [rng.choice(INTEGERS) % (1 << 31) for _ in range(rng.choice((0, 1, 320)))])
        case 2:
            return Value.nested(rng.choice((1, 3, 900, 20_000)))
        case 3:
            return Value.numbers_said_to_be(rng.choice(INTEGERS) % (1 << 64))
        case _:
            return Value.floats([rng.random() for _ in range(320)])


def _wrong_tensor(rng: Random, parts: GgufParts) -> None:
    name = rng.choice(list(parts.tensors))
    entry: dict[str, Any] = parts.tensors[name]
    match rng.randrange(5):
        case 0:
            del parts.tensors[name]
        case 1:
            sizes = (0, 1, 16, 24, 320, 1 << 32, (1 << 64) - 1)
            entry["shape"] = rng.choices(sizes, k=rng.choice((0, 1, 2, 3, 60)))
        case 2:
            entry["kind"] = rng.choice((*range(45), 1 << 31))
        case 3:
            entry["offset"] = rng.choice((0, 4, 31, 1 << 20, 1 << 63, (1 << 64) - 1))
        case _:
            parts.tensors[rng.choice(("rope_freqs.weight", "blk.0.attn_q.bias", "output.weight"))] = dict(entry)


TARGETS: Final = (Target("gguf-bytes", 12, open_bytes), Target("gguf-fields", 12, open_fields))
