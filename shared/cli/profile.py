"""`stagemesh profile`: what the stages of an instance compute, kernel by kernel, while they serve."""

from __future__ import annotations

from typing import Annotated

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.cli.generate import DEFAULT_ROUTER, RouterOption
from stagemesh.shared.errors import Rejected

CALL_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 60.0


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("profile", help="Record what the stages of an instance compute, as traces for Perfetto.")(profile)


def profile(
    instance: Annotated[str, typer.Argument(help="Its name, such as decode-0.")],
    seconds: Annotated[float, typer.Option(help="At most 60.")] = 1.0,
    router: RouterOption = DEFAULT_ROUTER,
) -> None:
    """Prints where each stage has written its trace, on its own host."""
    from stagemesh.shared.runtime.loop import run

    for name, path in sorted(run(_profile(router, instance, seconds)).items()):
        print(f"{name}: {path}")


async def _profile(router: str, instance: str, seconds: float) -> dict[str, str]:
    """All stages at once. Raises Rejected if the router knows no such instance."""
    import asyncio

    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import peer_dial, router_dial
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT

    async def one(address: str) -> str:
        async with Client(address, INSPECT, wait=False, dial=peer_dial(client_files())) as client:
            request = inspect_pb2.ProfileRequest(seconds=seconds)
            reply = await client.call("Profile", request, timeout_s=max(0.0, seconds) + WRITE_TIMEOUT_S)
        return str(reply.path)

    async with Client(router, INSPECT, wait=False, dial=router_dial(client_files())) as client:
        reply = await client.call("Peers", inspect_pb2.PeersRequest(), timeout_s=CALL_TIMEOUT_S)
    stages = {peer.name: peer.address for peer in reply.peers if peer.name.rpartition("/")[0] == instance}
    if not stages:
        known = sorted({peer.name.rpartition("/")[0] for peer in reply.peers} - {""})
        raise Rejected("instance", f"no instance is named {instance!r}; there are {', '.join(known)}")
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(one(address)) for name, address in stages.items()}
    return {name: task.result() for name, task in tasks.items()}
