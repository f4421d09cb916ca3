"""What the process that runs a benchmark and its client processes say to each other over their pipes.

parent --Job--> client --Ready--> parent --Start--> client --Progress...--> Report

A frame is its length, four bytes big endian, and a tagged msgpack value.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from stagemesh.shared.bench.records import RequestRecord
from stagemesh.shared.bench.workload import Workload
from stagemesh.shared.errors import PeerLost, ProtocolViolation
from stagemesh.shared.security.client_files import ClientFiles

LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A workload and how it is sent. `max_concurrency` requests at once, over all processes; None is no limit."""

    router: str
    workload: Workload
    num_processes: int = 1
    max_concurrency: int | None = None
    timeout_s: float = 3600.0  # of each request, from when it is sent


class Job(msgspec.Struct, frozen=True, tag=True):
    load: Load
    process: int
    files: ClientFiles = ClientFiles()


class Start(msgspec.Struct, frozen=True, tag=True):
    """`at_s` is on CLOCK_MONOTONIC, which the processes of a host share."""

    at_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Connected, and every prompt is made."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """So far."""

    done: int = 0
    failed: int = 0
    tokens: int = 0


class Report(msgspec.Struct, frozen=True, tag=True):
    records: tuple[RequestRecord, ...]
    max_lag_s: float


Frame = Job | Start | Ready | Progress | Report
_DECODER: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Frame)


def to_bytes(frame: Frame) -> bytes:
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Raises PeerLost if the pipe has ended, ProtocolViolation for what is no frame."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        data = await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise PeerLost("the other end of the benchmark has gone") from None
    try:
        frame: Frame = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no frame of a benchmark: {error}") from None
    return frame
