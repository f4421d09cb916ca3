"""Our layers against `transformers` on the same weights: paged, chunked, batched and cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.model.layers import StageModel, allocate_pool, pool_bytes_per_page
from stagemesh.shared.model.project import project
from stagemesh.shared.model.source import open_model
from tests.support.paged_model import PagedModel, Row
from tests.support.reference import load_reference
from tests.support.tiny_models import make_tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied_sharded": {"tie_word_embeddings": True, "max_shard_size": "200KB"},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama_wide_heads": {"head_dim": 32},
    "llama_rope_linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama_rope_llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 500.0,
        }
    },
    "llama_rope_yarn": {"rope_parameters": YARN | {"rope_theta": 500.0}},
    "llama_rope_yarn_untruncated": {
        "rope_parameters": YARN | {"rope_theta": 500.0, "truncate": False, "beta_fast": 8.0, "attention_factor": 0.7}
    },
    "mistral": {"architecture": "mistral"},
    "mistral_window": {"architecture": "mistral", "sliding_window": 10},
    "qwen2": {"architecture": "qwen2"},
    "qwen2_tied_window": {
        "architecture": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 0,
    },
    "qwen2_yarn": {"architecture": "qwen2", "rope_parameters": YARN | {"rope_theta": 1e6}},
    "qwen3": {"architecture": "qwen3"},
    "qwen3_tied_biases": {"architecture": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
    "mixtral": {"architecture": "mixtral"},
    "mixtral_window": {"architecture": "mixtral", "sliding_window": 10, "num_experts_per_tok": 1},
    "qwen3_moe": {"architecture": "qwen3_moe"},
    "qwen3_moe_tied_plain_shares": {
        "architecture": "qwen3_moe",
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
}
FAMILIES = ("qwen2", "qwen3", "mixtral", "qwen3_moe")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny(root / name, **{"num_layers": 5, **settings}) for name, settings in VARIANTS.items()}


def reference_logits(path: Path, rows: Sequence[Row], dtype: torch.dtype) -> list[torch.Tensor]:
    """What transformers computes at every place of each row, in one pass and without a cache."""
    model = load_reference(path, dtype)
    with torch.inference_mode():
        return [model(torch.tensor([row.tokens]), use_cache=False).logits[0] for row in rows]


def check_greedy(path: Path, rows: Sequence[Row], num_tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    """Every token is what transformers would choose after the same tokens, from close logits."""
    for row, expected in zip(rows, reference_logits(path, rows, dtype), strict=True):
        ours, theirs = torch.stack(row.logits), expected[-num_tokens - 1 :]
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=0, atol=tolerance)
        assert row.tokens[-num_tokens:] == theirs[:-1].argmax(-1).tolist()


PROMPTS = ([1, 5, 9, 200, 31, 77, 8, 45, 11, 301, 19, 4, 250], [1], [1, 40, 41], [7] * 20)


@pytest.mark.parametrize("name", VARIANTS)
def test_float64_greedy_tokens_equal_those_of_transformers(models: dict[str, Path], name: str) -> None:
    model = PagedModel(open_model(str(models[name])), torch.float64)
    rows = model.greedy(PROMPTS, 24, chunk=6)
    check_greedy(models[name], rows, 24, torch.float64, 1e-5)
    assert len({token for row in rows for token in row.tokens[-24:]}) > 12  # not a model that repeats itself


@pytest.mark.parametrize(("pp_size", "sizes"), [(2, None), (3, None), (2, (1, 4)), (5, None)])
@pytest.mark.parametrize("name", ["llama_tied_sharded", "mistral_window", "qwen2_tied_window", "qwen3", "qwen3_moe"])
def test_stages_compute_what_one_process_does(
    models: dict[str, Path], name: str, pp_size: int, sizes: tuple[int, ...] | None
) -> None:
    source = open_model(str(models[name]))
    whole = PagedModel(source, torch.float64).greedy(PROMPTS, 8, chunk=6)
    staged = PagedModel(source, torch.float64, pp_size=pp_size, sizes=sizes).greedy(PROMPTS, 8, chunk=6)
    assert [row.tokens for row in staged] == [row.tokens for row in whole]
    for row, other in zip(staged, whole, strict=True):
        torch.testing.assert_close(torch.stack(row.logits), torch.stack(other.logits), rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_logits_of_split_stages_are_those_of_transformers(models: dict[str, Path], name: str) -> None:
    rows = PagedModel(open_model(str(models[name])), torch.float32, pp_size=3).greedy(PROMPTS, 12, chunk=6)
    check_greedy(models[name], rows, 12, torch.float32, 2e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.5)], ids=["float32", "bfloat16"]
)
def test_narrower_dtypes_stay_close(models: dict[str, Path], dtype: torch.dtype, tolerance: float) -> None:
    rows = PagedModel(open_model(str(models["llama"])), dtype).greedy(PROMPTS, 8, chunk=6)
    for row, theirs in zip(rows, reference_logits(models["llama"], rows, dtype), strict=True):
        ours = torch.stack(row.logits)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs[-9:].float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunk_and_page_size_do_not_matter(models: dict[str, Path], page_size: int, chunk: int) -> None:
    model = PagedModel(open_model(str(models["mistral_window"])), torch.float64, page_size=page_size, num_pages=200)
    check_greedy(models["mistral_window"], model.greedy(PROMPTS, 6, chunk=chunk), 6, torch.float64, 1e-5)


def test_a_step_mixes_prefill_and_decode_rows_of_any_length(models: dict[str, Path]) -> None:
    model = PagedModel(open_model(str(models["llama"])), torch.float64, num_pages=400)
    long, short = model.row([3] * 11 + [*range(10, 200)], 1), model.row([9, 8, 7], 1)
    fresh, chunked = model.row([4, 5, 6, 7, 8], 0), model.row([*range(50, 80)], 0)
    model.step([(long, 200), (short, 2), (chunked, 7)])
    assert not long.logits  # its last token is still to come
    model.step([(long, 1), (fresh, 5), (short, 1), (chunked, 9)])
    assert not chunked.logits
    expected = reference_logits(models["llama"], [long, fresh, short], torch.float64)
    for row, theirs in zip((long, fresh, short), expected, strict=True):
        torch.testing.assert_close(row.logits[-1], theirs[-1], rtol=0, atol=1e-5)


def test_a_step_without_logit_rows_returns_none_and_inputs_are_not_written(models: dict[str, Path]) -> None:
    source = open_model(str(models["llama"]))
    model = PagedModel(source, torch.float64, pp_size=2)
    row = model.row([5, 6, 7, 8], 0)
    model.step([(row, 3)])
    assert row.logits == []
    batch, _, _ = model._batch([(row, 1)])
    hidden = torch.randn(1, source.config.hidden_size, dtype=torch.float64)
    before = hidden.clone()
    model.stages[1].forward(hidden, batch, model.pools[1])
    assert torch.equal(hidden, before)


def test_pool_has_the_bytes_it_says(models: dict[str, Path]) -> None:
    config = open_model(str(models["llama"])).config
    pool = allocate_pool(config, 3, 10, 16, torch.float32)
    assert pool.shape == (10, 3, 2, 16, 2, 16)
    assert pool.nbytes == 10 * pool_bytes_per_page(config, 3, 16, torch.float32)


def test_weights_of_another_number_of_layers_are_a_bug(models: dict[str, Path]) -> None:
    source = open_model(str(models["llama"]))
    weights = source.load(LayerRange(0, 2), torch.float64, first=True, last=False)
    with pytest.raises(AssertionError):
        StageModel(source.config, LayerRange(0, 3), weights, torch.float64, first=True, last=False)


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
def test_project_is_a_linear_map_in_every_dtype(tokens: int) -> None:
    weight, bias = torch.randn(12, 8, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    inputs = torch.randn(tokens, 8, dtype=torch.float64)
    expected = inputs @ weight.t() + bias
    torch.testing.assert_close(project(inputs, weight, bias), expected)
    torch.testing.assert_close(project(inputs.float(), weight.float(), bias.float()), expected.float())
