"""A GGUF file with the weights and the tokenizer of a tiny Hugging Face directory, its rows reordered as llama.cpp's
converter reorders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.gguf_reader import expert_of, gguf_name
from stagemesh.shared.model.hf_config import from_hf_dir


def write_gguf(
    directory: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    overrides: dict[str, Any] | None = None,
    stack_experts: bool = True,
) -> Path:
    """Converts `directory` to `path`, matrices in `kind`. `overrides` replace metadata keys, in the names of a llama;
    None removes one. Experts are one tensor each unless they are to be stacked."""
    config = from_hf_dir(directory)
    architecture = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}.get(config.architecture, "llama")
    writer = GGUFWriter(path, architecture)
    settings: dict[str, Any] = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_context,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        **_tokenizer(directory),
        **_expert_settings(config),
        **(overrides or {}),
    }
    for key, value in settings.items():
        _add(writer, key.replace("llama.", f"{architecture}.", 1), value)
    heads = {".self_attn.q_proj.": config.num_heads, ".self_attn.k_proj.": config.num_kv_heads}
    if architecture != "llama":
        heads = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            permuted = next((_pairs(tensor, count) for part, count in heads.items() if part in name), tensor)
            if (number := expert_of(name)) is None:
                tensors[gguf_name(name)] = permuted
            else:
                experts.setdefault(gguf_name(name), {})[number] = permuted
    for name, parts in experts.items():
        if stack_experts:
            tensors[name] = np.stack([parts[number] for number in sorted(parts)])
        else:
            tensors |= {name.replace("_exps.", f".{number}."): part for number, part in parts.items()}
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor, dtype=np.float32)
        chosen = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _expert_settings(config: ModelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"llama.attention.key_length": config.head_dim}
    if config.experts is not None:
        settings |= {
            "llama.expert_count": config.experts.count,
            "llama.expert_used_count": config.experts.per_token,
            "llama.expert_feed_forward_length": config.experts.intermediate_size,
        }
    return settings


def _pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of each half of a head next to row i of the other."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(directory: Path) -> dict[str, Any]:
    content = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    vocab = content["model"]["vocab"]
    special = {entry["id"] for entry in content["added_tokens"]}
    return {
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [3 if token_id in special else 1 for token_id in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.chat_template": settings["chat_template"],
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
