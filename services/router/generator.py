"""The Generator service: validates, tokenizes, follows a request and streams it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

from stagemesh.services.router.answer import Answer
from stagemesh.services.router.directory import MeshView
from stagemesh.services.router.opening import Tickets
from stagemesh.services.router.placement import max_prompt_tokens, max_request_tokens
from stagemesh.services.router.record import RouterRecords
from stagemesh.services.router.request import Ending, LiveRequest
from stagemesh.services.router.stop import StopMatcher
from stagemesh.services.router.turns import Turns
from stagemesh.services.router.validate import Limits, check_prompt, sampling_params
from stagemesh.shared.config import RouterSection
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.output import SequenceEnd
from stagemesh.shared.errors import Exhausted, Rejected, Retryable
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.tokenizer import Tokenizer
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import generator_pb2

GENERATOR = generator_pb2.DESCRIPTOR.services_by_name["Generator"]
_REASONS: Final = {
    SequenceEnd.STOP: generator_pb2.FINISH_REASON_STOP,
    SequenceEnd.LENGTH: generator_pb2.FINISH_REASON_LENGTH,
    None: generator_pb2.FINISH_REASON_ABORT,
}


class GeneratorService:
    """The public face of a mesh."""

    def __init__(
        self,
        *,
        section: RouterSection,
        model: str,
        dtype: str,
        config: ModelConfig,
        tokenizer: Tokenizer,
        mesh: MeshView,
        tickets: Tickets,
        log: Log,
    ) -> None:
        self._section, self._model, self._dtype, self._config = section, model, dtype, config
        self._tokenizer, self._mesh, self._tickets, self._log = tokenizer, mesh, tickets, log
        self._live: dict[str, LiveRequest | None] = {}
        self._turns = Turns()
        # heads may still be letting go of a request whose id is used again, here or by another router
        self._attempts = itertools.count(secrets.randbelow(1 << 30) + 1)
        self._refusing = False
        self.records = RouterRecords()
        self._empty = asyncio.Event()

    # -- rpcs --

    async def Generate(  # noqa: N802
        self, request: generator_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generator_pb2.GenerateResponse]:
        with self.records.request() as record:
            limits = self._limits()
            check_prompt(request, limits)
            request_id = record.request_id = self._admit(request.request_id or uuid.uuid4().hex)
            live = None
            try:
                token_ids = await self._tokenize(request)
                if not request.HasField("token_ids"):
                    self.records.tokenized(record)
                sampling = sampling_params(request, len(token_ids), limits, seed=secrets.randbits(63))
                live = self._live[request_id] = LiveRequest(
                    RequestRef(request_id, next(self._attempts)), sampling, token_ids, turns=self._turns
                )
                self.records.taken(record, live)
                await live.start(self._mesh, self._tickets)
                async for response in self._follow(live, request):
                    yield response
            finally:
                if live is not None:
                    live.release()
                    self._log_end(live)
                self._leave(request_id)

    async def Abort(  # noqa: N802
        self, request: generator_pb2.AbortRequest, context: Any
    ) -> generator_pb2.AbortResponse:
        live = self._live.get(request.request_id)
        if live is not None:
            live.abort()
        return generator_pb2.AbortResponse(was_live=live is not None)

    async def GetModelInfo(  # noqa: N802
        self, request: generator_pb2.GetModelInfoRequest, context: Any
    ) -> generator_pb2.GetModelInfoResponse:
        return generator_pb2.GetModelInfoResponse(
            model=self._model,
            architecture=self._config.architecture,
            vocab_size=self._config.vocab_size,
            max_context=self._config.max_context,
            eos_token_ids=self._config.eos_token_ids,
            has_chat_template=self._tokenizer.has_chat_template,
            dtype=self._dtype,
            max_request_tokens=self._limits().max_request_tokens,
        )

    # -- a request's way --

    def _limits(self) -> Limits:
        most = max_request_tokens(self._mesh)
        return Limits(
            vocab_size=self._config.vocab_size,
            max_request_tokens=self._config.max_context if most is None else most,
            max_text_bytes=self._section.max_text_bytes,
            eos_token_ids=self._config.eos_token_ids,
            default_max_tokens=self._section.default_max_tokens,
            max_prompt_tokens=max_prompt_tokens(self._mesh),
        )

    def _admit(self, request_id: str) -> str:
        if self._refusing:
            raise Retryable("this router is being stopped")
        if request_id in self._live:
            raise Rejected("request_id", f"{request_id!r} is in use by a live request")
        if len(self._live) >= self._section.max_live_requests:
            raise Exhausted(f"{len(self._live)} requests are live, which is the limit; come back later")
        self._live[request_id] = None
        return request_id

    def _leave(self, request_id: str) -> None:
        del self._live[request_id]
        if not self._live:
            self._empty.set()

    async def _tokenize(self, request: generator_pb2.GenerateRequest) -> list[int]:
        """Off the loop: a megabyte of text takes a while."""
        match request.WhichOneof("prompt"):
            case "text":
                return await asyncio.to_thread(self._tokenizer.encode, request.text)
            case "chat":
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                return await asyncio.to_thread(self._tokenizer.apply_chat, messages)
            case _:
                return list(request.token_ids.ids)

    async def _follow(
        self, live: LiveRequest, request: generator_pb2.GenerateRequest
    ) -> AsyncIterator[generator_pb2.GenerateResponse]:
        stops = StopMatcher(request.stop, include=request.include_stop)
        answer = Answer(live.ref.request_id, self._tokenizer.stream(), stops, live.sampling.min_tokens)
        ending: Ending | None = None
        while ending is None:
            fresh, ending = await live.next()
            answer.push(fresh)
            if answer.matched is not None:
                ending = live.stopped(answer.matched, answer.num_tokens)
                live.release()
            if ending is None and not request.whole:
                yield answer.take()
        answer.finish()
        response = answer.take()
        response.finished.CopyFrom(_finished(live, ending))
        yield response

    def _log_end(self, live: LiveRequest) -> None:
        self._log.info(
            "a request has ended",
            request_id=live.ref.request_id,
            attempt=live.ref.attempt,
            outcome=live.outcome,
            prompt_tokens=len(live.token_ids),
            completion_tokens=live.completion_tokens,
            total_s=round(time.monotonic() - live.started_s, 4),
        )

    # -- the end of the service --

    def refuse(self) -> None:
        """No new requests from now on."""
        self._refusing = True

    async def empty(self) -> None:
        """Returns when no request is live."""
        while self._live:
            self._empty.clear()
            await self._empty.wait()

    @property
    def num_live(self) -> int:
        return len(self._live)


def _finished(live: LiveRequest, ending: Ending) -> generator_pb2.Finished:
    return generator_pb2.Finished(
        finish_reason=_REASONS[ending.end],
        stop=ending.stop,
        usage=generator_pb2.Usage(prompt_tokens=len(live.token_ids), completion_tokens=live.completion_tokens),
        timing=generator_pb2.Timing(first_token_s=live.first_token_s or 0.0, total_s=time.monotonic() - live.started_s),
    )
