"""What processes of a mesh say to each other, as bytes: parsed and decoded to values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from google.protobuf.message import Message

from stagemesh.services.broker.directory import flaw
from stagemesh.shared.codec import arrays, commands, mesh, session, tickets
from stagemesh.shared.codec.commands import command_to_pb
from stagemesh.shared.core.commands import Command, Ints, Join, RowLogprobs, Step
from stagemesh.shared.core.directory import mismatch
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.errors import ProtocolViolation, Rejected
from stagemesh.shared.pb import broker_pb2, inspect_pb2, instance_pb2, mesh_pb2, stage_pb2
from stagemesh.shared.rpc.messages import read_message
from stagemesh.shared.stage.ring import deliver
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import fill, mutate_bytes
from tests.support.instances import PREFILL, instance_of
from tests.support.spans import spans_of


class Listener:
    """Takes all that comes round a ring."""

    def on_command(self, command: Command) -> None:
        assert commands.command_from_pb(command_to_pb(command)) is not None

    def on_data_ready(self, step: int, num_tokens: int) -> None: ...

    def on_applied(self, number: int) -> None: ...

    def on_pulse(self, progress: StageProgress) -> None: ...

    def on_result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None: ...

    def on_settled(self, settled: stage_pb2.Settled) -> None: ...

    def on_copied(self, handle: int, pp_rank: int, *, restored: bool) -> None: ...

    def on_read_out(self, number: int) -> None: ...

    def on_verify(self, verify: stage_pb2.Verify) -> None: ...

    def on_answer(self, answer: stage_pb2.Answer) -> None: ...


def _submit(message: instance_pb2.SessionUp) -> None:
    submit = message.submit
    mesh.request_from_pb(submit.request)
    commands.sampling_from_pb(submit.sampling)
    arrays.to_array(submit.token_ids)


def _instance(message: mesh_pb2.InstanceInfo) -> None:
    info = mesh.instance_from_pb(message)
    flaw(info)
    mismatch(info.manifest, instance_of("p", PREFILL).manifest)
    assert mesh.instance_from_pb(mesh.instance_to_pb(info)) is not None


def _update(message: broker_pb2.DirectoryUpdate) -> None:
    for info in message.changed:
        mesh.instance_from_pb(info)
    for ref in message.removed:
        mesh.ref_from_pb(ref)


def _connect(message: stage_pb2.ConnectRequest) -> None:
    mesh.manifest_from_pb(message.manifest)
    for stage in message.stages:
        mesh.stage_from_pb(stage)


def _reserve(message: broker_pb2.ReserveReply) -> None:
    arrays.to_tuple(message.pages)
    for target in message.targets:
        mesh.stage_from_pb(target)


def _down(message: instance_pb2.SessionDown) -> None:
    for output in message.outputs:
        session.output_from_pb(output)


def _report(message: broker_pb2.WriterReport) -> None:
    mesh.ref_from_pb(message.instance)
    spans_of((piece.target_rank, piece.first_page, piece.last_page) for piece in message.pieces)


def _instance_report(message: broker_pb2.InstanceReport) -> None:
    _instance(message.info)
    for ticket in message.tickets:
        tickets.leg_from_pb(ticket)


def _nothing(message: Any) -> None: ...


DECODERS: Final[Mapping[type[Message], Callable[[Any], object]]] = {
    instance_pb2.SessionUp: _submit,
    instance_pb2.SessionDown: _down,
    instance_pb2.ReservePagesRequest: _nothing,
    instance_pb2.ReservePagesReply: lambda message: arrays.to_tuple(message.pages),
    instance_pb2.CloseTicketRequest: _nothing,
    instance_pb2.AdjustRequest: _nothing,
    broker_pb2.InstanceReport: _instance_report,
    broker_pb2.DirectoryUpdate: _update,
    broker_pb2.OpenTicketRequest: _nothing,
    broker_pb2.ReserveReply: _reserve,
    broker_pb2.WriterReport: _report,
    mesh_pb2.InstanceInfo: _instance,
    stage_pb2.ConnectRequest: _connect,
    stage_pb2.RingMessage: lambda message: deliver(message, Listener()),
    stage_pb2.Command: commands.command_from_pb,
    stage_pb2.Join: lambda message: commands.command_from_pb(stage_pb2.Command(joins=[message])),
    inspect_pb2.ProfileRequest: _nothing,
    inspect_pb2.CheckReply: _nothing,
    inspect_pb2.PeersReply: _nothing,
}


def right_command(rng: Random) -> stage_pb2.Command:
    join = Join(1, RequestRef("r", 1), SamplingParams(max_tokens=4), None, 4)
    rows = arrays.to_array(arrays.to_bytes([1, 0, 4, -1, 0, 1]))
    step = Step(1, 0, rows.reshape(-1, 6), arrays.to_array(arrays.to_bytes([5, 6, 7, 8])))
    deltas = arrays.to_array(arrays.to_bytes([1, 2, 0, 1]))
    return command_to_pb(Command(number=rng.randrange(9), page_deltas=deltas, joins=(join,), step=step))


def right_message(rng: Random, kind: type[Message]) -> Message:
    if kind is stage_pb2.Command:
        return right_command(rng)
    if kind is stage_pb2.RingMessage:
        return stage_pb2.RingMessage(command=right_command(rng))
    if kind is mesh_pb2.InstanceInfo:
        return mesh.instance_to_pb(instance_of("p", PREFILL))
    return fill(rng, kind())


def open_messages(folder: Path) -> Try:
    kinds = list(DECODERS)

    def attempt(rng: Random) -> None:
        kind = rng.choice(kinds)
        message = fill(rng, kind()) if rng.random() < 0.5 else right_message(rng, kind)
        data = message.SerializeToString()
        match rng.randrange(10):
            case 0:
                data = rng.randbytes(rng.randrange(100))
            case 1 | 2 | 3 | 4:
                data = mutate_bytes(rng, data)
        DECODERS[kind](read_message(kind, data))

    return attempt


TARGETS: Final = (Target("peer-messages", 26, open_messages, (Rejected, ProtocolViolation)),)
