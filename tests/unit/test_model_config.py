"""Configs as the many versions of their writers leave them, and what is refused, by file and key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import Experts, ModelConfig, RopeScaling
from stagemesh.shared.model.hf_config import from_hf_dir

BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def write(path: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    """A config.json of BASE with `changes`; a value of ... leaves the key out."""
    values = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_defaults_of_a_plain_llama(tmp_path: Path) -> None:
    config = from_hf_dir(write(tmp_path, {}))
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("llama", 16, 2)
    assert (config.rope_theta, config.rope_scaling, config.sliding_window) == (10000.0, None, None)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.bos_token_id, config.eos_token_ids, config.torch_dtype) == (1, (2,), "float32")


def test_older_and_newer_names_mean_the_same(tmp_path: Path) -> None:
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, "dtype": "bfloat16"}
    first = from_hf_dir(write(tmp_path, old))
    assert first == from_hf_dir(write(tmp_path, new))
    assert (first.rope_theta, first.rope_scaling) == (500.0, RopeScaling("linear", 2.0))
    assert first.torch_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_llama3_scaling_is_read_whole(tmp_path: Path, name: str) -> None:
    config = from_hf_dir(write(tmp_path, {name: {"rope_type": "llama3", **LLAMA3}}))
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_absent_null_and_missing_values(tmp_path: Path) -> None:
    changes = {"num_key_value_heads": None, "head_dim": 32, "eos_token_id": None, "bos_token_id": ...}
    config = from_hf_dir(write(tmp_path, changes))
    assert (config.num_kv_heads, config.head_dim, config.bos_token_id, config.eos_token_ids) == (4, 32, None, ())


def test_eos_ids_of_both_files_count(tmp_path: Path) -> None:
    config = from_hf_dir(write(tmp_path, {"eos_token_id": [7, 2]}, {"eos_token_id": [2, 9]}))
    assert config.eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(("window", "expected"), [(None, None), (128, 128), (..., 4096)])
def test_sliding_window_of_mistral(tmp_path: Path, window: Any, expected: int | None) -> None:
    config = from_hf_dir(write(tmp_path, {"model_type": "mistral", "sliding_window": window}))
    assert config.sliding_window == expected


QWEN_WINDOW: dict[str, Any] = {"model_type": "qwen3", "sliding_window": 128, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_window_layers": 0}, 128),
        ({"max_window_layers": 4}, None),
        ({"use_sliding_window": False}, None),
        ({"layer_types": ["sliding_attention"] * 4}, 128),
        ({"layer_types": ["full_attention"] * 4, "max_window_layers": 0}, None),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 32}, 128),
        ({"model_type": "mixtral"}, 128),
        ({"model_type": "mixtral", "sliding_window": ...}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_sliding_window_of_the_others(tmp_path: Path, changes: dict[str, Any], expected: int | None) -> None:
    assert from_hf_dir(write(tmp_path, QWEN_WINDOW | changes)).sliding_window == expected


def test_what_qwens_and_mixtures_have_beyond_a_llama(tmp_path: Path) -> None:
    def read(kind: str, **changes: Any) -> ModelConfig:
        return from_hf_dir(write(tmp_path, {"model_type": kind, **changes}))

    qwen2, qwen3 = read("qwen2"), read("qwen3")
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert read("qwen3", attention_bias=True).output_bias
    assert read("mixtral").experts == Experts(8, 2, 128, True)
    assert read("mixtral").rope_theta == 1e6
    sizes = {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False}
    assert read("qwen3_moe", **sizes).experts == Experts(16, 4, 32, False)


def test_experts_are_refused_on_gpus(tmp_path: Path) -> None:
    config = from_hf_dir(write(tmp_path, {"model_type": "mixtral"}))
    config.check_device("cpu", "DIR")
    with pytest.raises(Rejected, match=r"DIR: num_local_experts: 8 experts need model\.device 'cpu'"):
        config.check_device("cuda", "DIR")
    from_hf_dir(write(tmp_path, {"model_type": "qwen3"})).check_device("cuda", "DIR")


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 0.1 * math.log(4.0) + 1.0),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_what_yarn_multiplies_with(tmp_path: Path, rope: dict[str, float], expected: float) -> None:
    scaling = from_hf_dir(write(tmp_path, {"rope_scaling": {"type": "yarn", "factor": 4.0, **rope}})).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.original_max_context) == ("yarn", 256)
    assert scaling.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "gemma"}, "model_type: 'gemma' is not supported"),
        ({"model_type": ...}, "model_type: is missing"),
        ({"num_hidden_layers": ...}, "num_hidden_layers: is missing"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers: must be a positive integer, got '12'"),
        ({"hidden_size": 0}, "hidden_size: must be a positive integer, got 0"),
        ({"vocab_size": True}, "vocab_size: must be a positive integer"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor: is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}}, "beta_fast must be above beta_slow"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, "max_window_layers: must be 0"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers: layers without experts"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step: layers without experts"),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size: is missing"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9 experts a token, of 8"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor: is missing"),
        ({"rope_scaling": "linear"}, "rope_parameters: must be an object"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id: must be a token id"),
        ({"torch_dtype": "int8"}, "torch_dtype: 'int8' is not supported"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 kv heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_what_is_refused_is_named_by_file_and_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(Rejected) as caught:
        from_hf_dir(write(tmp_path, changes))
    assert caught.value.field == "model"
    assert str(tmp_path / "config.json") in str(caught.value)
    assert key in str(caught.value)


def test_a_wrong_generation_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"generation_config\.json: eos_token_id"):
        from_hf_dir(write(tmp_path, {}, {"eos_token_id": -1}))


@pytest.mark.parametrize(("content", "problem"), [("{", "is not JSON"), ("[1]", "must hold a JSON object")])
def test_a_broken_config_file(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(Rejected, match=problem):
        from_hf_dir(tmp_path)


def test_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="cannot be read"):
        from_hf_dir(tmp_path)
