"""Heads trust nobody with what would break a stage."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stagemesh.services.decode.head import DecodeHead
from stagemesh.services.prefill.head import PrefillHead
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.codec.session import output_from_pb, outputs_to_pb
from stagemesh.shared.core.commands import SAMPLE, Step
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.errors import Bug, ProtocolViolation
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import instance_pb2
from tests.support.instances import DECODE, PREFILL, instance_of

VOCAB = 100


def context(info: Any) -> Any:
    log = Log(logging.getLogger("stagemesh.test"))
    executor = SimpleNamespace(launch_s=0.0, sampled=lambda *_: None, forget_sampled_before=lambda _: None)
    return cast("Any", SimpleNamespace(info=info, log=log, vocab_size=VOCAB, tracer=Tracer("x/0"), executor=executor))


@pytest.mark.parametrize("token_ids", [[5, VOCAB], [-1, 5], [2**40]])
def test_a_prompt_with_an_id_outside_the_vocabulary_never_reaches_a_stage(token_ids: list[int]) -> None:
    async def run() -> int:
        scheduler = PrefillScheduler(
            num_pages=8, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1
        )
        head = PrefillHead(context(instance_of("p", PREFILL)), scheduler)
        ref = instance_pb2.RequestRef(request_id="r", attempt=1)
        sampling = instance_pb2.Sampling(max_tokens=1, top_p=1.0)
        submit = instance_pb2.SessionUp.Submit(request=ref, sampling=sampling, token_ids=to_bytes(token_ids))
        head.on_submit(submit)
        return scheduler.held["sequences"]

    assert asyncio.run(run()) == 0


def test_a_first_token_outside_the_vocabulary_is_a_violation() -> None:
    async def run() -> None:
        scheduler = DecodeScheduler(num_pages=8, page_size=4, num_microbatches=1, max_running=4)
        head = DecodeHead(context(instance_of("d", DECODE)), scheduler)
        with pytest.raises(ProtocolViolation, match=r"must be in 0..99, got 100"):
            head.on_first_token(RequestRef("r", 1), VOCAB)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("token_ids", "what"),
    [
        ([5, VOCAB, -1], "id 100 in a row that samples one of 100"),
        ([-1, 5, -1], "id -1 in a row that samples one"),
        ([2**40, 5, -1], "id 1099511627776 in a row that samples one"),
        ([5, 5, 7], "id 7 in a row that samples none"),
        ([5, 5], "of 3 rows came back with 2 ids"),
        ([0, VOCAB - 1, -1], None),
    ],
)
def test_an_id_of_no_vocabulary_that_comes_from_a_device_goes_no_further(
    token_ids: list[int], what: str | None
) -> None:
    async def run() -> None:
        prefill = PrefillScheduler(num_pages=8, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1)
        decode = DecodeScheduler(num_pages=8, page_size=4, num_microbatches=1, max_running=4)
        heads: tuple[Any, ...] = (
            PrefillHead(context(instance_of("p", PREFILL)), prefill),
            DecodeHead(context(instance_of("d", DECODE)), decode),
        )
        rows = np.array([(handle, 0, 1, 0, 0, flags) for handle, flags in ((1, SAMPLE), (2, SAMPLE), (3, 0))])
        for head in heads:
            scheduler = head._scheduler
            scheduler.issuer.outstanding[1] = Step(1, 0, rows, np.zeros(3, dtype=np.int64))
            took: list[int] = []
            scheduler.result = lambda number, *_, took=took: took.append(number)
            with nullcontext() if what is None else pytest.raises(Bug, match=f"step 1 .*{what}"):
                head.on_result(1, np.array(token_ids), {})
            assert took == ([1] if what is None else [])

    asyncio.run(run())


def end_of(head: Any, scheduler: Any, *, lost: bool) -> SequenceEnd | None:
    """What a router hears of a request whose ticket is closed."""

    async def run() -> SequenceEnd | None:
        ref, sampling = instance_pb2.RequestRef(request_id="r", attempt=1), instance_pb2.Sampling(max_tokens=4, top_p=1)
        ids = to_bytes([1, 2])
        submit = instance_pb2.SessionUp.Submit(
            request=ref, sampling=sampling, token_ids=ids, prompt_tokens=2, ticket_id="t"
        )
        head.on_submit(submit)
        await head.CloseTicket(instance_pb2.CloseTicketRequest(ticket_id="t", reason="so", epoch=1, lost=lost), None)
        (output,) = scheduler.poll().outputs
        assert isinstance(output, SequenceOutput)
        return output_from_pb(outputs_to_pb([output])[0]).end

    return asyncio.run(run())


@pytest.mark.parametrize(("lost", "end"), [(True, SequenceEnd.LOST), (False, SequenceEnd.FAILED)])
def test_the_router_hears_whether_a_closed_ticket_is_the_requests_own_fault(lost: bool, end: SequenceEnd) -> None:
    decode = DecodeScheduler(num_pages=8, page_size=4, num_microbatches=1, max_running=4)
    assert end_of(DecodeHead(context(instance_of("d", DECODE)), decode), decode, lost=lost) is end
    prefill = PrefillScheduler(num_pages=8, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1)
    assert end_of(PrefillHead(context(instance_of("p", PREFILL)), prefill), prefill, lost=lost) is end


WRONG_SAMPLING = [
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 1 << 40}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": -1.0}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0.0}),
    ("min_p", {"min_p": math.nan}),
    ("min_tokens", {"min_tokens": -1}),
    ("logprobs", {"logprobs": 1 << 40}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
]


def heads() -> list[Any]:
    decode = DecodeScheduler(num_pages=8, page_size=4, num_microbatches=1, max_running=4)
    prefill = PrefillScheduler(num_pages=8, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1)
    return [
        DecodeHead(context(instance_of("d", DECODE)), decode),
        PrefillHead(context(instance_of("p", PREFILL)), prefill),
    ]


def submit_of(name: str, **fields: Any) -> instance_pb2.SessionUp.Submit:
    sampling = instance_pb2.Sampling(**{"max_tokens": 4, "top_p": 1.0, **fields.pop("sampling", {})})
    ref = instance_pb2.RequestRef(request_id=name, attempt=1)
    right = {"token_ids": to_bytes([1, 2]), "prompt_tokens": 2, "ticket_id": "t"}
    return instance_pb2.SessionUp.Submit(request=ref, sampling=sampling, **{**right, **fields})


def refusals(head: Any, *submits: instance_pb2.SessionUp.Submit) -> list[str]:
    """What a router hears at once."""

    async def run() -> list[str]:
        heard: list[str] = []
        head._sessions.deliver = lambda outputs: heard.extend(output.error for output in outputs)
        for submit in submits:
            head.on_submit(submit)
        for submit in submits:
            head._scheduler.abort(RequestRef(submit.request.request_id, 1))
        head.check_integrity()
        return heard

    return asyncio.run(run())


@pytest.mark.parametrize(("field", "sampling"), WRONG_SAMPLING)
def test_sampling_that_would_break_a_stage_is_refused(field: str, sampling: dict[str, Any]) -> None:
    for head in heads():
        (error,) = refusals(head, submit_of("r", sampling=sampling))
        assert error.startswith(f"{field}: must be ")


def test_a_ticket_is_one_requests_alone() -> None:
    for head in heads():
        (error,) = refusals(head, submit_of("one"), submit_of("other"))
        assert error == "ticket_id: 't' is another request's"


@pytest.mark.parametrize("fields", [{"prompt_tokens": 0}, {"ticket_id": ""}])
def test_decode_takes_no_prompt_without_tokens_or_ticket(fields: dict[str, Any]) -> None:
    (error,) = refusals(heads()[0], submit_of("r", **fields))
    assert error.startswith(f"{next(iter(fields))}: must ")
