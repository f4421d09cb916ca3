"""ModelConfig from a Hugging Face directory: config.json, and the token ids of generation_config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import ARCHITECTURES, Experts, ModelConfig, RopeScaling, Settings, shown

DEFAULT_WINDOW: Final = 4096  # tokens
DEFAULT_THETA: Final = {"mixtral": 1e6}
QWENS: Final = ("qwen2", "qwen3", "qwen3_moe")
DTYPES: Final = ("float32", "float64", "float16", "bfloat16")


def from_hf_dir(path: Path) -> ModelConfig:
    """Reads `path`/config.json. Raises Rejected naming file and key where one is missing, wrong or not supported."""
    file = path / "config.json"
    settings = Settings(file, read_json(file))
    architecture = settings.text("model_type")
    if architecture not in ARCHITECTURES:
        raise settings.complaint("model_type", f"{architecture!r} is not supported, only {', '.join(ARCHITECTURES)}")
    _refuse_what_changes_the_maths(settings)
    num_heads, hidden_size = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    rope = _rope_settings(settings)
    max_context = settings.integer("max_position_embeddings")
    takes_bias = architecture in ("llama", "qwen3", "qwen3_moe")
    bias = takes_bias and settings.flag("attention_bias", False)
    default_head = 128 if architecture == "qwen3" else hidden_size // num_heads
    experts = _experts(settings, architecture)
    return ModelConfig(
        architecture=architecture,
        num_layers=settings.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=experts.intermediate_size if experts else settings.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_heads),
        head_dim=settings.integer("head_dim", default_head),
        vocab_size=settings.integer("vocab_size"),
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", DEFAULT_THETA.get(architecture, 10000.0)),
        rope_scaling=_rope_scaling(rope, max_context),
        max_context=max_context,
        tie_word_embeddings=settings.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(settings, architecture),
        attention_bias=bias or architecture == "qwen2",
        output_bias=bias,
        mlp_bias=architecture == "llama" and settings.flag("mlp_bias", False),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        experts=experts,
        bos_token_id=next(iter(settings.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(settings, path / "generation_config.json"),
        torch_dtype=_dtype(settings),
    ).check(file)


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises Rejected if there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Rejected("model", f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise Rejected("model", f"{file}: is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise Rejected("model", f"{file}: must hold a JSON object")
    return values


def _refuse_what_changes_the_maths(settings: Settings) -> None:
    if (activation := settings.text("hidden_act", "silu")) != "silu":
        raise settings.complaint("hidden_act", f"{activation!r} is not supported, only 'silu'")
    if settings.values.get("quantization_config") is not None:
        raise settings.complaint("quantization_config", "quantized safetensors are not supported")
    kinds = settings.values.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise settings.complaint("layer_types", f"must be a list of strings, got {shown(kinds)}")
    if len(set(kinds)) > 1:
        raise settings.complaint("layer_types", f"layers must all be alike, got {sorted(set(kinds))}")


def _rope_settings(settings: Settings) -> Settings:
    """Rope settings under one name each: newer files nest all under rope_parameters, older ones rope_scaling only."""
    values = settings.values
    nested = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise settings.complaint("rope_parameters", f"must be an object, got {shown(nested)}")
    merged = {"rope_theta": values.get("rope_theta"), **nested}
    merged["rope_type"] = nested.get("rope_type", nested.get("type", "default"))
    if merged.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise settings.complaint("partial_rotary_factor", "only 1.0 is supported")
    return Settings(settings.source, merged)


def _rope_scaling(rope: Settings, max_context: int) -> RopeScaling | None:
    kind = rope.text("rope_type")
    if kind in ("default", "none"):
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings", max_context),
        )
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor := rope.number("factor"),
            original_max_context=rope.integer("original_max_position_embeddings", max_context),
            attention_factor=_yarn_attention(rope, factor),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
        )
    raise rope.complaint("rope_type", f"{kind!r} is not supported, only default, linear, llama3 and yarn")


def _yarn_attention(rope: Settings, factor: float) -> float:
    """What the file says, else what the paper suggests for `factor`, with the weights of DeepSeek's variant."""

    def suggested(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return suggested(rope.number("mscale")) / suggested(rope.number("mscale_all_dim"))
    return suggested(1.0)


def _experts(settings: Settings, architecture: str) -> Experts | None:
    """Raises Rejected where some layers have experts and others have none."""
    if architecture == "mixtral":
        count, per_token = settings.integer("num_local_experts", 8), settings.integer("num_experts_per_tok", 2)
        return Experts(count, per_token, settings.integer("intermediate_size"), True)
    if architecture != "qwen3_moe":
        return None
    if settings.values.get("mlp_only_layers") or settings.integer("decoder_sparse_step", 1) != 1:
        key = "mlp_only_layers" if settings.values.get("mlp_only_layers") else "decoder_sparse_step"
        raise settings.complaint(key, "layers without experts among those with them are not supported")
    key = "num_experts" if settings.values.get("num_experts") is not None else "num_local_experts"
    return Experts(
        settings.integer(key, 128),
        settings.integer("num_experts_per_tok", 8),
        settings.integer("moe_intermediate_size"),
        settings.flag("norm_topk_prob", False),
    )


def _sliding_window(settings: Settings, architecture: str) -> int | None:
    if architecture == "llama":  # not a setting of this architecture, whatever the file says
        return None
    if "sliding_window" in settings.values and settings.values["sliding_window"] is None:
        return None
    if architecture in QWENS and not _all_slide(settings, architecture):
        return None
    if architecture == "mixtral" and "sliding_window" not in settings.values:
        return None
    return settings.integer("sliding_window", DEFAULT_WINDOW)


def _all_slide(settings: Settings, architecture: str) -> bool:
    """True if every layer has the window, false if none has. Raises Rejected for a mixture."""
    if not settings.flag("use_sliding_window", False):
        return False
    if kinds := settings.values.get("layer_types"):
        return "sliding_attention" in kinds
    layers = settings.integer("num_hidden_layers")
    first = 0 if architecture == "qwen3_moe" else settings.values.get("max_window_layers", 28)
    if not isinstance(first, int) or 0 < first < layers:
        raise settings.complaint("max_window_layers", f"must be 0, or {layers} or more: layers must all be alike")
    return first == 0


def _eos_token_ids(settings: Settings, generation_file: Path) -> tuple[int, ...]:
    ids = settings.token_ids("eos_token_id")
    if generation_file.exists():
        ids += Settings(generation_file, read_json(generation_file)).token_ids("eos_token_id")
    return tuple(sorted(set(ids)))


def _dtype(settings: Settings) -> str:
    key = "dtype" if settings.values.get("dtype") is not None else "torch_dtype"
    name = settings.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise settings.complaint(key, f"{name!r} is not supported, only {', '.join(DTYPES)}")
    return name
