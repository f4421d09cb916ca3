"""Everything that can happen to a simulated decode instance next, and how it all comes to an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.support.decode_request import SimRequest
from tests.support.decode_sim import DecodeSim

Event = Callable[[], None]
KINDS = (
    "submit",
    "reserve",
    "reserve_again",
    "cancel_reserve",
    "decide",
    "tell_verdict",
    "lose_verdict",
    "fill",
    "write",
    "commit",
    "close",
    "quiesce",
    "close_again",
    "first_token",
    "abort",
    "abort_again",
)


def events(sim: DecodeSim, kind: str) -> list[Event]:
    """The events of a kind that may come now, one a request."""
    return [event for request in sim.requests for event in _events_of(sim, request, kind)]


def _events_of(sim: DecodeSim, request: SimRequest, kind: str) -> Iterator[Event]:
    waiting = not request.pages and not request.closed
    match kind:
        case "submit" if not request.submitted:
            yield partial(sim.submit, request)
        case "reserve" if waiting and not request.asked:
            yield partial(sim.reserve, request)
        case "reserve_again" if request.writable and not (request.asked or request.filling or request.failed):
            yield partial(sim.reserve, request)
        case "cancel_reserve" if request.asked:
            yield partial(sim.cancel_reserve, request)
        case "decide" if request.in_question:
            yield partial(sim.decide, request)
        case "tell_verdict" if request.verdict is not None:
            yield partial(sim.tell_verdict, request)
        case "lose_verdict" if request.verdict is not None:
            yield partial(sim.lose_verdict, request)
        case "fill" if request.pages and not (request.asked or request.filling or request.failed):
            yield partial(sim.fill, request)
        case "write" if request.to_write:  # also of a ticket that has failed: these were in flight
            yield partial(sim.write, request, 0)
        case "commit" if request.filling and not request.to_write and not request.failed and not request.committed:
            yield partial(sim.commit, request)
        case "close" if not request.failed and not request.committed:
            yield partial(sim.close_ticket, request, quiesced=not request.filling)
        case "quiesce" if request.failed and not request.closed:
            yield partial(sim.close_ticket, request, quiesced=True)
        case "close_again" if request.failed:  # a repeated call, or one that was overtaken
            yield partial(sim.close_ticket, request, quiesced=request.closed)
            yield partial(sim.close_ticket, request, quiesced=False)
        case "first_token" if request.submitted and request.filling and not request.first_token and not request.aborted:
            yield partial(sim.give_first_token, request)
        case "abort" if request.submitted and not request.aborted:
            yield partial(sim.abort, request)
        case "abort_again" if request.aborted:
            yield partial(sim.abort, request)


def finish(sim: DecodeSim) -> None:
    """Lets everything come to its end and checks that it has."""
    while True:
        sim.run_dry()
        before = sim.progress
        for request in list(sim.requests):
            go_on(sim, request)
        sim.run_dry()
        if sim.progress == before:
            break
    sim.check_all_is_back()


def go_on(sim: DecodeSim, request: SimRequest) -> None:
    """What comes next in this request's life."""
    if not request.submitted:
        sim.submit(request)
    elif request.failed and not request.aborted:
        sim.abort(request)  # its router hears of it from elsewhere, if this side took the request only afterwards
    if request.in_question:
        sim.decide(request)
    if request.verdict is not None:
        sim.tell_verdict(request)
    if request.closed or (request.committed and request.first_token):
        return
    if request.failed or (request.gone and not request.committed):
        sim.close_ticket(request, quiesced=True)
    elif not request.pages and not request.asked:
        sim.reserve(request)
    elif request.pages and not request.filling and not request.asked:
        sim.fill(request)
    elif request.filling and not request.committed:
        while request.to_write:
            sim.write(request, 0)
        sim.commit(request)
    if request.filling and not request.first_token and not request.aborted:
        sim.give_first_token(request)
