"""`stagemesh reaped`: what a unit says when the process of its stage is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.config import build_config, dump_toml
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import Retryable
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.stage.reaped import note_epoch, noted_epoch, report_reaped

LOG = Log(logging.getLogger("stagemesh.test"))


class Broker:
    """Takes reports of reaped processes, and nothing else."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, int | None]] = []

    def __getattr__(self, name: str) -> Any:
        async def refuse(request: Any, context: Any) -> None:
            raise AssertionError(f"{name} was not expected")

        return refuse

    async def ReportReaped(  # noqa: N802
        self, request: broker_pb2.ReapedReport, context: Any
    ) -> broker_pb2.ReapedReply:
        rank = request.pp_rank if request.HasField("pp_rank") else None
        self.reports.append((request.instance.name, request.instance.epoch, rank))
        return broker_pb2.ReapedReply()


def config_in(tmp_path: Path) -> Any:
    return build_config(local_document(LocalLayout(port=0), tmp_path), source="the test", environ={}, options={})


async def command(tmp_path: Path, *options: str) -> tuple[int, str]:
    """Its exit code, and what it has said."""
    (tmp_path / "config.toml").write_text(dump_toml(config_in(tmp_path)))
    arguments = ["-m", "stagemesh.shared.cli.main", "reaped", "--config", str(tmp_path / "config.toml"), *options]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def test_the_epoch_that_the_stage_has_noted_is_reported(tmp_path: Path) -> None:
    async def run() -> None:
        broker = Broker()
        server = Server({BROKER: broker})
        await server.start(config_in(tmp_path).broker.listen)
        assert await command(tmp_path, "--instance", "prefill-0", "--rank", "1") == (0, "")
        assert broker.reports == []  # it never had one: there is nothing to be fenced
        note_epoch(tmp_path, "prefill-0", 1, 7, LOG)
        assert noted_epoch(tmp_path, "prefill-0", 1) == 7
        assert (await command(tmp_path, "--stage", "prefill-0:1"))[0] == 0
        assert (await command(tmp_path, "--instance", "prefill-0", "--epoch", "8"))[0] == 0
        await server.stop()
        assert broker.reports == [("prefill-0", 7, 1), ("prefill-0", 8, None)]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--instance", "prefill-0", "--rank", "2"), "rank: prefill-0 has stages 0 to 1, not 2"),
        (("--epoch", "3"), "--stage: is missing: instance and rank"),
        (("--instance", "prefill-0"), "epoch: name it, or the rank"),
        (("--instance", "nobody", "--rank", "0"), "no instance is named 'nobody'"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    code, said = asyncio.run(command(tmp_path, *options))
    assert code == 2
    assert says in said


def test_a_broker_that_is_away_is_waited_for_up_to_a_bound(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(Retryable, match=r"that prefill-0@3 is reaped was not reported within 0\.2 s"):
            await report_reaped(config_in(tmp_path), InstanceRef("prefill-0", 3), None, LOG, 0.2)

    asyncio.run(run())
