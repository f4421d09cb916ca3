"""Model directories: each file of one in turn is damaged. Weights that cannot be read are named by their tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import ARCHITECTURES
from stagemesh.shared.model.source import ModelSource, open_model
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import json_bytes, junk, junk_text, mutate_bytes, mutate_json
from tests.fuzz.tiny import SHARD, write_model

MESSAGES: Final = [{"role": "user", "content": "hello"}]


def load(source: ModelSource) -> None:
    """All that a stage of the first layer that is also the last does. Raises Rejected naming the tensor."""
    source.load(LayerRange(0, 1), torch.float32, first=True, last=True)


def check_names_tensor(error: Rejected) -> None:
    """Of weights that cannot be read."""
    assert "tensor " in str(error), f"names no tensor: {error}"


def use(source: ModelSource, *, weights: bool) -> None:
    """What a router and a stage do with a model."""
    config = source.config
    config.describe()
    assert config.head_layers > 0
    source.weight_bytes(LayerRange(0, 1), torch.float32, first=True, last=True)
    if weights:
        assert len(source.fingerprint) == 32
        load(source)


def say(source: ModelSource) -> None:
    """Text there and back."""
    tokenizer = source.tokenizer()
    ids = tokenizer.encode("The river, naïve 🌊\n 12")
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    for token_id in [*ids, 0, 1, 300, 319]:
        stream.push(token_id)
    stream.finish()
    if tokenizer.has_chat_template:
        tokenizer.apply_chat(MESSAGES)


def damaged(
    name: str, damage: Callable[[Random, Path], bytes], check: Callable[[ModelSource], None]
) -> Callable[[Path], Try]:
    """A target that replaces the file `name` of a model by what `damage` makes of it."""

    def prepare(folder: Path) -> Try:
        original = write_model(folder / "original")
        model = write_model(folder / "model")

        def attempt(rng: Random) -> None:
            (model / name).write_bytes(damage(rng, original / name))
            check(open_model(str(model)))

        return attempt

    return prepare


SMALL_PARTS: Final = ("pre_tokenizer", "decoder", "normalizer", "post_processor", "added_tokens")
DTYPES: Final = ["F64", "F32", "F16", "BF16", "I8", "U8", "BOOL", "I64", "F8_E4M3", "F8_E5M2", "U16", "C64", "F4", "?"]


def _json(rng: Random, path: Path) -> bytes:
    return json_bytes(rng, json.loads(path.read_text()))


def _config(rng: Random, path: Path) -> bytes:
    """Of any architecture."""
    value = {**json.loads(path.read_text()), "model_type": rng.choice(ARCHITECTURES)}
    if rng.random() < 0.3:
        value |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_local_experts": 4}
        value |= {"use_sliding_window": True, "max_window_layers": 0, "mlp_only_layers": [], "sliding_window": 64}
    if rng.random() < 0.3:
        value["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "mscale": 1.0, "truncate": True}
    return json_bytes(rng, value)


def _tokenizer(rng: Random, path: Path) -> bytes:
    """Mostly beside the vocabulary, which is most of the file."""
    value = json.loads(path.read_text())
    if rng.random() < 0.3:
        return json_bytes(rng, value)
    if rng.random() < 0.3:
        part = rng.choice(("pre_tokenizer", "decoder", "normalizer", "post_processor", "truncation", "padding"))
        value[part] = rng.choice(PARTS)
    whole, model = dict(value), dict(value["model"])
    small = {key: whole.pop(key) for key in SMALL_PARTS}
    inner = {key: model.pop(key) for key in list(model) if key not in ("vocab", "merges")}
    changed = mutate_json(rng, {"parts": small, "model": inner})
    parts = changed.get("parts") if isinstance(changed, dict) else changed
    inner_changed = changed.get("model", {}) if isinstance(changed, dict) else {}
    whole |= parts if isinstance(parts, dict) else {"decoder": parts}
    whole["model"] = {**model, **inner_changed} if isinstance(inner_changed, dict) else inner_changed
    return json.dumps(whole).encode()


PARTS: Final[tuple[Any, ...]] = (
    {"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Removed", "invert": True},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
    {"type": "Replace", "pattern": {"Regex": "(?=)"}, "content": "x"},
    {"type": "Strip", "content": " ", "start": 1 << 40, "stop": 0},
    {"type": "ByteFallback"},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5},
    {
        "strategy": {"Fixed": 1 << 40},
        "direction": "Right",
        "pad_to_multiple_of": 0,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "",
    },
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
)


def _index(rng: Random, path: Path) -> bytes:
    value = json.loads(path.read_text())
    if rng.random() < 0.3:
        files = value["weight_map"]
        for name in rng.sample(list(files), 3):
            files[name] = rng.choice((*ELSEWHERE, junk_text(rng), junk(rng)))
    return json_bytes(rng, value) if rng.random() < 0.6 else json.dumps(value).encode()


ELSEWHERE: Final = (
    *("/dev/zero", "/dev/stdin", "../original/config.json", "", ".", "..", "/"),
    *("config.json", "no.safetensors", "a\0b"),
)


def _safetensors(rng: Random, path: Path) -> bytes:
    """Cut somewhere, with a wrong header, or with flips anywhere."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    match rng.randrange(6):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            return mutate_bytes(rng, data)
        case 2:
            return mutate_bytes(rng, data[: 8 + size]) + body
        case 3:
            size = rng.choice((0, 1, size - 1, size + 1, len(data), 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1))
            return struct.pack("<Q", size) + data[8:]
        case _:
            changed = json.dumps(_tensor_entries(rng, header)).encode()
            return struct.pack("<Q", len(changed)) + changed + body


def _tensor_entries(rng: Random, header: dict[str, Any]) -> Any:
    if rng.random() < 0.4:
        return mutate_json(rng, header)
    for name in rng.sample([name for name in header if name != "__metadata__"], 3):
        match rng.randrange(3):
            case 0:
                header[name]["dtype"] = rng.choice(DTYPES)
            case 1:
                sizes = [rng.choice((0, 1, 16, 1 << 32)) for _ in range(3)]
                header[name]["shape"] = junk(rng) if rng.random() < 0.5 else sizes
            case _:
                start, end = header[name]["data_offsets"]
                header[name]["data_offsets"] = [start + rng.choice((0, 4, -4)), end + rng.choice((0, 4, -4, 1 << 40))]
    return header


def _load_names_tensors(source: ModelSource) -> None:
    try:
        load(source)
    except Rejected as error:
        check_names_tensor(error)
        raise
    assert len(source.fingerprint) == 32


TARGETS: Final = (
    Target("model-config", 14, damaged("config.json", _config, lambda source: use(source, weights=False))),
    Target("model-generation", 2, damaged("generation_config.json", _json, lambda source: use(source, weights=False))),
    Target("tokenizer", 6, damaged("tokenizer.json", _tokenizer, say)),
    Target("tokenizer-config", 4, damaged("tokenizer_config.json", _json, say)),
    Target("safetensors", 8, damaged(SHARD.format(1), _safetensors, _load_names_tensors)),
    Target("safetensors-index", 4, damaged("model.safetensors.index.json", _index, lambda s: use(s, weights=True))),
)
