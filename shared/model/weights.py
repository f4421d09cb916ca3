"""The tensors of one stage, fused at load time into as few matrices as the forward pass multiplies with.

A `TensorReader` hands out tensors by their Hugging Face names; what a stage needs, and of which shape, is decided
here, once for every file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, prod
from typing import Protocol

import torch
from torch import Tensor

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import Experts, ModelConfig

Progress = Callable[[int, int], None]  # bytes loaded so far, bytes in all
Shape = tuple[int, ...]

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT, GATE_UP, DOWN = ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
QUERY_NORM, KEY_NORM = "self_attn.q_norm", "self_attn.k_norm"


class TensorReader(Protocol):
    """The weights of one model."""

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The tensor `name` as `dtype`, in memory of its own. Raises Rejected naming file and tensor where it is
        missing, truncated or not of `shape`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; all in the stage's dtype.

    qkv: [(heads + 2 * kv_heads) * head_dim, hidden]; gate_up: [2 * intermediate, hidden]. Where there are experts,
    router: [experts, hidden], and gate_up and down have a first dimension more, of the experts. query_norm and
    key_norm: [head_dim], where the model has them.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    router: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StageWeights:
    """What a stage holds: `embedding` on the first, `norm` and `lm_head` on the last. `embedding` and `lm_head` are
    one tensor where the model ties them and the stage is both."""

    layers: tuple[LayerWeights, ...]
    embedding: Tensor | None
    norm: Tensor | None
    lm_head: Tensor | None


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of every tensor of a layer, by its name within the layer."""
    hidden = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {f"{INPUT_NORM}.weight": (hidden,), f"{POST_NORM}.weight": (hidden,)}
    if config.qk_norm:
        shapes |= {f"{name}.weight": (config.head_dim,) for name in (QUERY_NORM, KEY_NORM)}
    sizes = [
        (name, (rows, hidden), config.attention_bias)
        for name, rows in zip(QKV, (heads, kv_heads, kv_heads), strict=True)
    ]
    sizes.append((OUTPUT[0], (hidden, heads), config.output_bias))
    for name, (rows, columns) in _mlp_sizes(config):
        sizes.append((name, (rows, columns), config.mlp_bias))
    for name, size, has_bias in sizes:
        shapes[f"{name}.weight"] = size
        if has_bias:
            shapes[f"{name}.bias"] = size[:1]
    return shapes


def _mlp_sizes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None:
        wide = config.intermediate_size
        yield from ((name, (wide, hidden)) for name in GATE_UP)
        yield DOWN[0], (hidden, wide)
        return
    names = expert_names(config)
    yield names.router, (experts.count, hidden)
    for number in range(experts.count):
        yield from ((f"{names.experts}.{number}.{part}", (experts.intermediate_size, hidden)) for part in names.gate_up)
        yield f"{names.experts}.{number}.{names.down}", (hidden, experts.intermediate_size)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How an architecture calls the parts of its mixture within a layer; an expert is `experts`.N."""

    router: str
    experts: str
    gate_up: tuple[str, str]
    down: str


def expert_names(config: ModelConfig) -> ExpertNames:
    if config.architecture == "mixtral":
        return ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3"), "w2")
    return ExpertNames("mlp.gate", "mlp.experts", ("gate_proj", "up_proj"), "down_proj")


def stage_shapes(config: ModelConfig, layers: LayerRange, *, first: bool, last: bool) -> dict[str, Shape]:
    """The shape of every tensor that a stage reads, by its full name."""
    each = layer_shapes(config)
    shapes = {f"model.layers.{layer}.{name}": each[name] for layer in range(layers.lo, layers.hi) for name in each}
    table = (config.vocab_size, config.hidden_size)
    if first:
        shapes[EMBEDDING] = table
    if last:
        shapes[FINAL_NORM] = (config.hidden_size,)
        shapes[EMBEDDING if config.tie_word_embeddings else HEAD] = table
    return shapes


def weight_bytes(config: ModelConfig, layers: LayerRange, dtype: torch.dtype, *, first: bool, last: bool) -> int:
    """Bytes that the weights of a stage take once loaded."""
    shapes = stage_shapes(config, layers, first=first, last=last)
    return sum(prod(shape) for shape in shapes.values()) * dtype.itemsize


def load_stage(
    reader: TensorReader,
    config: ModelConfig,
    layers: LayerRange,
    dtype: torch.dtype,
    *,
    first: bool,
    last: bool,
    device: str = "cpu",
    progress: Progress | None = None,
) -> StageWeights:
    """Reads what the stage needs and nothing else, to `device`. Raises Rejected, from the reader, or for values
    that are no numbers."""
    total = weight_bytes(config, layers, dtype, first=first, last=last)
    loading = _Loading(reader, stage_shapes(config, layers, first=first, last=last), dtype, device, total, progress)
    embedding = loading.one(EMBEDDING) if first else None
    loaded = tuple(_load_layer(loading, config, f"model.layers.{layer}.") for layer in range(layers.lo, layers.hi))
    norm = head = None
    if last:
        norm = loading.one(FINAL_NORM)
        tied = config.tie_word_embeddings
        head = embedding if tied and embedding is not None else loading.one(EMBEDDING if tied else HEAD)
    return StageWeights(loaded, embedding, norm, head)


class _Loading:
    """Reads tensors and counts their bytes."""

    def __init__(
        self,
        reader: TensorReader,
        shapes: dict[str, Shape],
        dtype: torch.dtype,
        device: str,
        total: int,
        progress: Progress | None,
    ) -> None:
        self._reader, self._shapes, self._dtype, self._device = reader, shapes, dtype, device
        self._total, self._done, self._progress = total, 0, progress

    def one(self, name: str) -> Tensor:
        tensor = self._reader.read(name, self._shapes[name], self._dtype).to(self._device)
        if not isfinite(float(tensor.sum(dtype=torch.float32))):  # it would answer whatever it is asked, and never fail
            raise Rejected("model", f"tensor {name!r} has values that are no numbers")
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor

    def stacked(self, shape: Shape, names: Iterable[str]) -> Tensor:
        """Tensors of one shape, written one by one into the rows of one that is `shape`."""
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        rows = 0
        flat = whole.view(-1, shape[-1])
        for name in names:
            part = self.one(name)
            flat[rows : rows + len(part)] = part
            rows += len(part)
        assert rows == len(flat), (rows, shape)
        return whole

    def fused(self, names: Iterator[str]) -> Tensor | None:
        """The tensors of one kind, one below the other; None where the model has none."""
        parts = [self.one(name) for name in names if name in self._shapes]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None


def _load_layer(loading: _Loading, config: ModelConfig, prefix: str) -> LayerWeights:
    def weight(names: tuple[str, ...]) -> Tensor:
        fused = loading.fused(f"{prefix}{name}.weight" for name in names)
        assert fused is not None
        return fused

    def bias(names: tuple[str, ...]) -> Tensor | None:
        return loading.fused(f"{prefix}{name}.bias" for name in names)

    def mlp() -> tuple[Tensor, Tensor, Tensor | None]:
        """Gate and up, down, and the router."""
        if config.experts is None:
            return weight(GATE_UP), weight(DOWN), None
        return _load_experts(loading, config, config.experts, prefix)

    gate_up, down, router = mlp()
    return LayerWeights(
        input_norm=weight((INPUT_NORM,)),
        qkv=weight(QKV),
        qkv_bias=bias(QKV),
        output=weight(OUTPUT),
        output_bias=bias(OUTPUT),
        post_norm=weight((POST_NORM,)),
        gate_up=gate_up,
        gate_up_bias=bias(GATE_UP),
        down=down,
        down_bias=bias(DOWN),
        query_norm=weight((QUERY_NORM,)) if config.qk_norm else None,
        key_norm=weight((KEY_NORM,)) if config.qk_norm else None,
        router=router,
    )


def _load_experts(
    loading: _Loading, config: ModelConfig, experts: Experts, prefix: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up of all experts, down of all, the router."""
    names, count, wide = expert_names(config), experts.count, experts.intermediate_size
    each = [f"{prefix}{names.experts}.{number}" for number in range(count)]
    gate_up_shape, down_shape = (count, 2 * wide, config.hidden_size), (count, config.hidden_size, wide)
    gate_up = loading.stacked(gate_up_shape, (f"{one}.{part}.weight" for one in each for part in names.gate_up))
    down = loading.stacked(down_shape, (f"{one}.{names.down}.weight" for one in each))
    return gate_up, down, loading.one(f"{prefix}{names.router}.weight")
