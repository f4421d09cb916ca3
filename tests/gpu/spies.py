"""What a stage's logits were, step after step."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def spies(reference: Any, prefill: Any, decode: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Lists that collect the logits of the reference and of both GPU runners."""
    exact: list[Tensor] = []
    ours: list[Tensor] = []
    forward = reference._model.forward

    def keep(*arguments: object) -> Tensor:
        logits: Tensor = forward(*arguments)
        exact.append(logits.float().clone())
        return logits

    reference._model.forward = keep
    run = prefill._chunks.run

    def keep_chunk(*arguments: object, **named: object) -> Tensor:
        logits: Tensor = run(*arguments, **named)
        ours.append(logits.float().cpu())
        return logits

    prefill._chunks.run = keep_chunk
    decoded = decode._graphs.run

    def keep_decoded(*arguments: object) -> Any:
        output = decoded(*arguments)
        ours.append(output.logits.float().cpu())
        return output

    decode._graphs.run = keep_decoded
    return exact, ours
