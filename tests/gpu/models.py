"""Small models for the GPU checks, and a stage of one on a device: pool, rows, steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from stagemesh.shared.core.commands import SAMPLE, Command, Ints, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.cuda_copier import CudaPageCopier
from stagemesh.shared.engine.cuda_runner import CudaStageRunner
from stagemesh.shared.engine.host_copies import HostCopies
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.model.cuda.decode import DecodeGraphs
from stagemesh.shared.model.cuda.layers import CudaStageModel
from stagemesh.shared.model.cuda.packed import PackedStageModel, can_pack
from stagemesh.shared.model.cuda.prefill import PrefillForward
from stagemesh.shared.model.layers import StageModel, allocate_pool
from stagemesh.shared.model.source import ModelSource, open_model

PAGE = 16
T = TypeVar("T")


def mistral_dir(path: Path, **changes: object) -> Path:
    """A model directory with a config and no weights; Mistral-7B's shape but for `changes`."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
    }
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def write_tokenizer(path: Path, vocab_size: int = 32768) -> None:
    """A word for each id, so that a benchmark has something to decode."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )


SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}


def cuda_stage(
    source: ModelSource,
    role: str,
    *,
    num_pages: int,
    max_rows: int = 16,
    num_slots: int = 2,
    graphs: bool = True,
    weights_on: str = "cpu",
    layers: LayerRange | None = None,
    pool: Tensor | None = None,
    packed: bool = True,
) -> tuple[CudaStageRunner, Tensor, torch.cuda.Stream]:
    """A whole model as one stage, in bfloat16. Weights made on the CPU are those that a CPU stage has."""
    layers = layers or LayerRange(0, source.config.num_layers)
    last = layers.hi == source.config.num_layers
    weights = source.load(layers, torch.bfloat16, first=True, last=last, device=weights_on)
    if weights_on == "cpu":
        weights = moved(weights)
    packs = packed and role == "decode" and can_pack(weights, torch.bfloat16, max_rows)
    make = PackedStageModel if packs else CudaStageModel
    model = make(source.config, layers, weights, torch.bfloat16, first=True, last=last)
    if pool is None:
        pool = allocate_pool(source.config, len(layers), num_pages, PAGE, torch.bfloat16, "cuda")
    stream = torch.cuda.Stream()
    decode = chunks = None
    if role == "decode":
        sampled = torch.zeros(num_slots, max_rows, dtype=torch.int64, device="cuda")
        decode = DecodeGraphs(
            model, pool, num_slots=num_slots, max_rows=max_rows, inbox=None, sampled=sampled, graphs=graphs
        )
        decode.capture(stream, lambda done, total: None)
    else:
        with torch.cuda.stream(stream):
            chunks = PrefillForward(model, pool, num_slots, 8192)
    torch.cuda.synchronize()
    copies = HostCopies(CudaPageCopier(pool), 1 << 30)
    runner = CudaStageRunner(model, pool, copies, num_slots=num_slots, max_rows=max_rows, graphs=decode, chunks=chunks)
    return runner, pool, stream


def moved(weights: T, change: Callable[[Tensor], Tensor] = Tensor.cuda) -> T:
    """A frozen dataclass of tensors, each of them changed: brought to the GPU."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, tuple):
            return tuple(move(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{field.name: move(getattr(value, field.name)) for field in fields(value)})
        return value

    changed: T = move(weights)
    return changed


def cpu_stage(source: ModelSource, *, num_pages: int, dtype: torch.dtype = torch.float32) -> StageRunner:
    """The reference. In float32 with the bfloat16 weights, so that only the arithmetic differs."""
    layers = LayerRange(0, source.config.num_layers)
    weights = source.load(layers, torch.bfloat16, first=True, last=True)
    exact = moved(weights, lambda tensor: tensor.to(dtype))
    model = StageModel(source.config, layers, exact, dtype, first=True, last=True)
    pool = allocate_pool(source.config, len(layers), num_pages, PAGE, dtype)
    return StageRunner(model, pool, first=True, last=True)


def join(
    runner: StageRunner, prompts: list[list[int]], new_tokens: int, sampling: SamplingParams | None = None
) -> None:
    """Sequences 1, 2, ... with all the pages that they will need, in a scattered order."""
    each = [-(-(len(prompt) + new_tokens) // PAGE) for prompt in prompts]
    ids = np.random.default_rng(0).permutation(sum(each)).tolist()
    joins, deltas = [], {}
    for handle, (prompt, count) in enumerate(zip(prompts, each, strict=True), start=1):
        params = sampling or SamplingParams(new_tokens)
        joins.append(Join(handle, RequestRef(str(handle), 1), params, None, len(prompt)))
        deltas[handle], ids = ids[:count], ids[count:]
    runner.apply(Command(0, joins=tuple(joins), page_deltas=pack_deltas(deltas)))


def chunk(number: int, prompts: list[list[int]]) -> Step:
    """All prompts as one chunk."""
    rows = np.array([(h, 0, len(p), 0, 0, SAMPLE) for h, p in enumerate(prompts, start=1)], dtype=np.int64)
    return Step(number, 0, rows, np.concatenate([np.array(p, dtype=np.int64) for p in prompts]))


def decode_step(number: int, starts: list[int], token_ids: list[int]) -> Step:
    rows = np.array([(h, start, 1, 0, 0, SAMPLE) for h, start in enumerate(starts, start=1)], dtype=np.int64)
    return Step(number, 0, rows, np.array(token_ids, dtype=np.int64))


def run_cuda(runner: CudaStageRunner, stream: torch.cuda.Stream, step: Step) -> Ints:
    with torch.cuda.stream(stream):
        output = runner.prepare(step)(None)
        ids: Ints = output.tensor.cpu().numpy()
    return ids


def open_small(path: Path, **changes: object) -> ModelSource:
    return open_model(f"dummy:{mistral_dir(path, **{**SMALL, **changes})}")


def random_mistral(path: Path, seed: int = 0) -> Path:
    """A model of 512 wide and four layers with weights of its own, saved by `transformers` in bfloat16."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**{**SMALL, "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2})
    model = MistralForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = 0.1 if parameter.ndim == 1 else 1.3 * parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + (1 if "norm" in name else 0))
    model.save_pretrained(path)
    write_tokenizer(path, SMALL["vocab_size"])
    return path
