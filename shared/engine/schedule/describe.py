"""What every sequence and step of an instance waits for, in words: for an operator before a mesh that stands still."""

from __future__ import annotations

from collections.abc import Iterator

from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.engine.schedule.prefill_state import PrefillSequence
from stagemesh.shared.fsm.sequence import SequenceState
from stagemesh.shared.obs.entry import Detail, Entry

Wait = tuple[str, tuple[str, ...]]
"""What for, and on whom: processes or instances."""


def describe_prefill(scheduler: PrefillScheduler, instance: str, now_s: float) -> Iterator[Entry]:
    """Of the prefill instance `instance`; times are CLOCK_MONOTONIC in seconds."""
    for sequence in scheduler.sequences:
        waits_for, on = _prefill_wait(sequence, scheduler.pages, instance)
        details: dict[str, Detail] = {
            "tokens_issued": f"{sequence.issued}/{len(sequence.tokens)}",
            "cached": sequence.cached,
            "in_flight": sequence.in_flight,
            "pages": len(sequence.pages),
        }
        yield _sequence(sequence, waits_for, on, details, now_s)
    yield from describe_issuer(scheduler.issuer, scheduler.pages, instance, now_s)


def _prefill_wait(sequence: PrefillSequence, pages: PageAllocator, instance: str) -> Wait:
    match sequence.state:
        case SequenceState.WAITING if sequence.ticket_id and sequence.asked:
            return "pages there", (sequence.group,)
        case SequenceState.RESERVED if sequence.announced and not sequence.filled:
            return "its announcement to the broker", ("broker",)
        case SequenceState.WAITING | SequenceState.RESERVED if sequence.startable:
            room = f"{pages.num_free} free, {pages.num_cached} cached"
            return f"its turn, or pages here ({room})", (instance,)
        case SequenceState.WAITING | SequenceState.RESERVED:
            turn = "ask for pages there" if sequence.state is SequenceState.WAITING else "be announced to the broker"
            return f"its turn to {turn}", (instance,)
        case SequenceState.RUNNING if sequence.remaining:
            return "its turn, or the chunks in flight", (instance,)
        case SequenceState.RUNNING:
            return "its first token", (instance,)
    if sequence.unsettled:
        ranks = ", ".join(map(str, sorted(sequence.unsettled)))
        return f"its KV to be sent and reported by ranks {ranks}", _stages(instance, sequence.unsettled)
    return "its chunks in flight", (instance,)


def describe_decode(scheduler: DecodeScheduler, instance: str, now_s: float) -> Iterator[Entry]:
    """Of the decode instance `instance`; times are CLOCK_MONOTONIC in seconds."""
    announced, room = set(), _room(scheduler)
    for sequence in scheduler.sequences:
        announced.add(sequence.ticket_id)
        waits_for, on = _decode_wait(sequence, scheduler, room, instance)
        details: dict[str, Detail] = {
            "tokens": f"{sequence.received}/{sequence.sampling.max_tokens}",
            "in_flight": sequence.in_flight,
            "pages": len(sequence.pages),
        }
        if sequence.host_pages:
            details["host_pages"] = sequence.host_pages
        yield _sequence(sequence, waits_for, on, details, now_s)
    for ticket_id, asked in scheduler.reserving.items():
        if ticket_id not in announced:
            name, age_s = f"{asked.request}", now_s - asked.since_s
            yield Entry("reservation", name, age_s, "", "its router to announce it", ("router",), {"ticket": ticket_id})
    yield from describe_issuer(scheduler.issuer, scheduler.pages, instance, now_s)


def _room(scheduler: DecodeScheduler) -> str:
    """Of the pages: how they are, and what the budget takes them for."""
    active = [sequence for sequence in scheduler.sequences if sequence.active]
    suspended = [sequence for sequence in scheduler.sequences if sequence.suspended]
    more = sum(scheduler.growth.pages(s) - len(s.pages) for s in active)
    room = f"{scheduler.pages.num_free} free, {more} more expected of the {len(active)} that have some"
    if suspended:
        room += f", {sum(map(scheduler.growth.pages, suspended))} for the {len(suspended)} retracted"
    return room


def _decode_wait(sequence: DecodeSequence, scheduler: DecodeScheduler, room: str, instance: str) -> Wait:
    match sequence.state:
        case SequenceState.WAITING if sequence.ticket_id in scheduler.reserving:
            need = scheduler.growth.pages(sequence)
            room += "" if scheduler.slots_free > 0 else ", and as many run as may"
            return f"{need} pages here ({room})", (instance,)
        case SequenceState.WAITING:
            return "the prefill side to ask for pages", ("broker",)
        case SequenceState.RESERVED if sequence.asked_back:
            return "the broker's word whether its pages may be taken back", ("broker",)
        case SequenceState.RESERVED:
            missing = [] if sequence.committed else ["its KV to be committed"]
            missing += ["its first token"] if sequence.first_token is None else []
            return " and ".join(missing), ("broker",) if not sequence.committed else ("router",)
        case SequenceState.RETRACTED if sequence.copying:
            where = "back from" if sequence.restoring else "to"
            ranks = ", ".join(map(str, sorted(sequence.copying)))
            return f"its KV to be copied {where} host memory by ranks {ranks}", _stages(instance, sequence.copying)
        case SequenceState.RETRACTED:
            need = scheduler.growth.pages(sequence)
            return f"its turn to be resumed with {need} pages ({room})", (instance,)
        case SequenceState.RUNNING if sequence.in_flight:
            return "the results of its steps", (instance,)
        case SequenceState.RUNNING:
            return "its turn", (instance,)
    return "the last results of its steps", (instance,)


def describe_issuer(issuer: Issuer, pages: PageAllocator, instance: str, now_s: float) -> Iterator[Entry]:
    """Steps and commands that are out, and pages that wait for a proof."""
    for number, step in issuer.outstanding.items():
        details = {"microbatch": step.microbatch, "rows": len(step.rows)}
        age_s = now_s - issuer.issued_s(number)
        yield Entry("step", str(number), age_s, "outstanding", "its result", (instance,), details)
    for number, since_s in issuer.commands_out.items():
        yield Entry("command", str(number), now_s - since_s, "issued", "every stage to apply it", (instance,))
    for ticket_id, since_s in pages.quarantined_since.items():
        waits_for = "proof that nobody writes to its pages"
        yield Entry("quarantine", ticket_id, now_s - since_s, "", waits_for, ("broker",))


def _sequence(
    sequence: PrefillSequence | DecodeSequence,
    waits_for: str,
    on: tuple[str, ...],
    details: dict[str, Detail],
    now_s: float,
) -> Entry:
    details["in_state_s"] = round(now_s - sequence.since_s, 3)
    if sequence.ticket_id:
        details["ticket"] = sequence.ticket_id
    name, age_s = str(sequence.request), now_s - sequence.arrived_s
    return Entry("sequence", name, age_s, sequence.state.value, waits_for, on, details)


def _stages(instance: str, ranks: set[int]) -> tuple[str, ...]:
    return tuple(f"{instance}/{rank}" for rank in sorted(ranks))
