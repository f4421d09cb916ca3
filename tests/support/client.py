"""A client of the Generate API, as tests need one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client

GENERATOR = generator_pb2.DESCRIPTOR.services_by_name["Generator"]
ANSWER_LIMIT_S = 300.0


@dataclass(slots=True)
class Answer:
    """What a request has brought so far; `reason` is empty until it has ended."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    finished: generator_pb2.Finished | None = None


def token_request(token_ids: Sequence[int], max_tokens: int, **options: Any) -> generator_pb2.GenerateRequest:
    request = generator_pb2.GenerateRequest(max_tokens=max_tokens, **options)
    request.token_ids.ids.extend(token_ids)
    return request


async def generate(
    client: Client,
    request: generator_pb2.GenerateRequest,
    *,
    on_response: Callable[[Answer], bool] | None = None,
    timeout_s: float = ANSWER_LIMIT_S,
) -> Answer:
    """Follows a request to its end, or until `on_response` returns False: then the client goes away."""
    answer = Answer()
    responses = client.receive("Generate", request, timeout_s=timeout_s)
    try:
        async for response in responses:
            answer.token_ids += response.token_ids
            answer.text += response.text
            if response.HasField("finished"):
                answer.finished = response.finished
                name = generator_pb2.FinishReason.Name(response.finished.finish_reason)
                answer.reason = name.removeprefix("FINISH_REASON_").lower()
            if on_response is not None and not on_response(answer):
                return answer
    finally:
        await responses.aclose()
    return answer
