"""Commands that look at a running mesh without changing it: `check` its invariants, `trace` what it did."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.cli.generate import DEFAULT_ROUTER, RouterOption

CALL_TIMEOUT_S = 10.0


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command("check", help="Check the invariants of every process of a mesh.")(check)
    app.command("trace", help="Show what the stages of a mesh did, and what overlapped.")(trace)


def check(
    router: RouterOption = DEFAULT_ROUTER,
    idle: Annotated[bool, typer.Option("--idle", help="Also fail if anything is in flight.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Exits with 1 if an invariant does not hold anywhere, or with --idle if anything is held."""
    from stagemesh.shared.runtime.loop import run

    replies = run(_ask_all(router, "Check"))
    report = {
        name: {
            "ok": r.ok,
            "violation": r.violation,
            "held": dict(r.held),
            "gauges": dict(r.gauges),
            "metrics_address": r.metrics_address,
        }
        for name, r in sorted(replies.items())
    }
    if as_json:
        print(json.dumps(report))
    else:
        for name, said in report.items():
            held = ", ".join(f"{key} {value}" for key, value in said["held"].items() if value) or "nothing in flight"
            cached = f", {count} pages cached" if (count := said["gauges"].get("pages_cached")) else ""
            print(f"{name:>14}  {'ok' if said['ok'] else said['violation']}  {held}{cached}")
    if any(not said["ok"] or (idle and any(said["held"].values())) for said in report.values()):
        sys.exit(1)


def trace(
    router: RouterOption = DEFAULT_ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="Print all spans as a JSON array.")] = False,
    window_ms: Annotated[int, typer.Option(help="Milliseconds that the picture shows.", min=1)] = 1000,
) -> None:
    """Prints a picture of the busiest window, and how often things ran at the same time."""
    from stagemesh.shared.obs.timeline import overlaps, picture, read_spans
    from stagemesh.shared.runtime.loop import run

    replies = run(_ask_all(router, "Trace"))
    spans = sorted((s for r in replies.values() for s in read_spans(r.spans)), key=lambda span: span["start_ns"])
    if as_json:
        print(json.dumps(spans))
        return
    # only the head of a decode instance joins what others have written: `committed` marks it
    decode = {span["process"].partition("/")[0] for span in spans if span["name"] == "committed"}
    found = overlaps(spans, decode)
    print(f"{len(spans)} spans of {len(replies)} processes; the busiest {window_ms} ms:")
    print(f"{'':>14}  digits: a decode step of that microbatch   #: a prefill chunk   ~: KV on its way")
    print("\n".join(picture(spans, window_ns=window_ms * 1_000_000)))
    print(f"decode microbatches computed on two stages at the same time: {found.concurrent_microbatches} times")
    print(f"decode steps issued before their predecessor's tokens were back: {found.steps_ahead} of {found.steps}")
    print(
        f"KV writes under the computation of their own stage: {found.writes_under_compute} of {found.writes}, "
        f"{found.hidden_share:.0%} of their time"
    )


async def _ask_all(router: str, method: str) -> dict[str, Any]:
    """The answer of every process that the router knows, by name. Raises StagemeshError if one does not answer."""
    from stagemesh.shared.pb import inspect_pb2
    from stagemesh.shared.rpc.access import peer_dial, router_dial
    from stagemesh.shared.rpc.client import Client
    from stagemesh.shared.rpc.inspect import INSPECT

    files = client_files()
    async with Client(router, INSPECT, wait=False, dial=router_dial(files)) as client:
        reply = await client.call("Peers", inspect_pb2.PeersRequest(), timeout_s=CALL_TIMEOUT_S)
    requests = {"Check": inspect_pb2.CheckRequest, "Trace": inspect_pb2.TraceRequest}
    answers = {}
    for peer in reply.peers:
        dial = router_dial(files) if peer.name == "router" else peer_dial(files)
        async with Client(peer.address, INSPECT, wait=False, dial=dial) as client:
            answers[peer.name] = await client.call(method, requests[method](), timeout_s=CALL_TIMEOUT_S)
    return answers
