"""`stagemesh reaped`: for whatever starts stages, once the process of one has been reaped."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from stagemesh.shared.cli.serve import ConfigOption, MaybeInstanceOption, StageOption


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command()(reaped)


def reaped(
    config: ConfigOption,
    stage: StageOption = None,
    instance: MaybeInstanceOption = None,
    rank: Annotated[
        int | None, typer.Option(envvar="STAGEMESH_RANK", min=0, help="The stage. [every stage of the instance]")
    ] = None,
    epoch: Annotated[
        int | None, typer.Option(min=1, help="Of the process. [what the stage has noted in the run dir]")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until the broker must have taken it.")] = 60.0,
) -> None:
    """Report that the process of a stage is gone, so that pages in quarantine for it are free again.

    Only for whoever has waited for that process, such as its unit's ExecStopPost: a process that still lives would
    corrupt other answers. Does nothing if the stage has never had an epoch.
    """
    from stagemesh.shared.config import load_config
    from stagemesh.shared.core.identity import InstanceRef
    from stagemesh.shared.errors import Rejected
    from stagemesh.shared.obs.log import choose_form, configure
    from stagemesh.shared.runtime.loop import run
    from stagemesh.shared.runtime.plan import parse_stage
    from stagemesh.shared.stage.reaped import noted_epoch, report_reaped

    if stage is not None:
        instance, rank = parse_stage(stage)
    if instance is None:
        raise Rejected("--stage", "is missing: instance and rank, such as prefill-0:1")
    deployment = load_config(config, os.environ)
    pp_size = deployment.instance(instance).pp_size
    if rank is not None and rank >= pp_size:
        raise Rejected("rank", f"{instance} has stages 0 to {pp_size - 1}, not {rank}")
    if epoch is None and rank is None:
        raise Rejected("epoch", "name it, or the rank of the stage that has noted it")
    if epoch is None and rank is not None:
        epoch = noted_epoch(Path(deployment.mesh.run_dir), instance, rank)
    if epoch is not None:
        log = configure("reaped", instance, rank, form=choose_form(os.environ, sys.stderr))
        run(report_reaped(deployment, InstanceRef(instance, epoch), rank, log, timeout))
