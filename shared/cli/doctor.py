"""`stagemesh doctor`: whether this host can run what it is to run, and what to do where it cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from stagemesh.shared.doctor.findings import Finding

STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("doctor", help="Check this host: what is missing, and what to do about it.")(doctor)


def doctor(
    config: Annotated[
        Path | None, typer.Option(envvar="STAGEMESH_CONFIG", help="Also check what this deployment needs here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of the findings.")] = False,
) -> None:
    """Exits with 1 if anything fails; warnings are no failure."""
    from stagemesh.shared.config import look_at_config
    from stagemesh.shared.doctor.facts import collect
    from stagemesh.shared.doctor.judge import judge

    loaded = None if config is None else look_at_config(config, os.environ)
    findings = list(judge(collect(loaded), loaded))
    _print_json(findings) if as_json else _print_table(findings)
    if any(finding.state.value == "fail" for finding in findings):
        sys.exit(1)


def _print_json(findings: Sequence[Finding]) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    from stagemesh.shared.cli.tables import WIDTH

    table = Table()
    for title in ("", "looked at", "seen", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        state = finding.state.value
        table.add_row(f"[{STYLES[state]}]{state}[/]", finding.subject, finding.seen, finding.remedy)
    Console(width=None if Console().is_terminal else WIDTH).print(table)
