"""Commands that change a running mesh: `set` a scheduler's setting, `flush-cache` of a prefill instance, `drain` and
`resume` an instance."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.cli.generate import DEFAULT_ROUTER, RouterOption
from stagemesh.shared.errors import Rejected

if TYPE_CHECKING:
    from google.protobuf.message import Message

CALL_TIMEOUT_S = 10.0
InstanceArgument = Annotated[str, typer.Argument(help="Its name, such as decode-0.")]
PrefillArgument = Annotated[str, typer.Argument(help="Its name, such as prefill-0.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    numbers = {"ignore_unknown_options": True}  # -1 is no option
    app.command("set", help="Change a setting of an instance until it is started again.", context_settings=numbers)(
        set_
    )
    app.command("flush-cache", help="Evict the cached prompt pages that nobody uses from a prefill instance.")(flush)
    app.command("drain", help="Send an instance no new requests, and wait until what it has is through.")(drain)
    app.command("resume", help="Send a drained instance new requests again.")(resume)


def set_(
    instance: InstanceArgument,
    setting: Annotated[
        str, typer.Argument(help="A decode instance's schedule_conservativeness, max_running or extra_depth.")
    ],
    value: Annotated[float, typer.Argument()],
    router: RouterOption = DEFAULT_ROUTER,
) -> None:
    """Prints the value before and after."""
    from stagemesh.shared.pb import instance_pb2
    from stagemesh.shared.runtime.loop import run

    request = instance_pb2.AdjustRequest(setting=setting, value=value)
    reply = run(_ask_head(router, instance, "Adjust", request))
    print(f"{instance}: {setting} {reply.previous:g} -> {value:g}")


def flush(instance: PrefillArgument, router: RouterOption = DEFAULT_ROUTER) -> None:
    """Prints how many pages are free now that were cached."""
    from stagemesh.shared.pb import instance_pb2
    from stagemesh.shared.runtime.loop import run

    reply = run(_ask_head(router, instance, "FlushCache", instance_pb2.FlushCacheRequest()))
    print(f"{instance}: {reply.pages} pages evicted")


def drain(
    instance: InstanceArgument,
    timeout: Annotated[float, typer.Option(min=0.0, max=3600.0, help="Seconds to wait.")] = 60.0,
    router: RouterOption = DEFAULT_ROUTER,
) -> None:
    """Exits with 1 if something still runs when the time is over; it is not cut off."""
    from stagemesh.shared.pb import instance_pb2
    from stagemesh.shared.runtime.loop import run

    request = instance_pb2.DrainRequest(timeout_s=timeout)
    reply = run(_ask_head(router, instance, "Drain", request, timeout_s=timeout + CALL_TIMEOUT_S))
    if not reply.held:
        print(f"{instance}: idle, and takes no new requests")
        return
    held = ", ".join(f"{what} {count}" for what, count in sorted(reply.held.items()))
    print(f"{instance}: takes no new requests, but is not idle after {timeout:g} s: {held}")
    sys.exit(1)


def resume(instance: InstanceArgument, router: RouterOption = DEFAULT_ROUTER) -> None:
    from stagemesh.shared.pb import instance_pb2
    from stagemesh.shared.runtime.loop import run

    run(_ask_head(router, instance, "Resume", instance_pb2.ResumeRequest()))
    print(f"{instance}: takes new requests")


async def _ask_head(
    router: str, instance: str, method: str, request: Message, timeout_s: float = CALL_TIMEOUT_S
) -> Any:
    """The answer of the instance's head. Raises Rejected if the router knows no such instance."""
    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import peer_dial, router_dial
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT
    from stagemesh.shared.stage.head import INSTANCE

    async with Client(router, INSPECT, wait=False, dial=router_dial(client_files())) as client:
        reply = await client.call("Peers", inspect_pb2.PeersRequest(), timeout_s=CALL_TIMEOUT_S)
    heads = {peer.name.removesuffix("/0"): peer.address for peer in reply.peers if peer.name.endswith("/0")}
    if instance not in heads:
        raise Rejected("instance", f"no instance is named {instance!r}; there are {', '.join(sorted(heads))}")
    async with Client(heads[instance], INSTANCE, wait=False, dial=peer_dial(client_files())) as client:
        return await client.call(method, request, timeout_s=timeout_s)
