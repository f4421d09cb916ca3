"""Model files that are damaged on purpose: refused by name of the file and of what is wrong in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.gguf_file import GgufFile
from stagemesh.shared.model.source import open_model
from tests.fuzz.gguf_bytes import INT32, UINT32, GgufParts, Value, parse_parts
from tests.fuzz.tiny import SHARD, write_model
from tests.support.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> GgufParts:
    return parse_parts(write_gguf(whole, tmp_path / "whole.gguf").read_bytes())


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def load(path: Path) -> None:
    open_model(str(path)).load(LayerRange(0, 2), torch.float32, first=True, last=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_that_is_nested_too_deep(model: Path, name: str) -> None:
    (model / name).write_text('{"a":' + "[" * 100_000)
    with pytest.raises(Rejected, match=f"{name}: is not JSON"):
        open_model(str(model)).tokenizer()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: must be a positive number, got 1000"),
        ({"vocab_size": 1 << 31}, "vocab_size: must be at most 2147483647, got 2147483648"),
        ({"num_hidden_layers": 100_000}, "100000 layers are more than 4096"),
        ({"eos_token_id": 1 << 64}, "eos_token_id: must be a token id"),
        ({"layer_types": [["full_attention"]]}, "layer_types: must be a list of strings"),
        ({"layer_types": 5}, "layer_types: must be a list of strings"),
    ],
)
def test_numbers_that_no_model_has(model: Path, changes: dict[str, Any], problem: str) -> None:
    change(model / "config.json", **changes)
    with pytest.raises(Rejected, match=problem):
        open_model(str(model))


def test_a_complaint_stays_short(model: Path) -> None:
    change(model / "config.json", model_type="x" * 1_000_000)
    with pytest.raises(Rejected, match="model_type: 'xxx") as caught:
        open_model(str(model))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["/dev/zero", "../model/config.json", "", ".", "..", "a\0b", "a/b", None, 5])
def test_an_index_names_files_of_its_own_directory(model: Path, name: Any) -> None:
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(
        Rejected, match=r"index\.json: weight_map: tensor model\.norm\.weight must lie in a file of this"
    ):
        load(model)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1, -5000])
def test_a_cut_file_of_weights_is_named_with_a_tensor(model: Path, kept: int) -> None:
    file = model / SHARD.format(1)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(Rejected, match=f"{file.name}: tensor model"):
        load(model)


@pytest.mark.parametrize("value", [b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f"], ids=["nan", "inf"])
def test_weights_that_are_no_numbers_are_named(model: Path, value: bytes) -> None:
    file = model / SHARD.format(1)
    content = bytearray(file.read_bytes())
    content[-4:] = value
    file.write_bytes(content)
    with pytest.raises(Rejected, match=r"^model: tensor 'model\..*' has values that are no numbers"):
        load(model)


EMPTY_PATTERN = {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}
NO_MAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.mark.parametrize(("normalizer", "field"), [(EMPTY_PATTERN, "text"), (NO_MAP, "model")])
def test_a_panic_of_the_tokenizer_library_is_an_error(model: Path, normalizer: dict[str, Any], field: str) -> None:
    """It comes as an exception that is no Exception."""
    change(model / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(Rejected, match="tokenizer") as caught:
        open_model(str(model)).tokenizer().encode("hello")
    assert caught.value.field == field


GGUF_METADATA = [
    ("general.alignment", Value.number(UINT32, 0), r"general\.alignment must be in 1\.\.1048576, got 0"),
    ("general.alignment", Value.text("x"), r"general\.alignment must be in 1\.\.1048576, got 'x'"),
    ("x", Value.nested(100_000), "the header is truncated or damaged"),
    ("x", Value.numbers_said_to_be(1 << 62), "the header is truncated or damaged"),
    ("tokenizer.ggml.tokens", Value.number(UINT32, 5), "tokens: must be a list of strings"),
    ("tokenizer.ggml.tokens", Value.texts(["a" * 5000]), "tokens: token 0 has 5000 characters"),
    ("tokenizer.ggml.tokens", Value.texts([]), "tokens: must hold tokens"),
    ("tokenizer.ggml.token_type", Value.numbers(INT32, [1]), "token_type: must hold 320 finite numbers"),
    ("tokenizer.ggml.merges", Value.numbers(INT32, [1]), "merges: must be a list of strings"),
    ("tokenizer.ggml.merges", Value.texts(["no merge"]), "its tokenizer cannot be built"),
    ("tokenizer.ggml.bos_token_id", Value.text("1"), "bos_token_id: must be a token id"),
    ("tokenizer.ggml.add_bos_token", Value.text("1"), "add_bos_token: must be true or false"),
    ("tokenizer.ggml.pre", Value.number(UINT32, 1), "pre: must be a string"),
    ("tokenizer.chat_template", Value.number(UINT32, 1), "tokenizer.chat_template: must be a string"),
]


@pytest.mark.parametrize(("key", "value", "problem"), GGUF_METADATA)
def test_gguf_metadata_of_the_wrong_kind(
    parts: GgufParts, tmp_path: Path, key: str, value: Value, problem: str
) -> None:
    parts.metadata[key] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(parts.to_bytes(alignment=32))
    with pytest.raises(Rejected, match=problem):
        open_model(str(path)).tokenizer()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("token_embd.weight", []), ("token_embd.weight", [16, 1 << 40]), ("rope_freqs.weight", [1 << 40])],
)
def test_gguf_tensors_of_shapes_that_cannot_be(parts: GgufParts, tmp_path: Path, name: str, shape: list[int]) -> None:
    parts.tensors[name] = {"shape": shape, "kind": 0, "offset": 0}
    path = tmp_path / "damaged.gguf"
    path.write_bytes(parts.to_bytes(alignment=32))
    with pytest.raises(Rejected, match=f"tensor {name} has the shape"):
        open_model(str(path))


@pytest.mark.parametrize("offset", [1 << 20, (1 << 64) - 1])
def test_a_gguf_tensor_beyond_the_end_is_named(parts: GgufParts, tmp_path: Path, offset: int) -> None:
    parts.tensors["blk.1.ffn_up.weight"]["offset"] = offset
    path = tmp_path / "damaged.gguf"
    path.write_bytes(parts.to_bytes(alignment=32))
    with pytest.raises(Rejected, match=r"tensor blk\.1\.ffn_up\.weight is truncated"):
        load(path)


def test_a_gguf_file_that_is_cut_anywhere_is_refused(parts: GgufParts, tmp_path: Path) -> None:
    data = parts.to_bytes(alignment=32)
    path = tmp_path / "damaged.gguf"
    for kept in [*range(0, parts.header_bytes, 97), *range(parts.header_bytes, len(data), 4001)]:
        path.write_bytes(data[:kept])
        with pytest.raises(Rejected, match=r"damaged\.gguf"):
            load(path)


def test_strings_that_are_no_text(parts: GgufParts, tmp_path: Path) -> None:
    broken = Value.texts(["ab", "cd"])
    parts.metadata["tokenizer.ggml.tokens"] = Value(broken.kind, broken.data[:-2] + b"\xff\xff")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(parts.to_bytes(alignment=32))
    with pytest.raises(Rejected, match=r"tokenizer\.ggml\.tokens: must be UTF-8"):
        GgufFile(path).get("tokenizer.ggml.tokens")
