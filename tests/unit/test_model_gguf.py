"""GGUF files: the same model as its Hugging Face original, damage that is named, and SmolLM2 against `transformers`."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import RopeScaling
from stagemesh.shared.model.gguf_config import from_gguf
from stagemesh.shared.model.gguf_file import GgufFile
from stagemesh.shared.model.rope import inverse_frequencies
from stagemesh.shared.model.source import GgufSource, open_model
from tests.support.paged_model import PagedModel
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import Architecture, make_tiny

PROMPT = [1, 30, 77, 200, 9, 145, 8]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("original"), num_layers=3, dtype="float32", attention_bias=True)


@pytest.fixture(scope="module")
def plain(original: Path) -> Path:
    return write_gguf(original, original / "plain.gguf")


def test_a_converted_model_computes_the_same(original: Path, plain: Path) -> None:
    expected = PagedModel(open_model(str(original)), torch.float32).greedy([PROMPT], 8, chunk=4)[0]
    ours = PagedModel(open_model(str(plain)), torch.float32, pp_size=2).greedy([PROMPT], 8, chunk=4)[0]
    assert ours.tokens == expected.tokens
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_other_families_compute_the_same_from_a_converted_file(tmp_path: Path, architecture: Architecture) -> None:
    model = make_tiny(tmp_path / "model", architecture, num_layers=2, dtype="float32", tie_word_embeddings=True)
    expected = PagedModel(open_model(str(model)), torch.float32).greedy([PROMPT], 8, chunk=4)[0]
    for stacked in (True, False):
        path = write_gguf(model, tmp_path / f"{stacked}.gguf", stack_experts=stacked)
        source = open_model(str(path))
        assert source.config.architecture == architecture
        ours = PagedModel(source, torch.float32, pp_size=2).greedy([PROMPT], 8, chunk=4)[0]
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)
        assert ours.tokens == expected.tokens


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantized_experts_are_close_to_the_original(tmp_path: Path, kind: str) -> None:
    model = make_tiny(tmp_path / "model", "mixtral", num_layers=1, dtype="float32")
    path = write_gguf(model, tmp_path / "model.gguf", kind=GGMLQuantizationType[kind])
    ours, theirs = (
        open_model(str(place)).load(LayerRange(0, 1), torch.float32, first=False, last=False).layers[0]
        for place in (path, model)
    )
    for name in ("router", "gate_up", "down"):
        error = (getattr(ours, name) - getattr(theirs, name)).abs().max()
        assert 0 < float(error) < 0.15


def test_yarn_in_metadata(original: Path, tmp_path: Path) -> None:
    changes = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    changes["llama.rope.scaling.original_context_length"] = 64
    scaling = open_model(str(write_gguf(original, tmp_path / "yarn.gguf", overrides=changes))).config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_context) == ("yarn", 4.0, 64)
    assert scaling.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantized_tensors_are_close_to_the_original(original: Path, tmp_path: Path, kind: str) -> None:
    path = write_gguf(original, tmp_path / "model.gguf", kind=GGMLQuantizationType[kind])
    layers = LayerRange(1, 2)
    ours = open_model(str(path)).load(layers, torch.float32, first=False, last=False).layers[0]
    theirs = open_model(str(original)).load(layers, torch.float32, first=False, last=False).layers[0]
    for name in ("qkv", "output", "gate_up", "down"):
        error = (getattr(ours, name) - getattr(theirs, name)).abs().max()
        assert 0 < float(error) < 0.1


def test_config_comes_from_metadata_and_tensors(original: Path, plain: Path, tmp_path: Path) -> None:
    config, expected = open_model(str(plain)).config, open_model(str(original)).config
    # GGUF says nothing on biases by key, and keeps a float32 of what JSON writes in decimal.
    assert config.attention_bias
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    for name in ("num_layers", "hidden_size", "head_dim", "vocab_size", "eos_token_ids", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(expected, name)
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0, "tokenizer.ggml.eot_token_id": 3}
    other = open_model(str(write_gguf(original, tmp_path / "linear.gguf", overrides=changes))).config
    assert other.rope_scaling == RopeScaling("linear", 2.0)
    assert other.eos_token_ids == (2, 3)


def test_the_header_reads_as_the_reference_reader_reads_it(plain: Path) -> None:
    ours, theirs = GgufFile(plain), GGUFReader(plain)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {key: ours.get(key) for key in fields} == fields
    assert set(ours.plain()) == {key for key in fields if not isinstance(ours.get(key), list) or key.endswith("type")}
    assert {name: info.shape for name, info in ours.tensors.items()} == {
        tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in theirs.tensors
    }
    assert {ours.data_start + ours.tensors[tensor.name].offset for tensor in theirs.tensors} == {
        tensor.data_offset for tensor in theirs.tensors
    }


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"llama.block_count": None}, "llama.block_count: is missing"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length: must be a positive integer"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor: is missing"),
        ({"llama.expert_count": 4}, "llama.expert_used_count: is missing"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: must be the head size 16, got 8"),
        ({"general.architecture": "gemma"}, "general.architecture: 'gemma' is not supported"),
    ],
)
def test_a_wrong_config_is_named_by_key(
    original: Path, tmp_path: Path, overrides: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "model.gguf"
    if architecture := overrides.pop("general.architecture", None):
        content = write_gguf(original, path).read_bytes()
        path.write_bytes(
            content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0" + architecture.encode()[:5], 1)
        )
        problem = problem.replace("gemma", architecture[:5])
    else:
        write_gguf(original, path, overrides=overrides)
    with pytest.raises(Rejected) as caught:
        open_model(str(path))
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("keep", [3, 10, 30, 200, 5000])
def test_a_file_cut_in_its_header_is_refused(plain: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(plain.read_bytes()[:keep])
    with pytest.raises(Rejected, match=r"cut\.gguf"):
        open_model(str(path))


def test_a_file_cut_in_its_data_names_the_tensor(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(plain.read_bytes()[:-100])
    source = open_model(str(path))
    with pytest.raises(Rejected, match=r"cut\.gguf: tensor \S+ is truncated"):
        source.load(LayerRange(0, 3), torch.float32, first=True, last=True)


def test_a_missing_or_misshaped_tensor_is_named(original: Path, plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(plain.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(Rejected, match=r"bad\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        open_model(str(path)).load(LayerRange(0, 3), torch.float32, first=False, last=False)
    wider = write_gguf(original, tmp_path / "wider.gguf", overrides={"llama.feed_forward_length": 160})
    with pytest.raises(Rejected, match=r"blk\.0\.ffn_gate\.weight has shape \[128, 64\], the model needs \[160, 64\]"):
        open_model(str(wider)).load(LayerRange(0, 1), torch.float32, first=False, last=False)


def test_an_unknown_tensor_type_is_named(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    content = bytearray(plain.read_bytes())
    place = content.index(b"output_norm.weight") + len(b"output_norm.weight")
    struct.pack_into("<I", content, place + 4 + 8, 999)  # after the rank and the one dimension
    path.write_bytes(content)
    with pytest.raises(Rejected, match=r"tensor output_norm\.weight has the unknown type 999"):
        open_model(str(path)).load(LayerRange(2, 3), torch.float32, first=False, last=True)


def test_rope_factors_of_llama3_files_divide_the_frequencies(plain: Path) -> None:
    config = open_model(str(plain)).config
    assert config.rope_scaling is None
    file = GgufFile(plain)
    norm = file.tensors["blk.0.attn_norm.weight"]
    file.tensors["rope_freqs.weight"] = replace(norm, shape=(8,))
    scaled = from_gguf(file)
    assert scaled.rope_scaling is not None
    ratio = inverse_frequencies(config) / inverse_frequencies(scaled)
    torch.testing.assert_close(ratio, torch.tensor(scaled.rope_scaling.factors))
    file.tensors["rope_freqs.weight"] = norm
    with pytest.raises(Rejected, match="64 factors for 8 frequencies"):
        from_gguf(file)


@pytest.mark.slow
def test_smollm2_logits_and_answer_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    source = open_model("smollm2")
    assert isinstance(source, GgufSource)
    path = source._file.path
    prompt = source.tokenizer().apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    row = PagedModel(source, torch.float32, pp_size=2, page_size=16).greedy([prompt], 8, chunk=16)[0]
    assert source.tokenizer().decode(row.tokens[len(prompt) :]) == "The capital of France is Paris."
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([row.tokens]), use_cache=False).logits[0, -9:]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=2e-3)
