"""`stagemesh router|openai|broker|nats|prefill|decode`: one service in this process, as a unit of systemd starts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.shared.errors import Rejected

if TYPE_CHECKING:
    from stagemesh.shared.runtime.plan import ServiceName

ConfigOption = Annotated[
    Path, typer.Option("--config", envvar="STAGEMESH_CONFIG", help="The TOML file of the deployment.")
]
StageOption = Annotated[
    str | None, typer.Option("--stage", envvar="STAGEMESH_STAGE", help="Instance and rank in one, such as decode-0:1.")
]
InstanceOption = Annotated[
    str, typer.Option("--instance", envvar="STAGEMESH_INSTANCE", help="The instance this stage is of.")
]
MaybeInstanceOption = Annotated[
    str | None, typer.Option("--instance", envvar="STAGEMESH_INSTANCE", help="The instance this stage is of.")
]
RankOption = Annotated[
    int | None, typer.Option("--rank", envvar="STAGEMESH_RANK", min=0, help="The stage's place in its instance.")
]
StoreOption = Annotated[Path | None, typer.Option(help="Where JetStream keeps its files. [nats in the run dir]")]
ServerConfigOption = Annotated[Path | None, typer.Option(help="A file of the server's own, for accounts and TLS.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    for command in (router, openai, broker, nats, prefill, decode):
        app.command()(command)


def router(config: ConfigOption) -> None:
    """Run the router of a deployment."""
    _serve("router", config)


def openai(config: ConfigOption) -> None:
    """Run the OpenAI server of a deployment, on the router's host, at openai.port."""
    from stagemesh.shared.config import load_config
    from stagemesh.shared.runtime.gateway_service import run

    run(load_config(config, os.environ))


def broker(config: ConfigOption) -> None:
    """Run the KV broker of a deployment."""
    _serve("broker", config)


def nats(config: ConfigOption, store_dir: StoreOption = None, server_config: ServerConfigOption = None) -> None:
    """Run the NATS server of a deployment, at the address that nats.url names."""
    from stagemesh.shared.config import load_config
    from stagemesh.shared.runtime.nats_service import run

    run(load_config(config, os.environ), store_dir, server_config)


def prefill(
    config: ConfigOption, stage: StageOption = None, instance: MaybeInstanceOption = None, rank: RankOption = None
) -> None:
    """Run one stage of a prefill instance."""
    _serve("prefill", config, *_stage(stage, instance, rank))


def decode(
    config: ConfigOption, stage: StageOption = None, instance: MaybeInstanceOption = None, rank: RankOption = None
) -> None:
    """Run one stage of a decode instance."""
    _serve("decode", config, *_stage(stage, instance, rank))


def _stage(stage: str | None, instance: str | None, rank: int | None) -> tuple[str, int]:
    from stagemesh.shared.runtime.plan import parse_stage

    if stage is not None:
        if instance is not None or rank is not None:
            raise Rejected("--stage", "names instance and rank already; give one or the other")
        return parse_stage(stage)
    if instance is None or rank is None:
        raise Rejected("--stage", "is missing: instance and rank, such as decode-0:1")
    return instance, rank


def _serve(service: ServiceName, path: Path, instance: str | None = None, pp_rank: int | None = None) -> None:
    from stagemesh.shared.config import load_config
    from stagemesh.shared.runtime.plan import ENTRIES, find_process, run_entry

    config = load_config(path, os.environ)
    spec = find_process(config, service, instance, pp_rank)
    run_entry(ENTRIES[service], config, spec.instance, spec.pp_rank)
