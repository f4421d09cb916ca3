"""What a stage's logits were, step after step."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def spy(reference: Any) -> list[Tensor]:
    """Collects the logits of a runner on the CPU."""
    seen: list[Tensor] = []
    forward = reference._model.forward

    def keep(*arguments: object) -> Tensor:
        logits: Tensor = forward(*arguments)
        seen.append(logits.float().clone())
        return logits

    reference._model.forward = keep
    return seen


def spy_cuda(prefill: Any, decode: Any) -> list[Tensor]:
    """Collects the logits of both runners on the GPU."""
    seen: list[Tensor] = []
    run = prefill._chunks.run

    def keep_chunk(*arguments: object, **named: object) -> Tensor:
        logits: Tensor = run(*arguments, **named)
        seen.append(logits.float().cpu())
        return logits

    prefill._chunks.run = keep_chunk
    decoded = decode._graphs.run

    def keep_decoded(*arguments: object) -> Any:
        output = decoded(*arguments)
        seen.append(output.logits.float().cpu())
        return output

    decode._graphs.run = keep_decoded
    return seen
