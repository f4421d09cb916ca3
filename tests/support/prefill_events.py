"""Everything that can happen to a simulated prefill instance next, and how it all comes to an end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.support.prefill_sim import PrefillSim

Event = Callable[[], None]
USUAL = ("reserved", "filled", "write", "settle", "deliver_settled")
UNUSUAL = ("no_pages", "not_filled", "ticket_failed", "abort")


def events(sim: PrefillSim, kind: str) -> list[Event]:
    """The events of a kind that may come now."""
    outgoing = [
        (rank, handle, out) for rank, sender in enumerate(sim.senders) for handle, out in sender.outgoing.items()
    ]
    match kind:
        case "reserved":
            return [partial(sim.reserved, prompt) for prompt in sim.prompts if prompt.asks]
        case "no_pages":
            return [partial(sim.no_pages, prompt) for prompt in sim.prompts if prompt.asks]
        case "filled":
            return [partial(sim.filled, prompt) for prompt in sim.fills]
        case "not_filled":
            return [partial(sim.not_filled, prompt) for prompt in sim.fills]
        case "ticket_failed":
            return [partial(sim.ticket_failed, prompt) for prompt in sim.prompts if prompt.ticket_id]
        case "abort":
            return [partial(sim.abort, prompt) for prompt in sim.prompts]
        case "write":
            return [partial(sim.write, rank, handle) for rank, handle, out in outgoing if out.unwritten]
        case "settle":
            return [partial(sim.settle, *at) for *at, out in outgoing if out.over and not out.unwritten]
        case "deliver_settled":
            return [partial(sim.deliver_settled, pick) for pick in range(len(sim.settled))]
        case _:
            raise AssertionError(kind)


def finish(sim: PrefillSim) -> None:
    """Lets everything come to its end and checks that it has."""
    while True:
        before = sim.progress
        sim.run_dry()
        for kind in USUAL:
            while possible := events(sim, kind):
                possible[0]()
        sim.run_dry()
        if sim.progress == before:
            break
    sim.check_all_is_back()
