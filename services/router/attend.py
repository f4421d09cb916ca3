"""Answers what operators ask of all routers, over a stream that this router opens: the broker needs no way to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.obs.entry import Entry, encode_entries, oldest_first
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.runtime.backoff import delays


class LiveRequests(Protocol):
    """What operators may ask about."""

    def describe_live(self, now_s: float) -> Iterable[Entry]: ...

    def abort(self, request_id: str) -> bool:
        """False if there is no such request, or not yet."""
        ...


async def attend(broker: Client, router: str, requests: LiveRequests) -> None:
    """A child of the router: runs until cancelled, while the broker is away too."""
    for delay_s in delays():
        stream = broker.open("Attend")
        try:
            await stream.send(broker_pb2.RouterAnswer(router=router))
            async for question in stream.receive():
                await stream.send(answer(router, requests, question))
        except StagemeshError:
            pass  # it comes back
        finally:
            stream.cancel()
        await asyncio.sleep(delay_s)


def answer(router: str, requests: LiveRequests, question: broker_pb2.RouterQuestion) -> broker_pb2.RouterAnswer:
    said = broker_pb2.RouterAnswer(router=router, id=question.id)
    match question.WhichOneof("kind"):
        case "list":
            entries = oldest_first(list(requests.describe_live(time.monotonic())))
            said.entries, said.total = encode_entries(entries[: question.list.limit]), len(entries)
        case "abort":
            said.was_live = requests.abort(question.abort.request_id)
        case _:
            pass  # of a later version: an empty answer
    return said
