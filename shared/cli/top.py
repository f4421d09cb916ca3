"""`stagemesh top`: a mesh as it runs, on a terminal. Over gRPC alone: it works without a NATS server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.cli.generate import DEFAULT_ROUTER, RouterOption
from stagemesh.shared.errors import StagemeshError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from stagemesh.shared.obs.entry import Entry
    from stagemesh.shared.obs.reading import Readings
    from stagemesh.shared.obs.top import Moment, View

ANSWER_TIMEOUT_S = 3.0
FIRST_LOOK_S = 0.5


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("top", help="Show a mesh as it runs: instances, stages, pages, tickets, requests.")(top)


def top(
    router: RouterOption = DEFAULT_ROUTER,
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between looks.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, max=1000, help="The oldest so many.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Look once, over half a second, and end.")] = False,
) -> None:
    """Until Ctrl-C."""
    from stagemesh.shared.runtime.loop import run

    run(_look_once(router, requests) if once else _look_on(router, interval, requests))


async def _look_once(router: str, most_requests: int) -> None:
    import asyncio

    from rich.console import Console

    from stagemesh.shared.cli.tables import WIDTH
    from stagemesh.shared.obs.top import view

    before = await _moment(router)
    await asyncio.sleep(FIRST_LOOK_S)
    Console(width=None if Console().is_terminal else WIDTH, highlight=False).print(
        _shown(view(before, await _moment(router), most_requests))
    )


async def _look_on(router: str, interval_s: float, most_requests: int) -> None:
    import asyncio

    from rich.live import Live

    from stagemesh.shared.obs.top import view

    before = await _moment(router)
    with Live(screen=True, auto_refresh=False) as live:
        pause_s = FIRST_LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            now = await _moment(router)
            live.update(_shown(view(before, now, most_requests)), refresh=True)
            before, pause_s = now, interval_s


async def _moment(router: str) -> Moment:
    """Every process that the router knows, all at once. Raises StagemeshError if the router does not answer."""
    import asyncio
    import time

    from stagemesh.shared.obs.top import Moment
    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import router_dial
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT

    async with Client(router, INSPECT, wait=False, dial=router_dial(client_files())) as client:
        reply = await client.call("Peers", inspect_pb2.PeersRequest(), timeout_s=ANSWER_TIMEOUT_S)
    peers = {peer.name: peer.address for peer in reply.peers} | {"router": router}
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_ask(name, address)) for name, address in peers.items()}
    answers = {name: task.result() for name, task in tasks.items()}
    silent = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    said = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
    return Moment(
        time.monotonic(),
        {name: readings for name, (readings, _) in said.items()},
        tuple(entry for _, entries in said.values() for entry in entries),
        silent,
    )


async def _ask(name: str, address: str) -> tuple[Readings, tuple[Entry, ...]] | str:
    """Why it does not answer, if it does not."""
    from stagemesh.shared.obs.entry import decode_entries
    from stagemesh.shared.obs.reading import decode_readings
    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import peer_dial, router_dial
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT

    dial = (router_dial if name == "router" else peer_dial)(client_files())
    try:
        async with Client(address, INSPECT, wait=False, dial=dial) as client:
            reply = await client.call("Measure", inspect_pb2.MeasureRequest(), timeout_s=ANSWER_TIMEOUT_S)
            readings = decode_readings(reply.samples)
            if "/" in name:
                return readings, ()
            reply = await client.call("Dump", inspect_pb2.DumpRequest(), timeout_s=ANSWER_TIMEOUT_S)
            return readings, tuple(decode_entries(reply.entries))
    except StagemeshError as error:
        return str(error)


def _shown(seen: View) -> Group:
    from rich.console import Group
    from rich.markup import escape

    from stagemesh.shared.cli.tables import table

    waiting = ", ".join(f"{reason} {count}" for reason, count in seen.waiting.items()) or "none"
    tickets = ", ".join(f"{state} {count}" for state, count in seen.tickets.items()) or "none"
    head = (
        f"[bold]{seen.tokens_per_s:,.0f}[/] tokens/s out, {seen.prompt_tokens_per_s:,.0f} in, "
        f"{seen.requests_per_s:.1f} requests/s   live [bold]{seen.live}[/]   waiting {waiting}   tickets {tickets}"
    )
    instances = [
        (
            *(i.name, i.role, i.state, i.running, i.waiting, i.microbatches, f"{i.tokens_per_s:,.0f}"),
            *(i.pages.get(state, 0) for state in ("used", "cached", "quarantined", "free")),
            i.retractions,
        )
        for i in seen.instances
    ]
    stages = [
        (
            s.name,
            f"{s.steps_per_s:.1f}",
            f"{s.busy:.0%}",
            _bar(s.busy, s.bubble),
            f"{s.bubble:.0%}",
            s.residents,
            s.queued,
        )
        for s in seen.stages
    ]
    requests = [
        (e.name, f"{e.age_s:.1f}", e.state, e.waits_for, " ".join(e.on), e.details.get("tokens", ""))
        for e in seen.requests
    ]
    parts: list[RenderableType] = [
        head,
        table(
            "instance role state >running >waiting >in_flight >tokens/s >used >cached >quarantined >free >retracted",
            instances,
        ),
        table("stage >steps/s >busy occupancy >bubble >resident >queued", stages),
        table("request >age_s state waits_for on >tokens", requests),
        *(f"[red]{escape(name)} does not answer: {escape(why)}[/]" for name, why in seen.silent.items()),
    ]
    return Group(*(line for part in parts for line in (part, "")))


def _bar(busy: float, bubble: float, width: int = 20) -> str:
    """`#` it runs a step, `-` it could not though it had work."""
    full = round(width * busy)
    return ("#" * full + "-" * min(width - full, round(width * bubble))).ljust(width)
