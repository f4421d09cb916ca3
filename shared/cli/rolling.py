"""`stagemesh rolling-restart`: every process of a mesh that `stagemesh up` runs, one group after the other, under load.

decode instances, prefill instances --each back, and seen by the router--> broker --> NATS server --> router --> gateway
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.errors import Rejected, Retryable

if TYPE_CHECKING:
    from stagemesh.shared.runtime.control import ControlReply, GroupInfo

ORDER = ("decode", "prefill", "broker", "nats", "router", "openai")
CALL_TIMEOUT_S = 5.0


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("rolling-restart", help="Restart every process of a local mesh, one after the other.")(rolling_restart)


def rolling_restart(
    run_dir: Annotated[Path | None, typer.Option(help="Of the mesh, as `stagemesh up` says.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Of the mesh, instead of its run dir.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Seconds, for each of them.")] = 600.0,
    force: Annotated[bool, typer.Option("--force", help="Also what has no other of its role, at a cost.")] = False,
) -> None:
    """Instances drain first, and what comes goes to the others. New requests wait for the broker; the router ends what
    it has, and refuses new ones as UNAVAILABLE until it is back at its address."""
    from stagemesh.shared.runtime.control import CONTROL_SOCKET, ControlRequest, ask
    from stagemesh.shared.runtime.loop import run

    socket = _run_dir(run_dir, ready_file) / CONTROL_SOCKET
    known = ask(socket, ControlRequest("groups"), CALL_TIMEOUT_S)
    if not force:
        _refuse_single(known.groups)
    instances = sum(group.role in ("prefill", "decode") for group in known.groups)
    for group in sorted(known.groups, key=lambda group: ORDER.index(group.role)):
        began_s = time.monotonic()
        reply = ask(socket, ControlRequest("restart", group.name), timeout)
        run(_until_seen(known.router, group, reply, instances, timeout))
        took = f"start {reply.start}, after {time.monotonic() - began_s:.1f} s"
        print("; ".join((f"{group.name}: back, {took}", *reply.troubles)), flush=True)


def _run_dir(run_dir: Path | None, ready_file: Path | None) -> Path:
    from stagemesh.shared.runtime.ready import read_ready

    if (run_dir is None) == (ready_file is None):
        raise Rejected("--run-dir", "or --ready-file says which mesh is meant; give one of them")
    return run_dir if run_dir is not None else Path(read_ready(ready_file or Path()).run_dir)


def _refuse_single(groups: tuple[GroupInfo, ...]) -> None:
    for role in ("decode", "prefill"):
        names = [group.name for group in groups if group.role == role]
        if len(names) == 1:
            why = f"it is the only {role} instance, so requests fail while it is away; --force restarts it all the same"
            raise Rejected(names[0], why)


async def _until_seen(router: str, group: GroupInfo, reply: ControlReply, instances: int, timeout_s: float) -> None:
    """Returns when the others have it again: the router that instance, or the broker all of them."""
    import asyncio

    from stagemesh.shared.runtime.backoff import retry

    try:
        async with asyncio.timeout(timeout_s):
            await retry(lambda: _see(router, group, reply, instances))
    except TimeoutError:
        raise Retryable(f"{group.name} is back, but not seen by the others within {timeout_s:g} s") from None


async def _see(router: str, group: GroupInfo, reply: ControlReply, instances: int) -> None:
    """Raises Retryable while it is not seen."""
    from stagemesh.shared.obs.entry import decode_entries
    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import peer_dial, router_dial

    files = client_files()
    if group.role == "broker":
        peers = await _ask(router, router_dial(files), "Peers", inspect_pb2.PeersRequest())
        address = next(peer.address for peer in peers.peers if peer.name == "broker")
        check = await _ask(address, peer_dial(files), "Check", inspect_pb2.CheckRequest())
        is_seen = check.gauges["instances"] >= instances
    else:
        dump = await _ask(router, router_dial(files), "Dump", inspect_pb2.DumpRequest())
        sessions = [entry for entry in decode_entries(dump.entries) if entry.kind == "session"]
        up = {entry.name for entry in sessions if entry.state == "up"}
        is_instance = group.role in ("decode", "prefill")
        is_seen = f"{group.name}@{reply.epoch}" in up if is_instance else len(up) >= instances
    if not is_seen:
        raise Retryable(f"{group.name} is not seen yet")


async def _ask(address: str, dial: Any, method: str, request: Any) -> Any:
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT

    async with Client(address, INSPECT, wait=False, dial=dial) as client:
        return await client.call(method, request, timeout_s=CALL_TIMEOUT_S)
