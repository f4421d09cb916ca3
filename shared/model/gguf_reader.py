"""Tensors of a GGUF file by their Hugging Face names: found, dequantized, and their rows put back in order."""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.gguf_file import GgufFile, TensorInfo
from stagemesh.shared.model.weights import EMBEDDING, FINAL_NORM, HEAD, Shape

WHOLE_MODEL: Final = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
LAYER_PARTS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT_PARTS: Final = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
}
PAIRED_ROWS: Final = ("llama", "mistral", "mixtral")


class GgufReader:
    """Reads from an open file; see `TensorReader`."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file, self._config = file, config

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        written, expert = gguf_name(name), expert_of(name)
        info = self._file.tensors.get(written)
        if info is None and expert is not None:  # a file from before experts were stacked
            part, _, kind = written.partition("_exps.")
            info, expert = self._file.tensors.get(f"{part}.{expert}.{kind}"), None
        if info is None:
            raise Rejected("model", f"{self._file.path}: tensor {written} is missing")
        needed = shape if expert is None else (info.shape[0], *shape)
        if info.shape != needed or (expert is not None and expert >= info.shape[0]):
            raise self._complaint(info, f"has shape {list(info.shape)}, the model needs {list(needed)}")
        tensor = torch.tensor(self._values(info, expert)).reshape(shape)
        if self._config.architecture not in PAIRED_ROWS:
            return tensor.to(dtype)
        if ".self_attn.q_proj." in name:
            tensor = _halves_from_pairs(tensor, self._config.num_heads)
        elif ".self_attn.k_proj." in name:
            tensor = _halves_from_pairs(tensor, self._config.num_kv_heads)
        return tensor.to(dtype)

    def _values(self, info: TensorInfo, expert: int | None) -> np.ndarray:
        """Of the whole tensor, or of one of its experts."""
        try:
            kind = GGMLQuantizationType(info.kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise self._complaint(info, f"has the unknown type {info.kind}") from error
        if info.shape[-1] % block:
            raise self._complaint(info, f"has rows of {info.shape[-1]}, no multiple of {kind.name}'s {block}")
        row_bytes = info.shape[-1] // block * block_bytes
        raw = self._file.tensor_bytes(info, prod(info.shape[:-1]) * row_bytes)
        rows = np.frombuffer(raw, np.uint8).reshape(*info.shape[:-1], row_bytes)
        try:
            values: np.ndarray = dequantize(rows if expert is None else rows[expert], kind)
        except NotImplementedError as error:
            raise self._complaint(info, f"has type {kind.name}, which cannot be dequantized") from error
        return values

    def _complaint(self, info: TensorInfo, problem: str) -> Rejected:
        return Rejected("model", f"{self._file.path}: tensor {info.name} {problem}")


def gguf_name(name: str) -> str:
    """The name in the file of a tensor with a Hugging Face name."""
    if name in WHOLE_MODEL:
        return WHOLE_MODEL[name]
    layer, _, tensor = name.removeprefix("model.layers.").partition(".")
    part, _, kind = tensor.rpartition(".")
    if expert_of(name) is not None:
        return f"blk.{layer}.{EXPERT_PARTS[part.rpartition('.')[2]]}_exps.{kind}"
    return f"blk.{layer}.{LAYER_PARTS[part]}.{kind}"


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor with a Hugging Face name belongs to."""
    _, found, rest = name.partition(".experts.")
    return int(rest.partition(".")[0]) if found else None


def _halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """llama.cpp rotates neighbouring rows of a head, we row i with row i + head_dim / 2: undoes its reordering."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
