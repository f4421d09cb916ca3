"""KV is summed by its writer and verified where it arrives: over the twin, which corrupts on demand, and for real."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stagemesh.services.decode.head import DecodeHead
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.core.commands import SendPlan
from stagemesh.shared.core.directory import StageInfo
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange, split_layers
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import instance_pb2, mesh_pb2, stage_pb2
from stagemesh.shared.stage.checksums import Checksums
from stagemesh.shared.stage.kv_sender import KvSender, PieceSpan, PoolLayout
from stagemesh.shared.transfer.base import Endpoint
from stagemesh.shared.transfer.memory import MemoryEndpoint, MemoryFabric
from stagemesh.shared.transfer.mooncake import MooncakeEndpoint
from tests.support.instances import DECODE, instance_of
from tests.support.kv_bench import LAYER_BYTES, PAGE_SIZE, Reports, pool_of

LAYERS = LayerRange(0, 4)
TARGETS = split_layers(4, 2, [1, 3])
HERE, THERE = [5, 0, 7], [2, 9, 4]
TOKENS = 3 * PAGE_SIZE - 1


def checks_of(spans: Sequence[PieceSpan]) -> list[mesh_pb2.KvCheck]:
    """As broker and decode head make them of a writer's report."""
    return [
        mesh_pb2.KvCheck(
            target_rank=span.target_rank,
            layers=mesh_pb2.LayerRange(lo=TARGETS[span.target_rank].lo, hi=TARGETS[span.target_rank].hi),
            first_page=span.first,
            crcs=span.crcs,
            pages=to_bytes(THERE[span.first : span.last]),
        )
        for span in spans
    ]


class Sent:
    """A prompt that was sent by one writer to two stages, chunk by chunk, with checksums."""

    def __init__(self, writer: Endpoint, targets: Sequence[Endpoint]) -> None:
        self.source = pool_of(LAYERS)
        torch.arange(self.source.numel(), out=self.source.view(-1))
        self.sinks = [pool_of(layers) for layers in TARGETS]
        self.sums = [Checksums(sink, layers) for sink, layers in zip(self.sinks, TARGETS, strict=True)]
        writer.register(self.source)
        keys = [target.publish(target.register(sink)) for target, sink in zip(targets, self.sinks, strict=True)]
        self._writer = writer
        self._targets = tuple(
            StageInfo(rank, layers, f"d{rank}", key)
            for rank, (layers, key) in enumerate(zip(TARGETS, keys, strict=True))
        )

    async def send(self) -> list[mesh_pb2.KvCheck]:
        reports = Reports()
        layout = PoolLayout(self.source.data_ptr(), LAYERS, LAYER_BYTES)
        sums = Checksums(self.source, LAYERS)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            sender = KvSender(
                self._writer,
                layout,
                page_size=PAGE_SIZE,
                spawn=group.create_task,
                report=reports,
                tracer=Tracer("test"),
                checksums=sums,
            )
            sender.join(1, SendPlan("t", TOKENS, tuple(THERE), self._targets))
            sender.progressed(1, HERE, PAGE_SIZE)
            sender.progressed(1, HERE, TOKENS)
        (outcome,) = reports.outcomes
        assert (outcome.error, len(outcome.spans)) == ("", 4)
        return checks_of(outcome.spans)

    async def errors(self, checks: Sequence[mesh_pb2.KvCheck]) -> list[str]:
        return [error for check in checks if (error := await self.sums[check.target_rank].verify(check))]


def over_the_twin(num_to_corrupt: int) -> tuple[list[str], list[int]]:
    async def run() -> tuple[list[str], list[int]]:
        fabric = MemoryFabric()
        fabric.faults.num_to_corrupt = num_to_corrupt
        sent = Sent(MemoryEndpoint(fabric, "p"), [MemoryEndpoint(fabric, f"d{rank}") for rank in range(2)])
        errors = await sent.errors(await sent.send())
        assert sum(sums.num_checked for sums in sent.sums) == 6
        return errors, [sums.num_corrupt for sums in sent.sums]

    return asyncio.run(run())


def test_what_arrives_as_it_was_sent_is_verified() -> None:
    assert over_the_twin(0) == ([], [0, 0])


def test_a_byte_that_is_wrong_is_found_and_its_page_is_named() -> None:
    errors, corrupt = over_the_twin(1)
    (error,) = errors
    assert corrupt == [1, 0]
    assert "1 of 1 pieces of layers [0, 1) are not what was sent: page 2 has crc32" in error


def test_the_real_engine_delivers_what_was_sent_and_a_flipped_bit_is_found() -> None:
    async def run() -> None:
        endpoint = MooncakeEndpoint()  # it writes to itself, which is a peer like any other
        try:
            sent = Sent(endpoint, [endpoint, endpoint])
            checks = await sent.send()
            assert await sent.errors(checks) == []
            sent.sinks[1][4, 2].view(torch.int32).view(-1)[-1] ^= 1 << 30
            (error,) = await sent.errors(checks)
            assert "of layers [1, 4) are not what was sent: page 4 has" in error
            sent.sinks[1][4, 2].view(torch.int32).view(-1)[-1] ^= 1 << 30
            assert await sent.errors(checks) == []
        finally:
            await endpoint.close()

    asyncio.run(run())


@pytest.mark.parametrize(("lo", "hi", "page"), [(0, 2, 0), (1, 5, 0), (2, 2, 0), (1, 4, 12), (1, 4, -1)])
def test_a_check_of_what_is_not_here_is_a_violation(lo: int, hi: int, page: int) -> None:
    async def run() -> None:
        with pytest.raises(ProtocolViolation, match="are not of this stage"):
            await Checksums(pool_of(TARGETS[1]), TARGETS[1]).of([page], LayerRange(lo, hi))

    asyncio.run(run())


def test_the_head_has_every_stage_verify_and_answers_with_the_first_error() -> None:
    async def run() -> None:
        scheduler = DecodeScheduler(num_pages=8, page_size=4, num_microbatches=1, max_running=4)
        asked: list[stage_pb2.Verify] = []
        log = Log(logging.getLogger("stagemesh.test"))
        context = SimpleNamespace(
            info=instance_of("d", DECODE), log=log, ask_verify=asked.append, issue=None, spawn=None, vocab_size=10
        )
        head = DecodeHead(cast("Any", context), scheduler)
        request = instance_pb2.VerifyPagesRequest(ticket_id="t", epoch=1, checks=[mesh_pb2.KvCheck(crcs=[7, 8])])
        assert "has no pages here" in (await head.VerifyPages(request, None)).error
        ref = RequestRef("r", 1)
        scheduler.submit(ref, SamplingParams(max_tokens=4), 7, "t")
        scheduler.reserve("t", ref)
        (admission,) = scheduler.poll().admissions
        verifying = asyncio.ensure_future(head.VerifyPages(request, None))
        await asyncio.sleep(0)
        (verify,) = asked
        assert verify.checks[0].pages == to_bytes(admission.pages)
        head.on_answer(stage_pb2.Answer(number=verify.number, pp_rank=0))
        head.on_answer(stage_pb2.Answer(number=verify.number, pp_rank=1, error="wrong"))
        assert (await verifying).error == "wrong"

    asyncio.run(run())
