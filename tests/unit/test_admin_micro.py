"""Commands over a real NATS server: errors as the protocol has them, a server that goes and comes, who may call."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.bus.access import NOBODY, bus_access
from stagemesh.shared.bus.micro import Endpoint, admin_subject, call_endpoint, serve_endpoints
from stagemesh.shared.bus.nats import NatsBus, open_nats_bus
from stagemesh.shared.bus.roles import ROLES, render_roles
from stagemesh.shared.config import NatsSection
from stagemesh.shared.errors import (
    Bug,
    Exhausted,
    ProtocolViolation,
    Rejected,
    Retryable,
    StagemeshError,
    Unauthenticated,
    Unsupported,
)
from stagemesh.shared.obs.log import Log
from tests.support.admin import CommandError, Operator, operator
from tests.support.mesh import ROOT
from tests.support.nats import NatsServer, nats_server

LIMIT_S = 60.0
LOG = Log(logging.getLogger("test"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "store") as found:
        yield found


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(limited())


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[NatsServer]:
    """With the users that a mesh has, each with its role's name as password."""
    config = tmp_path / "nats.conf"
    config.write_text(f'jetstream {{ store_dir: "{tmp_path}" }}\n' + render_roles({role: role for role in ROLES}))
    for role in ROLES:
        (tmp_path / role).write_text(role)
        (tmp_path / role).chmod(0o600)
    server = NatsServer(tmp_path, config)
    try:
        yield server
    finally:
        server.stop()


async def answer(payload: bytes) -> bytes:
    """As told by the request."""
    match json.loads(payload):
        case {"raise": "rejected"}:
            raise Rejected("limit", "must be in 1..3,\nget less")
        case {"raise": "retryable"}:
            raise Retryable("the head is away")
        case {"raise": "unsupported"}:
            raise Unsupported("the instance does not know it")
        case {"raise": "violation"}:
            raise ProtocolViolation("not now")
        case {"raise": "timeout"}:
            raise TimeoutError
        case {"raise": "bug"}:
            raise ValueError("a handler's own mistake")
        case {"bytes": size}:
            return b"x" * int(size)
    return payload


def bus_of(url: str, role: str = "", folder: Path | None = None) -> AbstractAsyncContextManager[NatsBus]:
    access = NOBODY if folder is None else bus_access(NatsSection(url=url, credentials_dir=str(folder)), role, None)
    return open_nats_bus(url, name=role or "caller", connect_timeout_s=LIMIT_S, access=access)


@asynccontextmanager
async def served(url: str, folder: Path | None = None) -> AsyncIterator[NatsBus]:
    endpoint = Endpoint("echo.back", {"help": "Says it again.", "request": "{}"}, answer)
    async with (
        bus_of(url, "broker", folder) as bus,
        serve_endpoints(bus, mesh="m", version="1.2.3", endpoints=[endpoint], log=LOG),
    ):
        yield bus


@pytest.mark.parametrize(
    ("asked", "code", "text", "kind"),
    [
        ({"raise": "rejected"}, "400", "limit: must be in 1..3, get less", Rejected),
        ({"raise": "retryable"}, "503", "the head is away", Retryable),
        ({"raise": "unsupported"}, "501", "the instance does not know it", Unsupported),
        ({"raise": "violation"}, "412", "not now", ProtocolViolation),
        ({"raise": "timeout"}, "504", "no answer in time", Retryable),
        ({"raise": "bug"}, "500", "ValueError: a handler's own mistake", Bug),
        ({"bytes": 2 << 20}, "429", "the answer has 2097152 bytes, over the server's limit: ask for less", Exhausted),
    ],
)
def test_an_error_is_told_in_headers_and_raised_on_the_other_side(
    server: NatsServer, asked: dict[str, Any], code: str, text: str, kind: type[StagemeshError]
) -> None:
    async def scenario() -> None:
        async with served(server.url), operator(server.url) as plain:
            by = Operator(plain.client, "m")
            with pytest.raises(CommandError) as caught:
                await by.call("echo.back", **asked)
            assert (caught.value.code, caught.value.text) == (code, text)
            async with bus_of(server.url) as bus:
                payload = json.dumps(asked).encode()
                with pytest.raises(kind) as raised:
                    await call_endpoint(bus, admin_subject("m", "echo.back"), payload, timeout_s=LIMIT_S)
                assert str(raised.value) == text
            stats = await by.discover("STATS")
            assert (stats["endpoints"][0]["num_requests"], stats["endpoints"][0]["num_errors"]) == (2, 2)
            assert text in stats["endpoints"][0]["last_error"]

    run(scenario())


def test_nobody_there_is_an_error_at_once_and_a_message_without_a_way_back_does_no_harm(server: NatsServer) -> None:
    async def scenario() -> None:
        subject = admin_subject("m", "echo.back")
        async with bus_of(server.url) as bus:
            with pytest.raises(Retryable, match=r"nobody serves stagemesh\.m\.admin\.echo\.back"):
                await call_endpoint(bus, subject, b"{}", timeout_s=LIMIT_S)
            async with served(server.url):
                for payload in (b"{}", b"nothing", b'{"raise": "rejected"}'):
                    await bus.client.publish(subject, payload)
                assert await call_endpoint(bus, subject, b'{"a": 1}', timeout_s=LIMIT_S) == b'{"a": 1}'
            with pytest.raises(Retryable, match="nobody serves"):
                await call_endpoint(bus, subject, b"{}", timeout_s=LIMIT_S)

    run(scenario())


def test_commands_are_served_again_by_a_server_that_was_away(server: NatsServer) -> None:
    async def scenario() -> None:
        subject = admin_subject("m", "echo.back")
        async with served(server.url) as bus:
            server.stop()
            server.start()
            async with bus_of(server.url) as caller:
                found = None
                while found is None:
                    with suppress(Retryable):
                        found = await call_endpoint(caller, subject, b"{}", timeout_s=LIMIT_S)
                assert found == b"{}"
            assert bus.stats.num_reconnects == 1

    run(scenario())


def test_who_may_not_call_is_told_so_and_nothing_is_carried_out(guarded: NatsServer, tmp_path: Path) -> None:
    async def scenario() -> None:
        subject = admin_subject("m", "echo.back")
        async with served(guarded.url, tmp_path) as bus:
            async with bus_of(guarded.url, "admin", tmp_path) as admin:
                assert await call_endpoint(admin, subject, b'{"a": 1}', timeout_s=LIMIT_S) == b'{"a": 1}'
            for role in ("observer", "router", "stage"):
                async with bus_of(guarded.url, role, tmp_path) as other:
                    with pytest.raises(Unauthenticated, match=rf"this user of NATS may not call {subject}"):
                        await call_endpoint(other, subject, b"{}", timeout_s=LIMIT_S)
            assert bus.stats.num_refused == 0
            async with bus_of(guarded.url, "observer", tmp_path) as observer:
                await observer.client.request("$SRV.INFO.stagemesh", b"", timeout=LIMIT_S)
                stats = await observer.client.request("$SRV.STATS.stagemesh", b"", timeout=LIMIT_S)
        assert json.loads(stats.data)["endpoints"][0]["num_requests"] == 1

    run(scenario())


def test_the_command_line_says_that_it_may_not(guarded: NatsServer, tmp_path: Path) -> None:
    arguments = ["--nats", guarded.url, "--nats-credentials", str(tmp_path), "--nats-role", "observer"]
    command = [sys.executable, "-m", "stagemesh.shared.cli.main", "admin", "mesh.status", *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert finished.returncode != 0
    assert finished.stderr.splitlines()[-1] == "error: this user of NATS may not call stagemesh.local.admin.mesh.status"
