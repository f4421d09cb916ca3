"""The engine proto of vLLM, which OpenAI gateways drive, in front of the Generator: requests and answers are put into
other words here, and everything is decided there."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from stagemesh.services.router.engine_answer import EngineAnswer
from stagemesh.services.router.engine_request import generate_request
from stagemesh.services.router.generator import GeneratorService
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.tokenizer import Tokenizer
from stagemesh.shared.model.tokenizer_bundle import tokenizer_bundle
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.engine_proto import EngineProto

BUNDLE_PART_BYTES: Final = 1 << 20


class EngineService:
    """One worker, whose batches are the whole mesh's."""

    NOT_SERVED: Final = frozenset({"Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"})

    def __init__(self, proto: EngineProto, generator: GeneratorService, tokenizer: Tokenizer, name: str) -> None:
        """`name` is what clients call the model."""
        self._pb, self._common = proto.engine, proto.common
        self._generator, self._tokenizer, self._name = generator, tokenizer, name
        self._started_s = time.monotonic()
        self._bundle: bytes | None = None

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:  # noqa: N802
        wanted = generate_request(request, self._generator.limits())
        stop_token_ids = request.sampling_params.stop_token_ids
        answer = EngineAnswer(self._pb, wanted, stream=request.stream, stop_token_ids=stop_token_ids)
        async with aclosing(self._generator.Generate(wanted, context)) as responses:
            async for response in responses:
                for message in answer.take(response):
                    yield message

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        if len(request.request_ids) > (most := self._generator.max_live):
            problem = f"must be at most {most}, which is how many requests may be live, got {len(request.request_ids)}"
            raise Rejected("request_ids", problem)
        for request_id in request.request_ids:
            await self._generator.Abort(generator_pb2.AbortRequest(request_id=request_id), context)
        return self._pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        why = self._generator.why_unready
        return self._pb.HealthCheckResponse(healthy=not why, message=why)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        info = await self._generator.GetModelInfo(generator_pb2.GetModelInfoRequest(), context)
        bos = self._tokenizer.bos_token_id
        return self._pb.GetModelInfoResponse(
            model_path=self._name,  # where it lies is nobody's business, and may be another model's name elsewhere
            served_model_name=self._name,
            is_generation=True,
            max_context_length=info.max_request_tokens,
            max_req_input_len=info.max_request_tokens - 1,
            vocab_size=info.vocab_size,
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
            bos_token_id=0 if bos is None else bos,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._pb.GetServerInfoResponse(
            active_requests=self._generator.num_live,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        live, waiting = self._generator.num_live, self._generator.num_waiting
        load = self._pb.SchedulerLoad(num_running_reqs=live - waiting, num_waiting_reqs=waiting, num_total_reqs=live)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return self._pb.GetLoadsResponse(timestamp=now, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:  # noqa: N802
        """A zip of it, in parts; the last one has the hash of them all."""
        if self._bundle is None:
            self._bundle = await asyncio.to_thread(tokenizer_bundle, self._tokenizer)
        bundle, digest = self._bundle, hashlib.sha256(self._bundle).hexdigest()
        for at in range(0, len(bundle), BUNDLE_PART_BYTES):
            part = bundle[at : at + BUNDLE_PART_BYTES]
            is_last = at + len(part) == len(bundle)
            yield self._common.GetTokenizerChunk(data=part, sha256=digest if is_last else "")
