"""Responses of the Generate API in the words of the engine proto. Pure.

streamed: chunk chunk ... complete, for each answer by itself      whole: one complete an answer
A chunk has new tokens only, and the last one comes in a chunk: what `complete` has of text, gateways do not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from stagemesh.shared.pb import generator_pb2

_REASONS: Final = {
    generator_pb2.FINISH_REASON_STOP: "stop",
    generator_pb2.FINISH_REASON_LENGTH: "length",
    generator_pb2.FINISH_REASON_ABORT: "abort",
}


class EngineAnswer:
    """All answers to one request; `pb` are the engine's messages, `prompt` its token ids as far as they are known."""

    def __init__(
        self, pb: Any, wanted: generator_pb2.GenerateRequest, *, stream: bool, stop_token_ids: Sequence[int]
    ) -> None:
        self._pb, self._stream, self._stop_token_ids = pb, stream, frozenset(stop_token_ids)
        self._prompt = list(wanted.token_ids.ids)
        self._last: dict[int, int] = {}  # the last token of each answer

    def take(self, response: generator_pb2.GenerateResponse) -> Iterator[Any]:
        """Its messages."""
        if response.token_ids:
            self._last[response.index] = response.token_ids[-1]
        if self._stream and (response.token_ids or response.prompt_logprobs):
            yield self._pb.GenerateResponse(chunk=self._chunk(response))
        if response.HasField("finished"):
            yield self._pb.GenerateResponse(complete=self._complete(response))

    def _chunk(self, response: generator_pb2.GenerateResponse) -> Any:
        return self._pb.GenerateStreamChunk(
            token_ids=response.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(response.token_ids),  # of this chunk: gateways add them up
            index=response.index,
            **self._logprobs(response),
        )

    def _complete(self, response: generator_pb2.GenerateResponse) -> Any:
        finished = response.finished
        return self._pb.GenerateComplete(
            output_ids=[] if self._stream else response.token_ids,
            finish_reason=_REASONS[finished.finish_reason],
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            cached_tokens=finished.usage.cached_tokens,
            index=response.index,
            **({} if self._stream else self._logprobs(response)),
            **self._matched(response),
        )

    def _matched(self, response: generator_pb2.GenerateResponse) -> dict[str, Any]:
        """The stop string that ended it, or the token of those that the client named."""
        if response.finished.stop:
            return {"matched_stop_str": response.finished.stop}
        last = self._last.get(response.index)
        stopped = response.finished.finish_reason == generator_pb2.FINISH_REASON_STOP
        return {"matched_token_id": last} if stopped and last in self._stop_token_ids else {}

    def _logprobs(self, response: generator_pb2.GenerateResponse) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if response.logprobs:
            told["output_logprobs"] = self._pb.OutputLogProbs(
                token_logprobs=[each.logprob for each in response.logprobs],
                token_ids=response.token_ids,
                top_logprobs=[self._top(each) for each in response.logprobs],
            )
        if response.prompt_logprobs:
            value, top = self._pb.InputTokenLogProb, self._pb.TopLogProbs
            told["input_logprobs"] = self._pb.InputLogProbs(  # nothing is said of the first token
                token_logprobs=[value(), *(value(value=each.logprob) for each in response.prompt_logprobs)],
                token_ids=self._prompt,
                top_logprobs=[top(), *(self._top(each) for each in response.prompt_logprobs)],
            )
        return told

    def _top(self, said: generator_pb2.Logprobs) -> Any:
        return self._pb.TopLogProbs(
            values=[each.logprob for each in said.top], token_ids=[each.token_id for each in said.top]
        )
