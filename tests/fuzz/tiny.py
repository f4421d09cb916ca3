"""A model directory of a few kilobytes, made without `transformers`: quick to write, and to write again damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.model.hf_config import from_hf_dir
from stagemesh.shared.model.weights import stage_shapes
from tests.support.tiny_models import write_tokenizer

VOCAB: Final = 320
CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "layer_types": ["full_attention", "full_attention"],
    "torch_dtype": "float32",
}
SHARD: Final = "model-0000{}-of-00002.safetensors"


def write_config(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))


def write_model(folder: Path) -> Path:
    """In two files with an index."""
    write_config(folder)
    write_tokenizer(folder, VOCAB)
    shapes = stage_shapes(from_hf_dir(folder), LayerRange(0, 2), first=True, last=True)
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    files = {name: SHARD.format(1 + number % 2) for number, name in enumerate(tensors)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder
