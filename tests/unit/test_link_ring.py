"""The activation ring over the in-memory backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from stagemesh.shared.errors import Bug, ProtocolViolation, Retryable
from stagemesh.shared.link.ring import RingReceiver, RingSender, RingSpec
from stagemesh.shared.transfer.memory import MemoryEndpoint, MemoryFabric

SLOTS, TOKENS, HIDDEN = 3, 8, 16


class Link:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.fabric = MemoryFabric()
        self.upper, self.lower = MemoryEndpoint(self.fabric, "upper"), MemoryEndpoint(self.fabric, "lower")
        self.receiver = RingReceiver(self.lower, num_slots=SLOTS, max_tokens=TOKENS, hidden_size=HIDDEN, dtype=dtype)
        self.sender = RingSender(self.upper, self.receiver.spec, hidden_size=HIDDEN, dtype=dtype)
        self.dtype = dtype

    def hidden(self, step_number: int, num_tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step_number)
        return torch.randn(num_tokens, HIDDEN, generator=generator).to(self.dtype)


def run(body: Callable[[Link], Awaitable[None]], dtype: torch.dtype = torch.float32) -> None:
    async def main() -> None:
        link = Link(dtype)
        async with asyncio.timeout(10):
            await body(link)
            link.sender.close()
            link.receiver.close()
            await link.upper.close()
            await link.lower.close()

    asyncio.run(main())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_step_arrives_as_it_was_sent_round_after_round(dtype: torch.dtype) -> None:
    async def body(link: Link) -> None:
        for step_number in range(4 * SLOTS):
            num_tokens = 1 + step_number % TOKENS
            sent = link.hidden(step_number, num_tokens)
            await link.sender.send(step_number, sent).wait()
            received = link.receiver.view(step_number, num_tokens)
            assert received.dtype is dtype
            assert torch.equal(received, sent)

    run(body, dtype)


def test_as_many_steps_as_slots_may_be_under_way_and_keep_their_rows() -> None:
    async def body(link: Link) -> None:
        link.fabric.hold()
        handles = [link.sender.send(step, link.hidden(step, TOKENS)) for step in range(SLOTS)]
        await link.fabric.faults.parked.wait()
        link.fabric.release()
        for step, handle in enumerate(handles):
            await handle.wait()
            assert torch.equal(link.receiver.view(step, TOKENS), link.hidden(step, TOKENS))

    run(body)


def test_a_slot_is_not_staged_again_before_its_write_has_ended() -> None:
    async def body(link: Link) -> None:
        link.fabric.hold()
        handle = link.sender.send(0, link.hidden(0, 2))
        await link.fabric.faults.parked.wait()
        with pytest.raises(Bug, match="step 0 has not left"):
            link.sender.stage(SLOTS, link.hidden(SLOTS, 2))
        link.fabric.release()
        await handle.wait()
        assert torch.equal(link.receiver.view(0, 2), link.hidden(0, 2))
        await link.sender.send(SLOTS, link.hidden(SLOTS, 2)).wait()

    run(body)


def test_a_slot_whose_write_failed_stays_closed() -> None:
    async def body(link: Link) -> None:
        link.fabric.faults.fail_next(1, proven=False)
        with pytest.raises(Retryable):
            await link.sender.send(0, link.hidden(0, 2)).wait()
        with pytest.raises(Bug, match="has not left"):
            link.sender.stage(SLOTS, link.hidden(SLOTS, 2))

    run(body)


def test_steps_go_forward_and_are_transmitted_once() -> None:
    async def body(link: Link) -> None:
        with pytest.raises(Bug, match="not staged"):
            link.sender.transmit(0)
        link.sender.stage(SLOTS, link.hidden(0, 1))
        with pytest.raises(Bug, match="not staged"):
            link.sender.transmit(0)
        with pytest.raises(Bug, match="after step"):
            link.sender.stage(SLOTS, link.hidden(0, 1))
        await link.sender.transmit(SLOTS).wait()
        with pytest.raises(Bug, match="not staged"):
            link.sender.transmit(SLOTS)

    run(body)


@pytest.mark.parametrize(
    "hidden",
    [
        torch.zeros(TOKENS + 1, HIDDEN),
        torch.zeros(0, HIDDEN),
        torch.zeros(1, HIDDEN + 1),
        torch.zeros(1, HIDDEN).double(),
    ],
    ids=["rows", "none", "width", "dtype"],
)
def test_activations_of_another_shape_are_refused(hidden: torch.Tensor) -> None:
    async def body(link: Link) -> None:
        with pytest.raises(Bug):
            link.sender.stage(0, hidden)

    run(body)


@pytest.mark.parametrize("num_tokens", [0, -1, TOKENS + 1])
def test_a_step_of_more_rows_than_a_slot_is_refused(num_tokens: int) -> None:
    async def body(link: Link) -> None:
        with pytest.raises(ProtocolViolation):
            link.receiver.view(0, num_tokens)

    run(body)


def test_a_spec_that_does_not_fit_is_refused() -> None:
    async def body(link: Link) -> None:
        key, slot_bytes = link.receiver.spec.key, link.receiver.spec.slot_bytes
        for spec in (
            RingSpec(key, 0, slot_bytes),
            RingSpec(key, SLOTS, slot_bytes + 1),
            RingSpec(key, SLOTS, 0),
            RingSpec(key, SLOTS + 1, slot_bytes),
        ):
            with pytest.raises(ProtocolViolation):
                RingSender(link.upper, spec, hidden_size=HIDDEN, dtype=torch.float32)

    run(body)
