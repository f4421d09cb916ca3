"""Has instances end that hold pages by writes in doubt, as `renewals` decides: one after the other, said to all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.members import Members
from stagemesh.services.broker.renewals import Reason, Renew, Renewals, Spare, Standing
from stagemesh.services.broker.stalls import LOOK_S
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.bus.events import EventKind, Events
from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import mesh_hosts, stage_transfer
from stagemesh.shared.errors import PeerLost, StagemeshError
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.metrics import Sample, by_label
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.transfer.capabilities import reap_is_proof


class Renewing:
    """`spawn` puts a task under the broker's supervisor."""

    def __init__(
        self,
        config: Config,
        members: Members,
        book: TicketBook,
        fences: Fences,
        *,
        events: Events,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        log: Log,
    ) -> None:
        self._config, self._members, self._book, self._fences = config, members, book, fences
        self._events, self._spawn, self._log = events, spawn, log
        self._policy = Renewals(config.broker.max_doubtful_share)
        self._asked_s: dict[str, float] = {}  # instance -> when a prompt was last meant for it
        self._by_reason = Counter[Reason]()

    def used(self, instance: str) -> None:
        """A prompt is about to go there."""
        self._asked_s[instance] = time.monotonic()

    async def run(self) -> None:
        """A child of the broker: runs until cancelled. Where a reaped exit would prove nothing, nobody is to end."""
        section = stage_transfer(self._config, self._config.instances[0].stages[0])
        one_host = len(mesh_hosts(self._config)) == 1
        is_proof = reap_is_proof(section, self._config.model.device, one_host=one_host)
        while is_proof:
            self._look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    def _look(self, now_s: float) -> None:
        doubtful = [
            ticket
            for ticket in self._book.unproven()
            if ticket.in_doubt and not self._fences.are_reaped(ticket.prefill, ticket.num_writers)
        ]
        standings = [
            Standing(info, now_s - max(heard.worked_s, self._asked_s.get(info.ref.name, heard.joined_s)))
            for info, heard in self._members.reported
        ]
        match self._policy.look(doubtful, standings, now_s):
            case Renew() as renew:
                self._renew(renew)
            case Spare(ref, pages):
                self._log.warning(
                    "the only instance of its role has writes in doubt: it is busy, and ends later",
                    instance_name=ref.name,
                    instance_epoch=ref.epoch,
                    pages=pages,
                )
            case None:
                pass

    def _renew(self, renew: Renew) -> None:
        ref, details = renew.ref, {"tickets": len(renew.tickets), "pages": renew.pages, "reason": renew.reason.value}
        self._log.warning(
            "an instance has writes in doubt: it is to end and be started again",
            instance_name=ref.name,
            instance_epoch=ref.epoch,
            **details,
        )
        self._by_reason[renew.reason] += 1
        self._events.say(EventKind.RENEWING, ref.name, epoch=ref.epoch, **details)
        self._spawn(self._tell(renew))

    async def _tell(self, renew: Renew) -> None:
        ref, why = (
            renew.ref,
            f"writes in doubt: tickets {len(renew.tickets)}, pages that wait for its end {renew.pages}",
        )
        try:
            await retry(lambda: self._members.heads.renew(ref, why))
        except PeerLost:
            pass  # it has ended already
        except StagemeshError as error:
            self._log.warning("an instance does not end", instance_name=ref.name, error=str(error))
            self._policy.failed(time.monotonic())

    def measure(self) -> Iterator[Sample]:
        yield from by_label(metrics.INSTANCES_RENEWED, {reason.value: self._by_reason[reason] for reason in Reason})
