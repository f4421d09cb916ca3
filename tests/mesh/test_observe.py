"""What a running mesh tells of itself: metrics that add up, and what it waits for, also when a stage hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.cli.dump import collect
from stagemesh.shared.obs.dump import ProcessDump, dump_json, dump_text
from stagemesh.shared.obs.entry import Entry, decode_entries
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.inspect import INSPECT
from tests.support.accounted import CONTEXT, FAR, PAGE, Work, prompt, sets_after_three
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.mesh import ROOT
from tests.support.queries import names, queries, selected
from tests.support.running import RunningMesh, running_mesh
from tests.support.scrape import Scrape, scrape_after
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
NUM_LAYERS, KV_HEADS, HEAD_DIM, FLOAT_BYTES = 8, 2, 16, 4
CHUNK, NUM_PAGES = 32, 160
PAGE_BYTES = NUM_LAYERS * 2 * PAGE * KV_HEADS * HEAD_DIM * FLOAT_BYTES
STOPPED_S = 0.7
OF_TLS = {"stagemesh_certificate_expiry_timestamp_seconds"}
STAGES = ("prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=NUM_LAYERS, max_context=CONTEXT)
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", str(NUM_PAGES)]
    folder, patient = tmp_path_factory.mktemp("observe"), "tests.support.patient_up"
    with running_mesh(folder, "--model", str(path), *sizes, module=patient) as running:
        yield running


def metrics_addresses(mesh: RunningMesh) -> dict[str, str]:
    processes = [process for process in mesh.record["processes"] if process["service"] != "nats"]
    return {process["name"]: process["metrics"] for process in processes}


async def scrape_all(mesh: RunningMesh) -> dict[str, Scrape]:
    """Of moments when nothing was in flight."""
    await mesh.check_idle()
    now_s = time.time()
    return {name: await scrape_after(address, now_s) for name, address in metrics_addresses(mesh).items()}


@pytest.fixture(scope="module")
def work(mesh: RunningMesh) -> Work:
    done = Work()
    asyncio.run(done.run(mesh))
    return done


@pytest.fixture(scope="module")
def scrapes(mesh: RunningMesh, work: Work) -> dict[str, Scrape]:
    return asyncio.run(scrape_all(mesh))


def test_the_router_counts_every_request_by_its_end_and_every_token(work: Work, scrapes: dict[str, Scrape]) -> None:
    router = scrapes["router"]
    ended = {outcome: count for outcome, count in router.of("requests_total", "outcome").items() if count}
    assert ended == {"length": len(work.answers), "abort": 1, "rejected": 1}
    tokens = router.of("tokens_total", "kind")
    assert tokens == {"prompt": work.prompt_tokens, "generated": work.generated_tokens}
    assert router.value("live_requests") == 0
    assert router.value("time_to_first_token_seconds_count") == len(work.answers) + 1
    assert router.value("ticket_seconds_count") == len(work.prompt_lengths)
    assert router.value("request_seconds_count") == len(work.answers)
    assert router.value("time_per_output_token_seconds_count") == len(work.answers) - 1
    assert router.value("tokenize_seconds_count") == 1
    assert 0 < router.value("time_to_first_token_seconds_sum") < router.value("request_seconds_sum")


def test_what_dashboard_and_alerts_ask_for_is_there(scrapes: dict[str, Scrape]) -> None:
    asked = [(where, expression) for where, expression in queries() if names(expression)]
    assert len(asked) > 40
    said = set[str]().union(*(scrape.names for scrape in scrapes.values()))
    for where, expression in asked:
        assert names(expression) - OF_TLS <= said, where
        for metric, label, value in selected(expression):
            assert any(value in scrape.label_values(metric, label) for scrape in scrapes.values()), where


def test_heads_and_the_broker_agree_with_what_was_asked(work: Work, scrapes: dict[str, Scrape]) -> None:
    num_tickets = len(work.prompt_lengths)
    cached = {"prefill-0/0": sum(length // PAGE for length in (*work.prompt_lengths, 9)), "decode-0/0": 0}
    for name, num_cached in cached.items():
        head = scrapes[name]
        pages = {"free": NUM_PAGES - num_cached, "used": 0, "cached": num_cached, "quarantined": 0}
        assert head.of("pages", "state") == pages
        assert head.value("pool_pages") == NUM_PAGES
        assert not any(head.of("sequences", "state").values())
        assert head.value("sessions") == 1
        assert head.value("steps_issued_total") == head.value("stage_steps_total") > 0
        assert head.value("reserve_wait_seconds_count") == num_tickets
    prefill, decode, broker = (scrapes[name] for name in ("prefill-0/0", "decode-0/0", "broker"))
    assert prefill.value("chunk_tokens_sum") == work.prompt_tokens
    assert prefill.of("prefill_tokens_total", "how") == {"cached": 0, "computed": work.prompt_tokens}
    assert prefill.value("prefill_seconds_count") == num_tickets + 1
    assert decode.value("first_step_wait_seconds_count") == num_tickets
    assert decode.value("step_rows_sum") == decode.value("decoded_tokens_total") + decode.value("wasted_rows_total")
    # the first token of each is not decode's, nor is the one of the request that asked for one
    decoded = work.generated_tokens - num_tickets - 1
    assert decoded <= decode.value("decoded_tokens_total")  # the aborted one's last ones reached nobody
    assert broker.of("tickets_closed_total", "outcome") == {"committed": num_tickets, "failed": 0}
    assert not any(broker.of("tickets", "state").values())
    assert broker.of("instances", "role") == {"prefill": 1, "decode": 1}
    assert broker.value("reserve_wait_seconds_count") == num_tickets


def test_stages_tell_where_their_time_went_and_the_kv_that_they_sent(work: Work, scrapes: dict[str, Scrape]) -> None:
    now_s = time.time()
    for name in STAGES:
        stage = scrapes[name]
        wall_s = now_s - stage.process_value("start_time_seconds")
        forward_s, bubble_s = stage.value("forward_seconds_total"), stage.value("bubble_seconds_total")
        assert forward_s > 0
        assert bubble_s > 0
        assert forward_s + bubble_s < wall_s
        assert stage.value("residents") == stage.value("queued_commands") == 0
        last = name.endswith("1")
        assert stage.value("hops_total") == (0 if last else stage.value("stage_steps_total"))
        assert (stage.value("hop_seconds_total") > 0) is not last
        role, _, rank = name.partition("-0/")
        assert stage.labels("stage_steps_total") == [{"role": role, "instance": f"{role}-0", "pp_rank": rank}]
    senders = [scrapes["prefill-0/0"], scrapes["prefill-0/1"]]
    assert sum(sender.value("kv_bytes_total") for sender in senders) == work.kv_pages * PAGE_BYTES
    assert [sender.value("kv_pieces_total") for sender in senders] == [work.kv_pages] * 2
    for sender in senders:
        writes = sender.of("kv_writes_total", "state")
        assert writes["done"] > 0
        assert (writes["failed"], writes["cancelled"], sender.value("kv_in_doubt_total")) == (0, 0, 0)
        assert sender.value("kv_seconds_total") > 0


def test_every_process_says_where_its_metrics_are_and_how_it_is(mesh: RunningMesh, scrapes: dict[str, Scrape]) -> None:
    said = {name: reply.metrics_address for name, reply in asyncio.run(mesh.check()).items()}
    assert said == metrics_addresses(mesh)
    assert len(set(said.values())) == len(STAGES) + 2
    for scrape in scrapes.values():
        assert scrape.value("integrity_violation") == 0
        assert scrape.value("loop_lag_seconds_count") > 0
        assert 0 < scrape.value("loop_lag_max_seconds") < 60
        assert scrape.process_value("resident_memory_bytes") > 1 << 20
        assert scrape.process_value("cpu_seconds_total") > 0


def dump(mesh: RunningMesh, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stagemesh.shared.cli.main", "dump", "--router", mesh.router, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".ns")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


async def entries_of(mesh: RunningMesh, kind: str) -> list[Entry]:
    """All entries of `kind`, of all processes."""
    found = []
    for address in (await mesh.peers()).values():
        async with Client(address, INSPECT) as client:
            found += await entries_at(client, kind)
    return found


async def entries_at(client: Client, kind: str) -> list[Entry]:
    reply = await client.call("Dump", inspect_pb2.DumpRequest(), timeout_s=10)
    return [entry for entry in decode_entries(reply.entries) if entry.kind == kind]


async def stands_still(head: Client) -> None:
    """Its executor has done all that it could without the next stage."""
    for _ in range(200):
        (executor,) = await entries_at(head, "executor")
        if executor.waits_for.startswith("the ids of step "):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"the head goes on: {executor}")


def test_an_idle_mesh_waits_for_commands_only(mesh: RunningMesh, work: Work) -> None:
    asyncio.run(mesh.check_idle())
    said: dict[str, Any] = json.loads(dump(mesh, "--json"))
    assert set(said) == {"router", "broker", *STAGES}
    kinds = {name: {entry["kind"] for entry in process["entries"]} for name, process in said.items()}
    assert kinds == {"router": {"session"}, "broker": {"instance"}, **{name: {"executor"} for name in STAGES}}
    for name in STAGES:
        (executor,) = said[name]["entries"]
        assert (executor["state"], executor["waits_for"]) == ("idle", "the next command")


def test_a_router_that_hangs_is_named_and_the_rest_is_found_by_the_config(mesh: RunningMesh) -> None:
    asyncio.run(mesh.check_idle())
    with stopped(mesh.pids["router"]):
        said = dump(mesh, "--config", str(Path(mesh.record["run_dir"]) / "config.toml"))
    assert said.startswith("router  does not answer: ")
    assert "\ndecode-0/1\n" in said
    assert "instance prefill-0, serving" in said
    asyncio.run(mesh.check_idle())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still in the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def decoding(mesh: RunningMesh, count: int) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """`count` requests that have had tokens of decode steps and are far from their end."""
    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        under_way = [asyncio.Event() for _ in range(count)]

        requests = [token_request(prompt(20 + i), FAR, ignore_eos=True, request_id=f"d-{i}") for i in range(count)]
        tasks = [
            group.create_task(generate(client, request, on_response=sets_after_three(event)))
            for request, event in zip(requests, under_way, strict=True)
        ]
        for event in under_way:
            await event.wait()
        yield tasks


def test_a_stage_that_hangs_is_named_with_what_waits_for_it(mesh: RunningMesh) -> None:
    async def run() -> tuple[list[ProcessDump], list[Answer]]:
        peers = await mesh.peers()
        async with decoding(mesh, 3) as tasks, Client(peers["decode-0/0"], INSPECT) as head:
            requests = await entries_of(mesh, "request")
            assert {entry.name.partition("/")[0] for entry in requests} == {"d-0", "d-1", "d-2"}
            assert all(entry.on == ("decode-0",) or entry.state == "answering" for entry in requests)
            with stopped(mesh.pids["decode-0/1"]):  # for less time than it takes a neighbour to give it up
                await stands_still(head)
                dumps = await collect(mesh.router, None, timeout_s=STOPPED_S)
        return dumps, [task.result() for task in tasks]

    dumps, answers = asyncio.run(run())
    lines, said = dump_text(dumps).splitlines(), json.loads(json.dumps(dump_json(dumps)))
    assert lines[0].startswith("decode-0/1  does not answer: ")
    assert "3 request, 3 sequence" in lines[1]
    assert said["decode-0/1"]["error"]
    head = {entry["kind"]: entry for entry in said["decode-0/0"]["entries"]}
    assert head["executor"]["waits_for"].startswith("the ids of step ")
    assert head["executor"]["on"] == ["decode-0/1"]
    assert head["step"]["waits_for"] == "its result"
    assert head["sequence"]["waits_for"] == "the results of its steps"
    named = [entry["name"] for entry in said["router"]["entries"] if entry["kind"] == "request"]
    assert sorted(name.partition("/")[0] for name in named) == ["d-0", "d-1", "d-2"]
    assert [len(answer.token_ids) for answer in answers] == [FAR] * 3  # it has done no harm
    asyncio.run(mesh.check_idle())
