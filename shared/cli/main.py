"""The one console script. Importing this is quick: what a command needs is imported when it runs."""

from __future__ import annotations

import os
import sys

import typer

from stagemesh.shared.cli import (
    access,
    admin,
    bench,
    config,
    doctor,
    dump,
    generate,
    inspect,
    keys,
    profile,
    reaped,
    rolling,
    serve,
    steer,
    top,
    up,
)
from stagemesh.shared.errors import StagemeshError


def make_app() -> typer.Typer:
    """Every command, registered in the order of the help text."""
    app = typer.Typer(
        name="stagemesh",
        help="Serves large language models with prefill and decode on separate pipelines of stages.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    looks = (access, up, generate, bench, inspect, dump, top, profile)
    for module in (*looks, steer, admin, rolling, keys, config, doctor, serve, reaped):
        module.register(app)
    return app


def main(*command: str) -> None:
    """Entry point; `command` goes before the arguments of the process. Exits with 0, or 1 for a failure and 2 for what
    was refused, with a line on stderr. Whoever reads its output may stop reading, as `head` does: a failure without
    words."""
    try:
        make_app()([*command, *sys.argv[1:]], prog_name="stagemesh")
    except (StagemeshError, ExceptionGroup) as error:
        from stagemesh.shared.runtime.exits import EXIT_FAILED, report_failure

        if isinstance(error, ExceptionGroup) and error.split(BrokenPipeError)[1] is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is in its buffer goes nowhere
            sys.exit(EXIT_FAILED)
        sys.exit(report_failure(error))


if __name__ == "__main__":
    main()
