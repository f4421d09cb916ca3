"""Users on a real NATS server: each role says and hears what is its own, and strangers nothing."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from stagemesh.shared.bus.access import BusAccess, read_password
from stagemesh.shared.bus.base import Bus
from stagemesh.shared.bus.nats import open_nats_bus
from stagemesh.shared.bus.roles import ROLES, inbox_of, render_roles
from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.obs.log import Log
from stagemesh.shared.security.material import Material
from tests.support.certificates import EXPIRED, Authority, write_files
from tests.support.mesh import ROOT
from tests.support.nats import NatsServer

LIMIT_S = 30.0
LOG = Log(logging.getLogger("stagemesh.test"))
COMMAND = "stagemesh.local.admin.decode-0.drain"
EVENT = "stagemesh.events.local.decode-0"


class Place:
    """A server as deploy/nats has it, on loopback, with passwords and certificates of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority("mesh")
        command = [sys.executable, "-m", "stagemesh.shared.cli.main", "keys", "nats", str(folder)]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=60)
        (folder / "roles.conf").write_text((ROOT / "deploy/nats/roles.conf").read_text())
        self.files = write_files(folder, self.authority.issue("nats"), self.authority.pem, "server")
        text = (ROOT / "deploy/nats/nats-server.conf").read_text()
        for there, here in (
            ("/etc/stagemesh/nats/server.pem", self.files.cert),
            ("/etc/stagemesh/nats/server.key", self.files.key),
            ("/etc/stagemesh/mesh-ca.pem", self.files.ca),
            ("/var/lib/stagemesh/nats", folder / "store"),
        ):
            assert there in text
            text = text.replace(there, str(here))
        (folder / "nats-server.conf").write_text(text)
        self.server = NatsServer(folder / "store", folder / "nats-server.conf")

    @property
    def url(self) -> str:
        return f"tls://{self.server.address}"

    def access(self, role: str, *, name: str = "peer", issued: Any = None, ca_pem: bytes | None = None) -> BusAccess:
        issued = issued or self.authority.issue(name)
        files = write_files(self.folder, issued, ca_pem or self.authority.pem, name)
        return BusAccess(role, self.folder / role, Material(files, LOG))

    @asynccontextmanager
    async def bus(self, role: str) -> AsyncIterator[Bus]:
        opening = open_nats_bus(self.url, name="test", connect_timeout_s=LIMIT_S, access=self.access(role), log=LOG)
        async with opening as bus, asyncio.TaskGroup() as group:
            running = group.create_task(bus.run())
            yield bus
            running.cancel()

    @asynccontextmanager
    async def client(self, role: str, errors: list[str] | None = None) -> AsyncIterator[Client]:
        """As a program of an operator connects."""

        async def note(error: Exception) -> None:
            if errors is not None:
                errors.append(str(error))

        client = await nats.connect(self.url, error_cb=note, **self.access(role).options(self.url))
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("nats"))
    try:
        yield found
    finally:
        found.server.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    asyncio.run(go())


async def settle(client: Client) -> None:
    """Returns when the server has taken all, and said what it thinks of it. The first answer may be an older one."""
    for _ in range(2):
        await client.flush()


def test_the_file_in_deploy_is_what_the_table_says() -> None:
    text = (ROOT / "deploy/nats/roles.conf").read_text()
    assert text.partition("\n")[2] == render_roles()
    assert set(ROLES) == {"stage", "broker", "router", "admin", "observer"}


def test_passwords_are_private_and_made_once(place: Place) -> None:
    words = {role: read_password(place.folder / role) for role in ROLES}
    assert len(set(words.values())) == len(ROLES)
    assert all((place.folder / name).stat().st_mode & 0o777 == 0o600 for name in (*ROLES, "passwords.conf"))


def test_a_stage_takes_epochs_the_broker_says_events_and_neither_gives_commands(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        async with place.bus("stage") as stage, place.bus("broker") as broker, place.bus("admin") as admin:
            assert [await stage.next_epoch("decode-0") for _ in range(2)] == [1, 2]
            for pattern in (EVENT, COMMAND):
                await admin.subscribe(pattern, lambda subject, payload: heard.put_nowait((subject, payload)))
            with caplog.at_level(logging.WARNING, logger="stagemesh.test"):
                stage.publish(COMMAND, b"drain")
                # an answer comes behind the server's word for it
                while not stage.stats.num_refused:
                    assert await stage.next_epoch("decode-0") > 2
                broker.publish(EVENT, b"joined")
                assert await heard.get() == (EVENT, b"joined")
            assert stage.stats.num_refused == 1
            assert heard.empty()
            admin.publish(COMMAND, b"drain")
            assert await heard.get() == (COMMAND, b"drain")

    run(work)
    (said,) = [record.__dict__["fields"] for record in caplog.records if record.name == "stagemesh.test"]
    assert said["role"] == "stage"
    assert "permissions violation for publish" in said["error"].lower()
    assert COMMAND in said["error"].lower()


def test_an_operator_asks_the_broker_and_is_answered_and_nobody_else_hears_it(place: Place) -> None:
    async def work() -> None:
        async with place.client("broker") as process, place.client("admin") as admin:

            async def answer(message: Any) -> None:
                await message.respond(b"done")

            for subject in (COMMAND, "$SRV.PING"):
                await process.subscribe(subject, cb=answer)
            await settle(process)
            for subject in (COMMAND, "$SRV.PING"):
                assert (await admin.request(subject, b"", timeout=LIMIT_S)).data == b"done"
        for role in ("stage", "router", "observer"):
            errors: list[str] = []
            async with place.client(role, errors) as other:
                await other.subscribe(COMMAND)
                await settle(other)
            assert len(errors) == 1

    run(work)


@pytest.mark.parametrize(
    ("role", "subject"),
    [
        ("stage", "$SRV.PING"),
        ("stage", EVENT),
        ("router", EVENT),
        ("stage", "$JS.API.STREAM.DELETE.KV_stagemesh_epochs"),
        ("router", "$KV.stagemesh_epochs.decode-0"),
        ("router", COMMAND),
        ("broker", COMMAND),
        ("observer", COMMAND),
        ("observer", EVENT),
        ("stage", "_INBOX.admin.x"),
    ],
)
def test_what_a_role_may_not_say_is_refused(place: Place, role: str, subject: str) -> None:
    async def work() -> None:
        errors: list[str] = []
        async with place.client(role, errors) as client:
            await client.publish(subject, b"")
            await settle(client)
        assert [error for error in errors if f'publish to "{subject}"'.lower() in error.lower()]

    run(work)


def test_no_role_hears_the_answers_of_another(place: Place) -> None:
    async def work() -> None:
        for role in set(ROLES) - {"admin"}:
            errors: list[str] = []
            async with place.client(role, errors) as client:
                for other in (f"{inbox_of('admin')}.>", "_INBOX.>", ">"):
                    await client.subscribe(other)
                await settle(client)
            assert len(errors) == 3

    run(work)


def test_strangers_get_nowhere_and_hear_why(place: Place, tmp_path: Path) -> None:
    async def attempt(access: BusAccess, url: str = "", timeout_s: float = 0.5) -> Exception:
        try:
            async with open_nats_bus(
                url or place.url, name="test", connect_timeout_s=timeout_s, access=access, log=LOG
            ):
                raise AssertionError("it was let in")
        except (Rejected, Retryable) as error:
            return error

    async def work() -> None:
        wrong = tmp_path / "stage"
        wrong.write_text("wrong")
        wrong.chmod(0o600)
        right = place.access("stage")
        said = await attempt(BusAccess("stage", wrong, right.material), timeout_s=LIMIT_S)
        assert isinstance(said, Rejected)
        assert "wrong" not in str(said)
        assert isinstance(await attempt(BusAccess("", None, right.material), timeout_s=LIMIT_S), Rejected)
        stranger = Authority("stranger")
        for access in (
            place.access("stage", name="strange", issued=stranger.issue("peer")),
            place.access("stage", name="old", issued=place.authority.issue("peer", EXPIRED)),
            place.access("stage", name="wary", ca_pem=stranger.pem),
        ):
            assert isinstance(await attempt(access), Retryable)
        # without TLS it says nothing, the password least of all
        assert isinstance(await attempt(right, f"nats://{place.server.address}"), Retryable)
        async with place.bus("stage") as bus:
            await bus.next_epoch("others-are-not-disturbed")

    run(work)


def test_a_bus_comes_back_with_new_certificates_of_a_new_authority(tmp_path: Path) -> None:
    place, later = Place(tmp_path), Authority("later")
    back = asyncio.Event()

    async def work() -> None:
        access = place.access("stage")
        opening = open_nats_bus(
            place.url,
            name="test",
            connect_timeout_s=LIMIT_S,
            watcher=lambda connected: back.set() if connected else None,
            access=access,
            log=LOG,
        )
        async with opening as bus:
            assert await bus.next_epoch("decode-0") == 1
            write_files(tmp_path, later.issue("nats"), later.pem, "server")
            write_files(tmp_path, later.issue("peer"), later.pem, "peer")
            await asyncio.to_thread(place.server.reload)
            assert await bus.next_epoch("decode-0") == 2  # over the connection that it has
            await asyncio.to_thread(place.server.stop)
            await asyncio.to_thread(place.server.start)
            await back.wait()
            assert await bus.next_epoch("decode-0") == 3

    try:
        run(work)
    finally:
        place.server.stop()


def test_the_end_of_a_connection_says_nothing_that_nobody_can_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path)
    lost = asyncio.Event()

    async def work() -> None:
        opening = open_nats_bus(
            place.url,
            name="test",
            connect_timeout_s=LIMIT_S,
            watcher=lambda connected: None if connected else lost.set(),
            access=place.access("stage"),
            log=LOG,
        )
        async with opening:
            await asyncio.to_thread(place.server.stop)
            await lost.wait()

    try:
        run(work)
    finally:
        place.server.stop()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
