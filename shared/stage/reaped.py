"""What whoever starts a stage says once its process has been reaped: nothing of it can act any more.

reaped --> this host has sent all that its sockets held --> the broker knows --> pages in quarantine are free

A stage leaves a note of its epoch in the run dir, for a starter that was not told.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from stagemesh.shared.config import Config
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import Retryable
from stagemesh.shared.obs.log import Log, choose_form, configure
from stagemesh.shared.rpc.access import mesh_access
from stagemesh.shared.rpc.broker import BROKER, BrokerClient
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.runtime.rundir import write_atomically
from stagemesh.shared.transfer.sockets import until_sent

TIMEOUT_S: Final = 60.0


def note_epoch(run_dir: Path, instance: str, pp_rank: int, epoch: int, log: Log) -> None:
    """Before the stage does anything in the name of that epoch."""
    try:
        write_atomically(_note(run_dir, instance, pp_rank), f"{epoch}\n")
    except Retryable as error:
        log.warning("the epoch is not noted: a report of the reaped process must name it", error=str(error))


def noted_epoch(run_dir: Path, instance: str, pp_rank: int) -> int | None:
    """Of the stage's last start; None if it never came to have one."""
    with suppress(OSError, ValueError):
        return int(_note(run_dir, instance, pp_rank).read_text())
    return None


def _note(run_dir: Path, instance: str, pp_rank: int) -> Path:
    return run_dir / f"{instance}.{pp_rank}.epoch"


async def report_reaped(config: Config, ref: InstanceRef, pp_rank: int | None, log: Log, timeout_s: float) -> None:
    """`pp_rank` None: every stage of the instance. Raises Retryable if the broker does not take it in time: the pages
    stay in quarantine then."""
    try:
        async with asyncio.timeout(timeout_s):
            await until_sent()
            async with Client(config.broker.listen, BROKER, dial=mesh_access(config.tls, log).dial) as client:
                broker = BrokerClient(client)
                await retry(lambda: broker.report_reaped(ref, pp_rank))
    except TimeoutError:
        raise Retryable(f"that {ref} is reaped was not reported within {timeout_s:g} s") from None
    log.info("reported: its processes are reaped", instance_name=ref.name, instance_epoch=ref.epoch, pp_rank=pp_rank)


def run(config: Config, instance: str | None, epoch: int | None) -> None:
    """For a supervisor: all processes of that epoch are reaped."""
    from stagemesh.shared.runtime.loop import run as run_loop

    assert instance is not None
    assert epoch is not None
    log = configure("reaped", instance, form=choose_form(os.environ, sys.stderr))
    run_loop(report_reaped(config, InstanceRef(instance, epoch), None, log, TIMEOUT_S))
