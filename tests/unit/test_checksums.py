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
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import instance_pb2, mesh_pb2, stage_pb2
from stagemesh.shared.stage.checksums import Checksums
from stagemesh.shared.stage.kv_sender import KvSender, PieceSpan, PoolLayout
from stagemesh.shared.stage.node import StageNode
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
        self.num_wrong: list[int] = []  # by stage, as last verified
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
        verdicts = [await self.sums[check.target_rank].verify(check) for check in checks]
        self.num_wrong = [
            sum(verdict.num_wrong for check, verdict in zip(checks, verdicts, strict=True) if check.target_rank == rank)
            for rank in range(len(self.sums))
        ]
        return [verdict.error for verdict in verdicts if verdict.num_wrong]


def over_the_twin(num_to_corrupt: int) -> tuple[list[str], list[int]]:
    async def run() -> tuple[list[str], list[int]]:
        fabric = MemoryFabric()
        fabric.faults.num_to_corrupt = num_to_corrupt
        sent = Sent(MemoryEndpoint(fabric, "p"), [MemoryEndpoint(fabric, f"d{rank}") for rank in range(2)])
        errors = await sent.errors(await sent.send())
        assert sum(sums.num_checked for sums in sent.sums) == 6
        return errors, sent.num_wrong

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


class Verifying:
    """A decode head whose ticket `t` has pages, and what it asks its two stages for."""

    def __init__(self) -> None:
        self.scheduler = DecodeScheduler(num_pages=2, page_size=4, num_microbatches=1, max_running=4)
        self.asked: list[stage_pb2.Verify] = []
        context = SimpleNamespace(
            info=instance_of("d", DECODE),
            log=Log(logging.getLogger("stagemesh.test")),
            ask_verify=self.asked.append,
            issue=lambda command: self.scheduler.applied(command.number),
            spawn=lambda work: work.close(),
            vocab_size=10,
            tracer=Tracer("test"),
        )
        self.head = DecodeHead(cast("Any", context), self.scheduler)
        self.request = instance_pb2.VerifyPagesRequest(ticket_id="t", epoch=1, checks=[mesh_pb2.KvCheck(crcs=[7, 8])])

    def reserve(self, ticket_id: str) -> tuple[int, ...]:
        ref = RequestRef(ticket_id, 1)
        self.scheduler.submit(ref, SamplingParams(max_tokens=1), 7, ticket_id)
        self.scheduler.reserve(ticket_id, ref)
        (admission,) = self.scheduler.poll().admissions
        return admission.pages

    async def verify(self) -> asyncio.Future[instance_pb2.VerifyPagesReply]:
        verifying = asyncio.ensure_future(self.head.VerifyPages(self.request, None))
        await asyncio.sleep(0)
        return verifying

    def answer(self, pp_rank: int, num_wrong: int = 0) -> None:
        error = "wrong" if num_wrong else ""
        number = self.asked[-1].number
        self.head.on_answer(stage_pb2.Answer(number=number, pp_rank=pp_rank, error=error, num_wrong=num_wrong))

    @property
    def num_corrupt(self) -> list[float]:
        """As it is measured."""
        return [float(cast("Any", s.value)) for s in self.head.measure() if s.metric is metrics.KV_CORRUPT]


def test_the_head_has_every_stage_verify_answers_with_the_first_error_and_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        sides = Verifying()
        assert "has no pages here" in (await sides.head.VerifyPages(sides.request, None)).error
        pages = sides.reserve("t")
        verifying = await sides.verify()
        (verify,) = sides.asked
        assert verify.checks[0].pages == to_bytes(pages)
        sides.answer(0)
        sides.answer(1, num_wrong=2)
        assert (await verifying).error == "wrong"
        assert "KV is corrupt" in caplog.text
        assert sides.num_corrupt == [2]

    asyncio.run(run())


def test_what_is_found_of_pages_that_are_the_tickets_no_more_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """Its client went away while they were summed, and they took another ticket's KV meanwhile."""

    async def run() -> None:
        sides = Verifying()
        pages = sides.reserve("t")
        verifying = await sides.verify()
        sides.answer(0)
        sides.head.on_abort(RequestRef("t", 1))
        sides.scheduler.close_ticket("t", quiesced=True, reason="aborted")
        assert set(sides.reserve("other")) == set(pages)
        sides.answer(1, num_wrong=2)
        assert "has no pages here" in (await verifying).error
        assert "KV is corrupt" not in caplog.text
        assert sides.num_corrupt == [0]

    asyncio.run(run())


def test_a_stage_says_how_many_pieces_are_wrong_and_counts_none_as_corrupt() -> None:
    async def run() -> None:
        pool, answers = pool_of(LAYERS), asyncio.Queue[stage_pb2.Answer]()
        layers = mesh_pb2.LayerRange(lo=LAYERS.lo, hi=LAYERS.hi)
        check = mesh_pb2.KvCheck(target_rank=0, layers=layers, crcs=[1, 2], pages=to_bytes([3, 4]))
        runner = SimpleNamespace(copies=SimpleNamespace(listen=lambda _: None))
        async with asyncio.TaskGroup() as group:
            node = StageNode(
                0,
                runner=cast("Any", runner),
                executor=cast("Any", None),
                ring=cast("Any", None),
                tasks=cast("Any", SimpleNamespace(spawn=group.create_task)),
                kv=None,
                last=True,
                endpoint=cast("Any", SimpleNamespace(read_out=None)),
                checksums=Checksums(pool, LAYERS),
            )
            node.head = cast("Any", SimpleNamespace(on_answer=answers.put_nowait))
            node.ask_verify(stage_pb2.Verify(number=5, checks=[check]))
        answer = answers.get_nowait()
        assert (answer.number, answer.pp_rank, answer.num_wrong) == (5, 0, 2)
        assert "decode stage 0: 2 of 2 pieces" in answer.error

    asyncio.run(run())
