"""Numerics on a GPU: the bfloat16 engine against the float32 one on the CPU, with the same weights; graphs on and off;
strided views in pools of more than 2^31 elements."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import SAMPLE, Step
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.cuda_runner import CudaStageRunner
from stagemesh.shared.model.cuda.decode import DecodeGraphs
from stagemesh.shared.model.cuda.layers import CudaStageModel
from stagemesh.shared.model.cuda.prefill import PrefillForward
from stagemesh.shared.model.layers import allocate_pool
from stagemesh.shared.model.source import ModelSource
from tests.gpu.models import PAGE, chunk, cpu_stage, cuda_stage, decode_step, join, open_small, run_cuda
from tests.gpu.spies import spy, spy_cuda

LENGTHS = (1, 5, 16, 17, 63, 64, 100, 300)
NEW = 24
SLEEP_CYCLES = 4_000_000_000  # two seconds


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocab_size, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_logits_follow_the_reference(tmp_path: Path, head_dim: int, graphs: bool, packed: bool) -> None:
    follow(open_small(tmp_path, head_dim=head_dim), graphs=graphs, packed=packed)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_biases_and_norms_of_heads_follow_the_reference(tmp_path: Path, model_type: str) -> None:
    """What is done to a matrix's result: such a model is not packed."""
    follow(open_small(tmp_path, model_type=model_type, sliding_window=None), graphs=True, packed=True)


@pytest.mark.parametrize(("graphs", "sliding_window"), [(True, None), (False, None), (True, 50)])
def test_more_rows_than_attention_splits_follow_the_reference(
    tmp_path: Path, graphs: bool, sliding_window: int | None
) -> None:
    """37 of them, and padding up to 40."""
    source = open_small(tmp_path, num_attention_heads=32, num_key_value_heads=8, sliding_window=sliding_window)
    decode = follow(source, graphs=graphs, packed=True, count=37)
    assert decode._graphs is not None
    assert [decode._graphs._slots[0].attention(rows).whole for rows in (32, 40)] == [False, True]


def follow(source: ModelSource, *, graphs: bool, packed: bool, count: int = len(LENGTHS)) -> CudaStageRunner:
    """Teacher-forced with the reference's tokens, so that every step compares the same inputs. `count`: of prompts.
    Returns the stage that has decoded."""
    texts = list(islice(cycle(prompts(source.config.vocab_size)), count))
    num_pages = sum(-(-(len(p) + NEW) // PAGE) for p in texts)
    reference = cpu_stage(source, num_pages=num_pages)
    prefill, pool, stream = cuda_stage(source, "prefill", num_pages=num_pages)
    rows = 2 * len(texts)
    decode, _, stream_2 = cuda_stage(
        source, "decode", num_pages=num_pages, max_rows=rows, graphs=graphs, pool=pool, packed=packed
    )
    for runner in (reference, prefill, decode):
        join(runner, texts, NEW)
    spy_cpu, spy_gpu = spy(reference), spy_cuda(prefill, decode)
    step = chunk(1, texts)
    ids = reference.run(step, hidden=None, sampled={}).tensor.tolist()
    run_cuda(prefill, stream, step)
    torch.cuda.synchronize()
    for made in range(NEW - 1):
        step = decode_step(made + 2, [len(p) + made for p in texts], ids)
        ids = reference.run(step, hidden=None, sampled={}).tensor.tolist()
        run_cuda(decode, stream_2, step)
    assert len(spy_cpu) == len(spy_gpu) == NEW
    errors, flips, near = [], 0, 0
    for exact, ours in zip(spy_cpu, spy_gpu, strict=True):
        errors.append(float((ours - exact).norm() / exact.norm()))
        flipped = ours.argmax(-1) != exact.argmax(-1)
        flips += int(flipped.sum())
        top = exact.topk(2, dim=-1).values
        gaps = (top[:, 0] - top[:, 1]) / top[:, 0].abs()
        near += int((flipped & (gaps < 4 * 2**-8)).sum())
    print(
        f"{source.config.architecture}, head_dim {source.config.head_dim}, {len(texts)} rows, graphs {graphs}, "
        f"packed {packed}: "
        f"relative error of logits {max(errors):.4f}, "
        f"{flips} of {NEW * len(texts)} greedy ids differ, {near} of them near ties"
    )
    assert max(errors) < 0.03
    assert flips == near
    return decode


def test_graphs_change_nothing(tmp_path: Path) -> None:
    source = open_small(tmp_path)
    texts = prompts(source.config.vocab_size)
    num_pages = sum(-(-(len(p) + NEW) // PAGE) for p in texts)
    made = []
    for graphs in (True, False):
        prefill, pool, stream = cuda_stage(source, "prefill", num_pages=num_pages)
        decode, _, stream_2 = cuda_stage(source, "decode", num_pages=num_pages, graphs=graphs, pool=pool)
        for runner in (prefill, decode):
            join(runner, texts, NEW)
        ids = [run_cuda(prefill, stream, chunk(1, texts)).tolist()]
        for at in range(NEW - 1):
            step = decode_step(at + 2, [len(p) + at for p in texts], ids[-1])
            ids.append(run_cuda(decode, stream_2, step).tolist())
        made.append(ids)
    assert made[0] == made[1]


@pytest.mark.parametrize("num_layers", [2, 4], ids=["hidden", "ids"])
def test_what_a_step_leaves_stays_until_its_slot_is_used_again(tmp_path: Path, num_layers: int) -> None:
    """It is handed on beside the steps that follow, in other slots and of other sizes."""
    source = open_small(tmp_path)
    texts = list(islice(cycle(prompts(source.config.vocab_size)), 16))
    num_pages = sum(-(-(len(p) + NEW) // PAGE) for p in texts)
    layers = LayerRange(0, num_layers)
    decode, pool, stream = cuda_stage(source, "decode", num_pages=num_pages, num_slots=3, layers=layers)
    pool.normal_()
    torch.cuda.synchronize()
    join(decode, texts, NEW)
    counts = (3, 16, 9, 16, 1, 5, 2, 8, 4)
    steps = [
        decode_step(number, [len(p) for p in texts[:count]], list(range(3, 3 + count)))
        for number, count in enumerate(counts, start=3)
    ]
    with torch.cuda.stream(stream):
        expected = []
        for step in steps:
            expected.append(decode.prepare(step)(None).tensor.clone())
            torch.cuda.synchronize()
        for first in range(0, len(steps), 3):
            left = [decode.prepare(step)(None).tensor for step in steps[first : first + 3]]
            torch.cuda.synchronize()
            for tensor, one in zip(left, expected[first : first + 3], strict=True):
                assert torch.equal(tensor, one)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_what_steps_read_is_made_before_the_first_of_them(tmp_path: Path, role: str) -> None:
    """A stage is made on the default stream and warmed up on its own: here the former is far behind."""
    source = open_small(tmp_path, num_hidden_layers=1)
    for behind in (False, True):  # the first time kernels are loaded
        _, pool, stream = cuda_stage(source, "prefill", num_pages=8)
        weights = source.load(LayerRange(0, 1), torch.bfloat16, first=True, last=True, device="cuda")
        model = CudaStageModel(source.config, LayerRange(0, 1), weights, torch.bfloat16, first=True, last=True)
        torch.cuda.synchronize()
        if behind:
            torch.cuda._sleep(SLEEP_CYCLES)
        sampled = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        made = torch.cuda.default_stream().record_event()
        if role == "decode":
            decode = DecodeGraphs(model, pool, num_slots=1, max_rows=1, inbox=None, sampled=sampled, graphs=False)
            decode.capture(stream, lambda done, total: None)
        else:
            with torch.cuda.stream(stream), torch.inference_mode():
                PrefillForward(model, pool, 1, 16).warm_up(16)
        assert made.query()


def test_a_prompt_in_chunks_gives_the_same_id(tmp_path: Path) -> None:
    """Only its last chunk is asked for an id."""
    source = open_small(tmp_path)
    text = prompts(source.config.vocab_size)[-1]
    made = []
    for sizes in ((len(text),), (128, 100, len(text) - 228)):
        prefill, _, stream = cuda_stage(source, "prefill", num_pages=32)
        join(prefill, [text], NEW)
        start, ids = 0, []
        for number, size in enumerate(sizes, start=1):
            is_last = start + size == len(text)
            row = np.array([(1, start, size, 0, 0, SAMPLE if is_last else 0)], dtype=np.int64)
            part = np.array(text[start : start + size], dtype=np.int64)
            ids = run_cuda(prefill, stream, Step(number, 0, row, part)).tolist()
            assert is_last or ids == [-1]
            start += size
        made.append(ids)
    assert made[0] == made[1]


def test_a_draw_is_the_cpus_draw(tmp_path: Path) -> None:
    """The same logits give the same ids on both devices, whatever the row."""
    from stagemesh.shared.engine.sampler import RowSampling, sample

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(32, 4096, generator=generator) * 3
    rows = [RowSampling(0.7 + 0.02 * i, (0, 50)[i % 2], (1.0, 0.9)[i // 2 % 2], seed=i) for i in range(32)]
    positions = list(range(100, 132))
    assert sample(logits, rows, positions).tolist() == sample(logits.cuda(), rows, positions).cpu().tolist()


def test_sampling_options_run(tmp_path: Path) -> None:
    source = open_small(tmp_path)
    texts = prompts(source.config.vocab_size)
    num_pages = sum(-(-(len(p) + NEW) // PAGE) for p in texts)
    params = SamplingParams(NEW, temperature=0.8, top_p=0.9, seed=5, min_tokens=4, eos_token_ids=(2,), logprobs=3)
    made = []
    for order in (texts, texts):
        prefill, _, stream = cuda_stage(source, "prefill", num_pages=num_pages)
        join(prefill, order, NEW, params)
        with torch.cuda.stream(stream):
            output = prefill.prepare(chunk(1, order))(None)
        made.append(output.tensor.tolist())
        assert all(len(told.top_ids) == 3 for told in output.logprobs.values())
        assert len(output.logprobs) == len(texts)
    assert made[0] == made[1]


def test_pages_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    """The same prompt in low pages and in pages whose elements lie beyond 2^31: the same ids, both kernels."""
    source = open_small(tmp_path, num_hidden_layers=2)
    each = 2 * 2 * PAGE * 2 * 64  # elements of a page
    num_pages = 2**32 // each + 64
    pool = allocate_pool(source.config, 2, num_pages, PAGE, torch.bfloat16, "cuda")
    assert pool.numel() > 2**32
    text = prompts(source.config.vocab_size)[-1]
    made = []
    for first in (0, num_pages - 40):
        prefill, _, stream = cuda_stage(source, "prefill", num_pages=num_pages, pool=pool)
        decode, _, stream_2 = cuda_stage(source, "decode", num_pages=num_pages, pool=pool)
        for runner in (prefill, decode):
            join(runner, [text], NEW)
            runner._residents[1].pages = list(range(first, first + 40))
        ids = run_cuda(prefill, stream, chunk(1, [text])).tolist()
        for at in range(NEW - 1):
            ids += run_cuda(decode, stream_2, decode_step(at + 2, [len(text) + at], ids[-1:])).tolist()
        made.append(ids)
    assert made[0] == made[1]


def test_retracted_pages_come_back(tmp_path: Path) -> None:
    from stagemesh.shared.engine.cuda_copier import CudaPageCopier

    source = open_small(tmp_path)
    pool = allocate_pool(source.config, 4, 64, PAGE, torch.bfloat16, "cuda")
    pool.copy_(torch.randn(pool.shape, device="cuda"))
    before = pool[[3, 9, 27]].clone()
    copier = CudaPageCopier(pool)
    saved = copier.save((3, 9, 27))()
    pool.zero_()
    torch.cuda.synchronize()
    copier.load(saved, (40, 1, 2))()
    assert torch.equal(pool[[40, 1, 2]], before)
