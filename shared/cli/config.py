"""`stagemesh config`: what can be configured, and whether a file is right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    config = typer.Typer(help="Look at configurations.", no_args_is_help=True)
    config.command("reference", help="Print every section and key: type, range, default, meaning.")(reference)
    config.command("check", help="Check a deployment's file, with the overrides of the environment.")(check)
    app.add_typer(config, name="config")


def reference(
    as_toml: Annotated[bool, typer.Option("--toml", help="As a file to fill in, instead of Markdown.")] = False,
) -> None:
    """Made from the classes of this version."""
    from stagemesh.shared.config import reference

    print(reference.toml() if as_toml else reference.markdown(), end="")


def check(path: Annotated[Path, typer.Argument(help="The TOML file of a deployment.")]) -> None:
    """Prints the effective config; exits with 2 and a line naming the key if it is refused."""
    from stagemesh.shared.config import dump_toml, look_at_config

    print(dump_toml(look_at_config(path, os.environ)), end="")
