"""What the CLI and tools read from processes that may be others than they take them for, and from the bus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from stagemesh.shared.admin.commands import COMMANDS, read_request
from stagemesh.shared.bench.frames import Progress, Ready, read_frame, to_bytes
from stagemesh.shared.bus.events import EventKind, MeshEvent, read_event
from stagemesh.shared.errors import PeerLost, ProtocolViolation, Rejected
from stagemesh.shared.obs.dump import ProcessDump, dump_json, dump_text
from stagemesh.shared.obs.entry import Entry, decode_entries, encode_entries
from stagemesh.shared.obs.timeline import overlaps, picture, read_spans
from stagemesh.shared.obs.trace import Tracer
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import json_bytes, mutate_bytes

ENTRIES: Final = [
    Entry("request", "r1", 1.5, "decoding", "a step", ("decode-0", "decode-0/1"), {"tokens": 4, "since_s": 0.5}),
    Entry("ticket", "t1", 0.5, "filling", "", ("prefill-0",)),
]
EVENT: Final = MeshEvent(
    event=EventKind.JOINED, mesh="m", name="decode-0", seq=3, source="b", at_s=1.5, details={"epoch": 3}
)
COMMAND: Final = {"instance": "decode-0", "setting": "max_running", "value": 3, "role": "decode", "limit": 5}


def spans() -> bytes:
    tracer = Tracer("decode-0/0")
    for step in range(3):
        tracer.mark("issue", step=step, microbatch=0, rows=1)
        tracer.mark("result", step=step)
    tracer.mark("committed", ticket="t")
    return tracer.dump()


def open_replies(folder: Path) -> Try:
    right = {"entries": encode_entries(ENTRIES), "spans": spans(), "event": msgspec.json.encode(EVENT)}
    frames = to_bytes(Ready()) + to_bytes(Progress(1, 2, 3))

    def attempt(rng: Random) -> None:
        kind = rng.choice((*right, "frames"))
        if kind == "frames":
            asyncio.run(_frames(mutate_bytes(rng, frames)))
            return
        data = json_bytes(rng, json.loads(right[kind]))
        match kind:
            case "entries":
                dumps = [ProcessDump("decode-0/0", "unix:/x", tuple(decode_entries(data)))]
                dump_text(dumps)
                json.dumps(dump_json(dumps))
            case "spans":
                found = read_spans(data)
                overlaps(found, {"decode-0"})
                picture(found, window_ns=1_000_000)
            case _:
                read_event(data)

    return attempt


def open_commands(folder: Path) -> Try:
    """What operators send over NATS."""

    def attempt(rng: Random) -> None:
        command = rng.choice(list(COMMANDS.values()))
        fields = {name: COMMAND[name] for name in command.request.__struct_fields__ if name in COMMAND}
        read_request(command, json_bytes(rng, fields))

    return attempt


async def _frames(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    while True:
        await read_frame(reader)


TARGETS: Final = (
    Target("tool-replies", 8, open_replies, (ProtocolViolation, PeerLost)),
    Target("admin-commands", 2, open_commands, (Rejected,)),
)
