"""The units' own commands as real processes: ready, kept alive by progress, and drained with requests in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import Dial
from stagemesh.shared.security.keys import make_key
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.tiny_models import make_tiny
from tests.support.unit_mesh import UnitHost, free_port, unit_host

pytestmark = pytest.mark.slow
NATS, BROKER, ROUTER = (f"stagemesh-{name}.service" for name in ("nats", "broker", "router"))
STAGES = tuple(f"stagemesh-{role}@{role}-0:{rank}.service" for role in ("prefill", "decode") for rank in (0, 1))
MAX_TOKENS = 600
CONFIG = """
[mesh]
run_dir = "{root}/run/stagemesh"
[nats]
url = "nats://127.0.0.1:{nats_port}"
[broker]
listen = "unix:{root}/run/stagemesh/broker.sock"
[router]
listen = "127.0.0.1:0"
[auth]
keys_file = "credential:keys"
[model]
path = "{model}"
[engine]
num_pages = 100
drain_timeout_s = 100  # more than the units' own time to stop
[[instance]]
name = "prefill-0"
role = "prefill"
pp_size = 2
stages = ["unix:{root}/run/stagemesh/p0.sock", "unix:{root}/run/stagemesh/p1.sock"]
[[instance]]
name = "decode-0"
role = "decode"
pp_size = 2
stages = ["unix:{root}/run/stagemesh/d0.sock", "unix:{root}/run/stagemesh/d1.sock"]
"""


async def ask(client: Client, first_token: int, begun: asyncio.Event) -> Answer:
    def note(answer: Answer) -> bool:
        if len(answer.token_ids) > 2:
            begun.set()
        return True

    request = token_request([first_token, 6, 7], MAX_TOKENS, ignore_eos=True)
    return await generate(client, request, on_response=note)


async def drain_under_load(host: UnitHost, dial: Dial) -> list[Answer]:
    """Every service but broker and bus is stopped while two requests are being answered."""
    begun = [asyncio.Event(), asyncio.Event()]
    async with (
        Client(host.running[ROUTER].last("X_ADDRESS"), GENERATOR, dial=dial) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(ask(client, 5 + index, event)) for index, event in enumerate(begun)]
        for event in begun:
            await event.wait()
        host.terminate(ROUTER, *STAGES)
        await asyncio.to_thread(host.until, "STOPPING", ROUTER, *STAGES)
        assert not any(task.done() for task in tasks), "they were to be in flight"
    return [task.result() for task in tasks]


def test_units_get_ready_are_kept_alive_and_drain_with_requests_in_flight(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", num_layers=4, max_context=1024)
    root = tmp_path / "r"
    (root / "run/stagemesh").mkdir(parents=True)
    key, hashed = make_key("somebody")
    config = CONFIG.format(root=root, model=model, nats_port=free_port())
    with unit_host(root, config, {"keys": hashed}, ["router/20-keys.conf"]) as host:
        for name in (ROUTER, *STAGES, BROKER, NATS):  # the worst order
            host.start(name)
        every = (NATS, BROKER, ROUTER, *STAGES)
        host.until("READY", *every)
        host.until("WATCHDOG", *every, times=2)
        assert {host.running[name].last("STATUS") for name in every} == {"serving"}
        assert all(host.running[name].count("STATUS") > 1 for name in (*STAGES, ROUTER, NATS))
        answers = asyncio.run(drain_under_load(host, Dial(api_key=key)))
        assert [len(answer.token_ids) for answer in answers] == [MAX_TOKENS] * 2
        assert [answer.reason for answer in answers] == ["length"] * 2
        host.wait(ROUTER, *STAGES)
        host.terminate(BROKER, NATS)
        host.until("STOPPING", BROKER, NATS)
        host.wait(BROKER, NATS)
