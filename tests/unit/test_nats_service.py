"""A NATS server under an init system: ready when it is, ended when it hangs, stopped with its process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from stagemesh.shared.config import build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.errors import PeerLost, Rejected
from stagemesh.shared.runtime.loop import run
from stagemesh.shared.runtime.nats_service import NatsPlace, NatsService, answers, nats_place
from stagemesh.shared.runtime.notify import Notifier
from tests.support.unit_mesh import free_port

LIMIT_S = 60.0


def child_of(pid: int) -> int:
    (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found)


def place(tmp_path: Path, port: int) -> NatsPlace:
    return NatsPlace("127.0.0.1", port, "stagemesh-test", tmp_path / "store")


def test_it_is_up_when_start_returns_and_gone_at_the_end(tmp_path: Path) -> None:
    port = free_port()

    async def use() -> None:
        async with AsyncExitStack() as stack:
            for child in await NatsService(place(tmp_path, port), Notifier(None)).start(stack):
                child.close()
            assert await answers("127.0.0.1", port)
        assert not await answers("127.0.0.1", port)

    run(use())


@pytest.mark.parametrize(
    ("number", "says", "interval_s"),
    [
        (signal.SIGSTOP, "has not greeted", 0.01),
        (signal.SIGSTOP, "is stopped", LIMIT_S),  # long before it is asked
        (signal.SIGKILL, "ended with", LIMIT_S),
    ],
)
def test_a_server_that_hangs_or_dies_ends_the_service_and_is_gone(
    tmp_path: Path, number: signal.Signals, says: str, interval_s: float
) -> None:
    port = free_port()

    async def use() -> int:
        async with AsyncExitStack() as stack:
            service = NatsService(place(tmp_path, port), Notifier(None), interval_s=interval_s, answer_timeout_s=0.2)
            children = await service.start(stack)
            pid = child_of(os.getpid())
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(child)
                os.kill(pid, number)
            return pid

    with pytest.raises(ExceptionGroup) as caught:
        run(use())
    assert caught.group_contains(PeerLost, match=says)
    assert not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


def test_one_that_cannot_start_says_so(tmp_path: Path) -> None:
    async def use() -> None:
        async with AsyncExitStack() as stack:
            await NatsService(NatsPlace("192.0.2.1", 4222, "x", tmp_path), Notifier(None)).start(stack)

    with pytest.raises(PeerLost, match="its log says why"):
        run(use())


def test_where_it_listens_follows_from_the_config(tmp_path: Path) -> None:
    def of(url: str, **mesh: str) -> NatsPlace:
        document = local_document(LocalLayout(), tmp_path)
        document = {**document, "nats": {"url": url}, "mesh": {**document["mesh"], "insecure": True, **mesh}}
        return nats_place(build_config(document, source="here", environ={}), None, None)

    assert of("nats://127.0.0.1:9").arguments[:4] == ["-a", "127.0.0.1", "-p", "9"]
    assert (of("nats://[::1]").host, of("nats://[::1]").port) == ("::1", 4222)
    assert of("nats://nats.example:4222", listen_host="0.0.0.0").host == "0.0.0.0"
    assert of("nats://127.0.0.1:9").store_dir == tmp_path / "nats"
    with pytest.raises(Rejected, match=r"nats\.url: is empty"):
        of("")
