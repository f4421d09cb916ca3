"""What routers and heads say to each other."""

from __future__ import annotations

from collections.abc import Iterable

from stagemesh.shared.codec.commands import logprobs_from_pb, logprobs_to_pb
from stagemesh.shared.codec.mesh import request_from_pb, request_to_pb
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.pb import instance_pb2

_ENDS: dict[SequenceEnd | None, instance_pb2.SequenceEnd] = {
    None: instance_pb2.SEQUENCE_END_NONE,
    SequenceEnd.STOP: instance_pb2.SEQUENCE_END_STOP,
    SequenceEnd.LENGTH: instance_pb2.SEQUENCE_END_LENGTH,
    SequenceEnd.FAILED: instance_pb2.SEQUENCE_END_FAILED,
    SequenceEnd.REJECTED: instance_pb2.SEQUENCE_END_REJECTED,
    SequenceEnd.RECOMPUTE: instance_pb2.SEQUENCE_END_RECOMPUTE,
    SequenceEnd.LOST: instance_pb2.SEQUENCE_END_LOST,
}
_ENDS_BACK = {wire: end for end, wire in _ENDS.items()}


def outputs_to_pb(outputs: Iterable[SequenceOutput]) -> list[instance_pb2.SequenceOutput]:
    return [
        instance_pb2.SequenceOutput(
            request=request_to_pb(output.request),
            token_ids=output.token_ids,
            end=_ENDS[output.end],
            error=output.error,
            logprobs=[logprobs_to_pb(logprobs) for logprobs in output.logprobs],
            cached_tokens=output.cached_tokens,
            prompt_logprobs=[logprobs_to_pb(told) for told in output.prompt_logprobs],
        )
        for output in outputs
    ]


def output_from_pb(message: instance_pb2.SequenceOutput) -> SequenceOutput:
    """Raises ProtocolViolation for an end that this version does not know."""
    if message.end not in _ENDS_BACK:
        raise ProtocolViolation(f"unknown end of a sequence: {message.end}")
    end = _ENDS_BACK[message.end]
    logprobs = tuple(logprobs_from_pb(logprobs) for logprobs in message.logprobs)
    return SequenceOutput(
        request_from_pb(message.request),
        tuple(message.token_ids),
        end,
        message.error,
        logprobs,
        message.cached_tokens,
        tuple(logprobs_from_pb(told) for told in message.prompt_logprobs),
    )
