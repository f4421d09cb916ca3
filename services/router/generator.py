"""The Generator service: validates, tokenizes, follows a request and streams it."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, nullcontext
from typing import Any, Final, TypeVar

from stagemesh.services.router.answer import Answer, FreshToken
from stagemesh.services.router.attempt import Start, Wanted
from stagemesh.services.router.directory import MeshView
from stagemesh.services.router.entrance import Entrance
from stagemesh.services.router.merged import merged
from stagemesh.services.router.placement import max_prompt_tokens, max_request_tokens
from stagemesh.services.router.record import RequestRecord, RouterRecords
from stagemesh.services.router.request import Ending, LiveRequest
from stagemesh.services.router.several import Admission, Groups, Part, Prompt, Total
from stagemesh.services.router.stop import StopMatcher
from stagemesh.services.router.trace import traced
from stagemesh.services.router.turns import Turns
from stagemesh.services.router.validate import MAX_ANSWERS, Limits, check_prompt, priority_of, sampling_params
from stagemesh.shared.config import RouterSection
from stagemesh.shared.core.directory import Role
from stagemesh.shared.engine.schedule.output import SequenceEnd
from stagemesh.shared.errors import Exhausted, Rejected
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.tokenizer import Tokenizer
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.otel import NO_SPANS, Spans
from stagemesh.shared.obs.trace_ids import TRACEPARENT, TraceIds, request_id_of
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.guard import Callers, header

T = TypeVar("T")
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
        start: Start,
        callers: Callers | None = None,
        ageing_s: float = 10.0,
        max_ahead: int = 128,
        spans: Spans = NO_SPANS,
        log: Log,
    ) -> None:
        """Waiting for `ageing_s` is worth a point of priority. `max_ahead` requests for each prefill instance are sent
        off before those before them have their first token."""
        self._section, self._model, self._dtype, self._config = section, model, dtype, config
        self._tokenizer, self._mesh, self._start, self._log = tokenizer, mesh, start, log
        self._callers = callers or Callers(None, log)
        self._max_ahead = max_ahead
        self._entrance = Entrance(section, self._callers, self._room_ahead, ageing_s=ageing_s)
        self._waiting = self._entrance.waiting
        self._turns = Turns()
        self._groups = Groups()
        self._spans, self.records = spans, RouterRecords(spans)

    # -- rpcs --

    async def Generate(  # noqa: N802
        self, request: generator_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[generator_pb2.GenerateResponse, None]:
        count = min(max(request.n, 1), MAX_ANSWERS)  # a wrong one is refused by the first
        (request_id, trace), seed = self._named(request, context), secrets.randbits(63)
        prompt, admission, total = Prompt(lambda: self._tokenize(request)), Admission(), Total(count)
        parts = [Part(request, request_id, index, count, seed, prompt, admission) for index in range(count)]
        if request_id in self._groups or request_id in self._entrance.live:
            parts = parts[:1]  # which is refused
        with self._groups.group(request_id, parts) if len(parts) > 1 else nullcontext():
            streams = [self._answer(part, context, trace) for part in parts]
            async with aclosing(streams[0] if len(parts) == 1 else merged(streams)) as answers:
                async for response in answers:
                    total.add(response)
                    yield response

    async def _answer(
        self, part: Part, context: Any, trace: TraceIds | None
    ) -> AsyncGenerator[generator_pb2.GenerateResponse, None]:
        """One of the answers that a request asks for."""
        with self.records.request() as record:
            client = record.client = self._callers.caller(context).name
            part.admission.decide(lambda: self._let_in(part, client, record.arrived_s))
            record.trace = trace if trace is None or part.count == 1 else traced(part.name, "")
            name = self._entrance.admit(part.name, record)
            live = None
            try:
                live = await self._taken(part, record)
                self._entrance.send_off(live, client)
                async for response in self._follow(live, part):
                    yield response
            finally:
                if live is not None:
                    live.release()
                    self._log_end(live, client)
                self._entrance.leave(name)

    async def Abort(  # noqa: N802
        self, request: generator_pb2.AbortRequest, context: Any
    ) -> generator_pb2.AbortResponse:
        client, names = self._callers.caller(context).name, self._groups.names(request.request_id)
        lives = [live for name in names if (live := self._entrance.of(name, client)) is not None]
        for live in lives:
            live.abort()
        return generator_pb2.AbortResponse(was_live=bool(lives))

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
            max_request_tokens=self.limits().max_request_tokens,
        )

    # -- a request's way --

    def _named(self, request: generator_pb2.GenerateRequest, context: Any) -> tuple[str, TraceIds | None]:
        """Its id, and its trace. A request that is traced and has no id gets one that names its trace."""
        if not self._spans.enabled:
            return request.request_id or uuid.uuid4().hex, None
        trace = traced(request.request_id, header(context.invocation_metadata(), TRACEPARENT))
        return request.request_id or request_id_of(trace), trace

    def limits(self) -> Limits:
        """Of this moment. A request may lose its KV when all but its last token are made; a prefill instance must hold
        those then."""
        holds, again = max_request_tokens(self._mesh), max_prompt_tokens(self._mesh)
        bounds = (self._config.max_context, holds, None if again is None else again + 1)
        return Limits(
            vocab_size=self._config.vocab_size,
            max_request_tokens=min(bound for bound in bounds if bound is not None),
            max_text_bytes=self._section.max_text_bytes,
            eos_token_ids=self._config.eos_token_ids,
            default_max_tokens=self._section.default_max_tokens,
        )

    def _room_ahead(self) -> int:
        return self._max_ahead * max(1, sum(info.role is Role.PREFILL for info in self._mesh))

    def _let_in(self, part: Part, client: str, now_s: float) -> None:
        """All answers to a request, or none. Nobody loses its place to what is refused. Raises Rejected, Exhausted."""
        crowded_out = self._entrance.check_room(client, now_s, part.count)
        check_prompt(part.request, self.limits())
        if part.request_id in self._entrance.live or self._groups.of_another(part):
            raise Rejected("request_id", f"{part.request_id!r} is in use by a live request")
        self._entrance.make_room(crowded_out, now_s)

    async def _taken(self, part: Part, record: RequestRecord) -> LiveRequest:
        """It is valid, and goes its way. Raises Rejected."""
        request, request_id = part.request, part.name
        token_ids = await self._in_time(request_id, part.prompt.token_ids())
        if not request.HasField("token_ids"):
            self.records.tokenized(record)
        sampling = part.own(sampling_params(request, token_ids, self.limits(), seed=part.seed))
        live = self._entrance.live[request_id] = LiveRequest(
            Wanted(request_id, sampling, token_ids, priority_of(request), record.arrived_s),
            self._start,
            self._turns,
            on_first_token=lambda: self._entrance.served(request_id, time.monotonic()),
            max_attempts=self._section.max_attempts,
        )
        self.records.taken(record, live)
        return live

    async def _in_time(self, request_id: str, work: Awaitable[T]) -> T:
        """The work's result. Raises Exhausted when the request has waited as long as it may."""
        try:
            async with asyncio.timeout(self._waiting.left_s(request_id, time.monotonic())):
                return await work
        except TimeoutError:
            raise self._waiting.too_long(time.monotonic()) from None

    async def _first(self, live: LiveRequest) -> tuple[list[FreshToken], Ending | None]:
        """What comes first. A token that has come is never too late, whoever else is being served."""
        if live.first_token_s is None:
            try:
                return await self._in_time(live.wanted.request_id, live.next())
            except Exhausted as error:
                if live.first_token_s is None:
                    live.fail(error)
                    raise
        return await live.next()

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

    async def _follow(self, live: LiveRequest, part: Part) -> AsyncIterator[generator_pb2.GenerateResponse]:
        request = part.request
        stops = StopMatcher(request.stop, include=request.include_stop)
        answer = Answer(part.request_id, self._tokenizer.stream(), stops, live.sampling.min_tokens, part.index)
        fresh, ending = await self._first(live)
        answer.push_prompt(live.prompt_logprobs)
        while True:
            answer.push(fresh)
            if answer.matched is not None:
                ending = live.stopped(answer.matched, answer.num_tokens)
                live.release()
            if ending is not None:
                break
            if not request.whole:
                yield answer.take()
            fresh, ending = await live.next()
        answer.finish()
        response = answer.take()
        response.finished.CopyFrom(_finished(live, ending))
        yield response

    def _log_end(self, live: LiveRequest, client: str) -> None:
        self._log.info(
            "a request has ended",
            request_id=live.wanted.request_id,
            attempt=0 if live.attempt is None else live.attempt.ref.attempt,
            attempts=live.num_attempts,
            outcome=live.outcome,
            api_key=client or None,
            prompt_tokens=len(live.token_ids),
            completion_tokens=live.completion_tokens,
            total_s=round(time.monotonic() - live.started_s, 4),
        )

    # -- what operators ask --

    def describe_live(self, now_s: float) -> Iterator[Entry]:
        """Every request that is not over. `now_s` is CLOCK_MONOTONIC."""
        return self.records.describe(now_s)

    def abort(self, request_id: str) -> bool:
        """Whosever it is. False if there is none of that name, or its prompt is still being read."""
        live = self._entrance.live.get(request_id)
        if live is not None:
            self._log.info("an operator ends a request", request_id=request_id)
            live.abort()
        return live is not None

    # -- the end of the service --

    def refuse(self) -> None:
        """No new requests from now on."""
        self._entrance.refuse()

    async def empty(self) -> None:
        """Returns when no request is live."""
        await self._entrance.empty()

    # -- views --

    @property
    def why_unready(self) -> str:
        """Why it cannot serve now; empty if it can."""
        if self._entrance.refuses:
            return "this router is being stopped"
        roles = {info.role for info in self._mesh if info.accepting}
        missing = sorted(role.value for role in set(Role) - roles)
        return f"no {' and no '.join(missing)} instance is there to take requests" if missing else ""

    @property
    def max_live(self) -> int:
        return self._section.max_live_requests

    @property
    def num_live(self) -> int:
        return len(self._entrance.live)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_integrity(self) -> None:
        """Raises Bug unless those who wait are the live ones without a token."""
        self._entrance.check_integrity()


def _finished(live: LiveRequest, ending: Ending) -> generator_pb2.Finished:
    return generator_pb2.Finished(
        finish_reason=_REASONS[ending.end],
        stop=ending.stop,
        usage=generator_pb2.Usage(
            prompt_tokens=len(live.token_ids),
            completion_tokens=live.completion_tokens,
            cached_tokens=live.cached_tokens,
        ),
        timing=generator_pb2.Timing(first_token_s=live.first_token_s or 0.0, total_s=time.monotonic() - live.started_s),
    )
