"""TLS between processes: who is trusted gets through, nobody else does, and certificates change under running calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import Rejected, Retryable, StagemeshError, Unauthenticated
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.rpc.guard import Callers, Listening
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.security.keys import KeyRing, make_key
from stagemesh.shared.security.material import Material, TlsFiles
from tests.support.certificates import EXPIRED, Authority, write_files
from tests.support.rpc_bench import FILL, FakeBroker

LOG = Log(logging.getLogger("stagemesh.test"))
LIMIT_S = 60.0
GENERATOR = generator_pb2.DESCRIPTOR.services_by_name["Generator"]


class Echo:
    """A stream goes on while `next` is fed."""

    def __init__(self) -> None:
        self.next: asyncio.Queue[bool] = asyncio.Queue()
        self.calls = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        while await self.next.get():
            yield generator_pb2.GenerateResponse(text=request.text)

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls += 1
        return generator_pb2.AbortResponse(was_live=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return generator_pb2.GetModelInfoResponse()


class Place:
    """Files of a server and of clients, and the authority that they trust."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority, self.stranger = folder, Authority("mesh"), Authority("stranger")
        self.server = write_files(folder, self.authority.issue("server"), self.authority.pem, "server")

    def dial(self, name: str, *, issued: Any = None, ca_pem: bytes | None = None) -> Dial:
        issued = issued or self.authority.issue(name)
        return Dial(Material(write_files(self.folder, issued, ca_pem or self.authority.pem, name), LOG))


Work = Callable[[str, Echo], Awaitable[None]]


def serve(listening: Listening, work: Work, callers: Callers | None = None) -> None:
    async def run() -> None:
        echo = Echo()
        server = Server({GENERATOR: echo}, listening, callers)
        address = await server.start("127.0.0.1:0")
        try:
            async with asyncio.timeout(LIMIT_S):
                await work(address, echo)
        finally:
            await server.stop()

    asyncio.run(run())


async def ask(address: str, dial: Dial) -> None:
    async with Client(address, GENERATOR, wait=False, dial=dial) as client:
        await client.call("Abort", generator_pb2.AbortRequest(), timeout_s=LIMIT_S)


async def refused(address: str, dial: Dial) -> str:
    with pytest.raises(StagemeshError) as error:
        await ask(address, dial)
    assert isinstance(error.value, Retryable | Unauthenticated)
    return str(error.value)


def test_peers_with_certificates_of_the_mesh_talk_and_nobody_else(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def work(address: str, echo: Echo) -> None:
        peer = place.dial("peer")
        await ask(address, peer)
        assert "may want TLS" in await refused(address, PLAIN)
        without = Dial(Material(TlsFiles(None, None, peer.material.files.ca if peer.material else None), LOG))
        assert "may want TLS" in await refused(address, without)
        await refused(address, place.dial("strange", issued=place.stranger.issue("peer")))
        await refused(address, place.dial("old", issued=place.authority.issue("old", EXPIRED)))
        said = await refused(address, place.dial("wary", ca_pem=place.stranger.pem))
        assert "CERTIFICATE_VERIFY_FAILED" in said
        assert echo.calls == 1
        await ask(address, peer)

    serve(Listening(Material(place.server, LOG), clients=True), work)


def test_a_server_whose_certificate_is_old_or_for_another_host_is_not_trusted(tmp_path: Path) -> None:
    place = Place(tmp_path)
    dial = place.dial("peer")
    for issued, says in (
        (place.authority.issue("old", EXPIRED), "certificate has expired"),
        (place.authority.issue("elsewhere", hosts=("elsewhere.example",)), "not for that name"),
    ):
        files = write_files(tmp_path, issued, place.authority.pem, "server")

        async def work(address: str, echo: Echo, says: str = says) -> None:
            assert says in await refused(address, dial)

        serve(Listening(Material(files, LOG)), work)

    async def named(address: str, echo: Echo) -> None:
        await ask(address, Dial(dial.material, "elsewhere.example"))

    serve(Listening(Material(place.server, LOG)), named)


def test_unix_sockets_are_plain_on_both_sides(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def run() -> None:
        server = Server({GENERATOR: Echo()}, Listening(Material(place.server, LOG), clients=True))
        address = await server.start(f"unix:{tmp_path}/s")
        await ask(address, place.dial("peer"))
        await server.stop()

    asyncio.run(run())


def test_certificates_and_authorities_change_and_no_running_stream_ends(tmp_path: Path) -> None:
    place, later = Place(tmp_path), Authority("later")

    async def work(address: str, echo: Echo) -> None:
        dial = place.dial("peer")
        early = place.dial("early", issued=place.authority.issue("early"))
        async with Client(address, GENERATOR, dial=dial) as client:
            stream = client.receive("Generate", generator_pb2.GenerateRequest(text="a"))
            echo.next.put_nowait(True)
            assert (await anext(stream)).text == "a"
            write_files(tmp_path, later.issue("server"), later.pem, "server")
            write_files(tmp_path, later.issue("peer"), later.pem, "peer")
            await client.call("Abort", generator_pb2.AbortRequest(), timeout_s=LIMIT_S)
            echo.next.put_nowait(True)
            assert (await anext(stream)).text == "a"  # over the old connection
            assert len(client._old) == 1
            echo.next.put_nowait(False)
            assert [each async for each in stream] == []
            assert client._old == set()
        await refused(address, early)

    serve(Listening(Material(place.server, LOG), clients=True), work)


def test_half_of_a_change_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(tmp_path)
    material = Material(place.server, LOG)
    before = material.current()
    new = place.authority.issue("server")
    assert place.server.cert is not None
    assert place.server.key is not None
    place.server.cert.write_bytes(new.cert_pem)
    with caplog.at_level(logging.WARNING, logger="stagemesh.test"):
        assert material.current() is before
        assert material.current() is before
    assert len(caplog.records) == 1
    place.server.key.write_bytes(new.key_pem)
    assert material.current().key == new.key_pem
    assert new.key_pem.decode() not in repr(material.current())


@pytest.mark.parametrize(
    ("broken", "field"), [("cert", "tls.cert_file"), ("key", "tls.cert_file"), ("ca", "tls.ca_file")]
)
def test_files_that_are_no_pem_are_refused_at_the_start(tmp_path: Path, broken: str, field: str) -> None:
    place = Place(tmp_path)
    path: Path = getattr(place.server, broken)
    path.write_bytes(b"none")
    with pytest.raises(Rejected) as error:
        Material(place.server, LOG)
    assert error.value.field == field
    path.unlink()
    with pytest.raises(Rejected, match="cannot read"):
        Material(place.server, LOG)


def test_a_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.server.key is not None
    place.server.key.chmod(0o644)
    with pytest.raises(Rejected, match="open to every user") as error:
        Material(place.server, LOG)
    assert error.value.field == "tls.key_file"


def test_calls_without_a_right_key_are_ended_before_their_message_is_read_but_for_health(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (key, line), (wrong, _) = make_key("alice"), make_key("alice")
    path = tmp_path / "keys"
    path.write_text(line)
    path.chmod(0o600)
    callers = Callers(KeyRing(path, LOG), LOG)

    async def work(address: str, echo: Echo) -> None:
        await ask(address, Dial(api_key=key))
        with caplog.at_level(logging.WARNING, logger="stagemesh.test"):
            for dial in (PLAIN, Dial(api_key=wrong), Dial(api_key="nobody.x")):
                assert "key" in await refused(address, dial)
                async with Client(address, GENERATOR, dial=dial) as client:
                    stream = client.receive("Generate", generator_pb2.GenerateRequest())
                    with pytest.raises(Unauthenticated):
                        await anext(stream)
        assert echo.calls == 1
        assert callers.num_refused == 6
        assert 1 <= len(caplog.records) <= 6
        assert all(secret.partition(".")[2] not in caplog.text for secret in (key, wrong))
        from grpc_health.v1 import health_pb2

        health = health_pb2.DESCRIPTOR.services_by_name["Health"]
        async with Client(address, health) as client:
            await client.call("Check", health_pb2.HealthCheckRequest(), timeout_s=LIMIT_S)

    serve(Listening(), work, callers)


@pytest.mark.parametrize("first", ["quick", "call"])
def test_quick_calls_move_to_a_connection_with_the_new_certificate(tmp_path: Path, first: str) -> None:
    """One that is under way has its answer over the old one, which then ends."""
    place, later = Place(tmp_path), Authority("later")

    async def main() -> None:
        broker = FakeBroker()
        server = Server({BROKER: broker}, Listening(Material(place.server, LOG), clients=True))
        address = await server.start("127.0.0.1:0")
        gate, waiting = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            waiting.set()
            await gate.wait()

        async with asyncio.timeout(LIMIT_S), Client(address, BROKER, dial=place.dial("peer")) as client:
            broker.on_fill = wait
            early = asyncio.create_task(client.quick("Fill", FILL, timeout_s=LIMIT_S))
            await waiting.wait()
            broker.on_fill = None
            write_files(tmp_path, later.issue("server"), later.pem, "server")
            write_files(tmp_path, later.issue("peer"), later.pem, "peer")
            before = client._wire
            await getattr(client, first)("Fill", FILL, timeout_s=LIMIT_S)
            await client.quick("Fill", FILL, timeout_s=LIMIT_S)
            assert client._wire is not before
            assert client._wire.num_calls == 1
            assert not early.done()
            gate.set()
            await early
            await client.quick("Fill", FILL, timeout_s=LIMIT_S)  # which takes its time
            assert not client._old, "the old one ends with its last answer"
        await server.stop()

    asyncio.run(main())
