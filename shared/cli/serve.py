"""`stagemesh router|broker|prefill|decode`: one service in this process, as a unit of systemd starts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stagemesh.shared.runtime.plan import ServiceName

ConfigOption = Annotated[
    Path, typer.Option("--config", envvar="STAGEMESH_CONFIG", help="The TOML file of the deployment.")
]
InstanceOption = Annotated[
    str, typer.Option("--instance", envvar="STAGEMESH_INSTANCE", help="The instance this stage is of.")
]
RankOption = Annotated[
    int, typer.Option("--rank", envvar="STAGEMESH_RANK", min=0, help="The stage's place in its instance.")
]


def register(app: typer.Typer) -> None:
    """Adds the four commands to `app`."""
    for command in (router, broker, prefill, decode):
        app.command()(command)


def router(config: ConfigOption) -> None:
    """Run the router of a deployment."""
    _serve("router", config)


def broker(config: ConfigOption) -> None:
    """Run the KV broker of a deployment."""
    _serve("broker", config)


def prefill(config: ConfigOption, instance: InstanceOption, rank: RankOption) -> None:
    """Run one stage of a prefill instance."""
    _serve("prefill", config, instance, rank)


def decode(config: ConfigOption, instance: InstanceOption, rank: RankOption) -> None:
    """Run one stage of a decode instance."""
    _serve("decode", config, instance, rank)


def _serve(service: ServiceName, path: Path, instance: str | None = None, pp_rank: int | None = None) -> None:
    from stagemesh.shared.config import load_config
    from stagemesh.shared.runtime.plan import ENTRIES, find_process, load_entry

    config = load_config(path, os.environ)
    spec = find_process(config, service, instance, pp_rank)
    load_entry(ENTRIES[service])(config, spec.instance, spec.pp_rank)
