"""An answer as the client sees it: tokens become text, stop strings end it, responses are cut."""

from __future__ import annotations

from collections.abc import Sequence

from stagemesh.services.router.stop import StopMatcher
from stagemesh.shared.core.commands import TokenLogprobs
from stagemesh.shared.model.text_stream import TextStream
from stagemesh.shared.pb import generator_pb2

FreshToken = tuple[int, TokenLogprobs | None]


class Answer:
    """Collects what the next response carries. Stop strings are looked for after the first `min_tokens` tokens."""

    def __init__(
        self, request_id: str, stream: TextStream, stops: StopMatcher, min_tokens: int, index: int = 0
    ) -> None:
        self._request_id, self._stream, self._stops, self._min_tokens = request_id, stream, stops, min_tokens
        self.num_tokens, self._index = 0, index
        self._response = self._empty()
        self._text: list[str] = []

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the answer."""
        return self._stops.matched

    def push(self, fresh: Sequence[FreshToken]) -> None:
        """Takes tokens up to the one that completes a stop string; what comes after it is not part of the answer."""
        for token_id, logprobs in fresh:
            if self.matched is not None:
                return
            self.num_tokens += 1
            self._response.token_ids.append(token_id)
            if logprobs is not None:
                _put(logprobs, self._response.logprobs.add())
            piece = self._stream.push(token_id)
            self._text.append(self._stops.push(piece) if self.num_tokens > self._min_tokens else piece)

    def push_prompt(self, told: Sequence[TokenLogprobs]) -> None:
        """The log probabilities of the prompt's tokens."""
        for each in told:
            _put(each, self._response.prompt_logprobs.add())

    def finish(self) -> None:
        """No more tokens: what was held back is shown, unless a stop string has ended the answer."""
        if self.matched is None:
            self._text.append(self._stops.push(self._stream.finish()))
            self._text.append(self._stops.finish())

    def take(self) -> generator_pb2.GenerateResponse:
        """The response with all that has come since the last one."""
        response, self._response = self._response, self._empty()
        response.text = "".join(self._text)
        self._text.clear()
        return response

    def _empty(self) -> generator_pb2.GenerateResponse:
        return generator_pb2.GenerateResponse(request_id=self._request_id, index=self._index)


def _put(said: TokenLogprobs, to: generator_pb2.Logprobs) -> None:
    """In place: of a prompt there may be a hundred thousand entries, and the router's loop waits for them."""
    to.logprob = said.logprob
    add = to.top.add
    for token_id, logprob in zip(said.top_ids, said.top_logprobs, strict=True):
        add(token_id=token_id, logprob=logprob)
