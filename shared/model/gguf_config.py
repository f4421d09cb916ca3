"""ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from typing import Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import (
    MAX_INTEGER,
    MAX_NUMBER,
    Experts,
    ModelConfig,
    RopeScaling,
    Settings,
    shown,
)
from stagemesh.shared.model.gguf_file import GgufFile

ARCHITECTURES: Final = {name: name for name in ("llama", "mistral", "qwen2", "qwen3")} | {"qwen3moe": "qwen3_moe"}
"""The files' names of architectures, and ours; a llama with experts is a mixtral."""
MAX_FREQUENCIES: Final = 1 << 16


def from_gguf(file: GgufFile) -> ModelConfig:
    """Raises Rejected naming file and key where one is missing, wrong or not supported."""
    settings = Settings(file.path, file.plain())
    written = settings.text("general.architecture")
    if written not in ARCHITECTURES:
        problem = f"{written!r} is not supported, only {', '.join(ARCHITECTURES)}"
        raise settings.complaint("general.architecture", problem)
    prefix, experts = f"{written}.", _experts(settings, written)
    architecture = "mixtral" if experts and written == "llama" else ARCHITECTURES[written]
    num_heads = settings.integer(prefix + "attention.head_count")
    hidden_size = settings.integer(prefix + "embedding_length")
    head_dim = settings.integer(prefix + "attention.key_length", hidden_size // num_heads)
    if (rotary := settings.integer(prefix + "rope.dimension_count", head_dim)) != head_dim:
        raise settings.complaint(prefix + "rope.dimension_count", f"must be the head size {head_dim}, got {rotary}")
    has_window = settings.values.get(prefix + "attention.sliding_window")
    return ModelConfig(
        architecture=architecture,
        num_layers=settings.integer(prefix + "block_count"),
        hidden_size=hidden_size,
        intermediate_size=experts.intermediate_size if experts else settings.integer(prefix + "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=settings.integer(prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file, settings, prefix),
        rms_norm_eps=settings.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope_theta=settings.number(prefix + "rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, settings, prefix),
        max_context=settings.integer(prefix + "context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        sliding_window=settings.integer(prefix + "attention.sliding_window") if has_window else None,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        experts=experts,
        bos_token_id=next(iter(settings.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_eos_token_ids(settings),
        torch_dtype="float32",
    ).check(file.path)


def _experts(settings: Settings, written: str) -> Experts | None:
    prefix = f"{written}."
    if not settings.values.get(prefix + "expert_count"):
        return None
    count, per_token = settings.integer(prefix + "expert_count"), settings.integer(prefix + "expert_used_count")
    # Probabilities of the chosen ones add up to 1 in both architectures, which the files do not say.
    wide = prefix + ("feed_forward_length" if written == "llama" else "expert_feed_forward_length")
    return Experts(count, per_token, settings.integer(wide), True)


def _vocab_size(file: GgufFile, settings: Settings, prefix: str) -> int:
    """The rows of the embedding; the metadata may be older than they are."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        return settings.integer(prefix + "vocab_size")
    if len(embedding.shape) != 2 or not 1 <= embedding.shape[0] <= MAX_INTEGER:
        raise Rejected("model", f"{file.path}: tensor token_embd.weight has the shape {shown(list(embedding.shape))}")
    return embedding.shape[0]


def _rope_scaling(file: GgufFile, settings: Settings, prefix: str) -> RopeScaling | None:
    kind = settings.text(prefix + "rope.scaling.type", "none")
    if (info := file.tensors.get("rope_freqs.weight")) is not None:
        if len(info.shape) != 1 or not 1 <= info.shape[0] <= MAX_FREQUENCIES:
            raise Rejected("model", f"{file.path}: tensor rope_freqs.weight has the shape {shown(list(info.shape))}")
        layout = struct.Struct(f"<{info.shape[0]}f")  # always float32
        factors = layout.unpack(file.tensor_bytes(info, layout.size))
        if not all(0 < factor <= MAX_NUMBER for factor in factors):
            raise Rejected("model", f"{file.path}: tensor rope_freqs.weight must hold positive numbers")
        return RopeScaling("factors", factors=factors)
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", settings.number(prefix + "rope.scaling.factor"))
    if kind == "yarn":
        factor = settings.number(prefix + "rope.scaling.factor")
        return RopeScaling(
            "yarn",
            factor,
            original_max_context=settings.integer(
                prefix + "rope.scaling.original_context_length", settings.integer(prefix + "context_length")
            ),
            attention_factor=0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0,
        )
    raise settings.complaint(prefix + "rope.scaling.type", f"{kind!r} is not supported, only none, linear and yarn")


def _eos_token_ids(settings: Settings) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(sorted({token_id for key in keys for token_id in settings.token_ids(key)}))
