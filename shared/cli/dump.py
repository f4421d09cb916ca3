"""`stagemesh dump`: what everything in a mesh waits for, also in one that stands still."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.cli.generate import DEFAULT_ROUTER, RouterOption
from stagemesh.shared.errors import StagemeshError

if TYPE_CHECKING:
    from stagemesh.shared.obs.dump import ProcessDump

ANSWER_TIMEOUT_S = 3.0


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("dump", help="Show what everything in a mesh waits for.")(dump)


def dump(
    router: RouterOption = DEFAULT_ROUTER,
    config: Annotated[
        Path | None, typer.Option(help="The deployment's TOML file, for a mesh whose router does not answer.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A process that does not answer is named, with what waits for it. Fails only if nobody answers."""
    from stagemesh.shared.errors import Retryable
    from stagemesh.shared.obs.dump import dump_json, dump_text
    from stagemesh.shared.runtime.loop import run

    dumps = run(collect(router, config))
    if all(said.error for said in dumps):
        raise Retryable("; ".join(f"{said.name}: {said.error}" for said in dumps))
    print(json.dumps(dump_json(dumps)) if as_json else dump_text(dumps))


async def collect(router: str, config: Path | None, timeout_s: float = ANSWER_TIMEOUT_S) -> list[ProcessDump]:
    """What every process says within `timeout_s`."""
    import asyncio

    peers = {"router": router, **_configured(config)}
    failure = ""
    try:
        peers |= await _known_to(router, timeout_s)
    except StagemeshError as error:
        failure = str(error)
    peers["router"] = router  # the address that we were given is one that we can reach
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(n, a, timeout_s)) for n, a in peers.items() if not (failure and n == "router")]
    answers = [task.result() for task in tasks]
    return answers if not failure else [_silent("router", router, failure), *answers]


def _silent(name: str, address: str, error: str) -> ProcessDump:
    from stagemesh.shared.obs.dump import ProcessDump

    return ProcessDump(name, address, error=error)


def _configured(config: Path | None) -> Mapping[str, str]:
    """Addresses as the file has them."""
    from stagemesh.shared.config import look_at_config
    from stagemesh.shared.runtime.plan import service_processes

    if config is None:
        return {}
    return {spec.name: spec.address for spec in service_processes(look_at_config(config, os.environ))}


async def _known_to(router: str, timeout_s: float) -> Mapping[str, str]:
    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import router_dial
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT

    async with Client(router, INSPECT, wait=False, dial=router_dial(client_files())) as client:
        reply = await client.call("Peers", inspect_pb2.PeersRequest(), timeout_s=timeout_s)
    return {peer.name: peer.address for peer in reply.peers}


async def _ask(name: str, address: str, timeout_s: float) -> ProcessDump:
    from stagemesh.shared.obs.dump import ProcessDump
    from stagemesh.shared.obs.entry import decode_entries
    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import peer_dial, router_dial
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT

    dial = (router_dial if name == "router" else peer_dial)(client_files())
    try:
        async with Client(address, INSPECT, wait=False, dial=dial) as client:
            reply = await client.call("Dump", inspect_pb2.DumpRequest(), timeout_s=timeout_s)
        return ProcessDump(name, address, tuple(decode_entries(reply.entries)))
    except StagemeshError as error:
        return _silent(name, address, str(error))
