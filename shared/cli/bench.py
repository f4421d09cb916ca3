"""`stagemesh bench`: sends random prompts to a mesh and prints how fast the answers were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.cli.generate import DEFAULT_ROUTER, RouterOption
from stagemesh.shared.errors import Rejected

if TYPE_CHECKING:
    from stagemesh.shared.bench.drive import Measurement
    from stagemesh.shared.bench.frames import Load
    from stagemesh.shared.security.client_files import ClientFiles

CALL_TIMEOUT_S = 10.0


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("bench", help="Send random prompts and measure throughput and latencies.")(bench)


def bench(
    num_prompts: Annotated[int, typer.Option(help="Requests.", min=1)],
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a request.", min=1)],
    output_len: Annotated[int, typer.Option(help="New tokens of a request; the end token is ignored.", min=1)],
    router: RouterOption = DEFAULT_ROUTER,
    range_ratio: Annotated[
        float, typer.Option(help="Lengths are uniform in [R x length, length].", min=0.0, max=1.0)
    ] = 1.0,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second, with Poisson arrivals; inf: all at once.")
    ] = float("inf"),
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests at once; a request's clock runs while it waits.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same prompts, lengths and arrivals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where to write all figures and every request's record.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Client processes, where one cannot keep up.", min=1, max=64)] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for each answer.", min=0.001)] = 3600.0,
) -> None:
    """Exits with 1 if any request failed: one that has not brought exactly the tokens it asked for."""
    from stagemesh.shared.bench.frames import Load
    from stagemesh.shared.bench.workload import Workload
    from stagemesh.shared.runtime.loop import run

    processes = min(processes, num_prompts)
    if max_concurrency is not None and max_concurrency < processes:
        raise Rejected("--max-concurrency", f"must be at least the number of processes, {processes}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise Rejected("--json", f"its directory {json_file.absolute().parent} does not exist")
    files = client_files()
    vocab_size, max_request_tokens = run(_limits(router, files))
    workload = Workload(num_prompts, input_len, output_len, vocab_size, range_ratio, request_rate, seed)
    workload.check_fits(max_request_tokens)
    load = Load(router, workload, processes, max_concurrency, timeout_s)
    if not _report(load, _measure(load, files), json_file):
        sys.exit(1)


async def _limits(router: str, files: ClientFiles) -> tuple[int, int]:
    """Vocabulary and the longest request of what is served."""
    from stagemesh.shared.pb import generator_pb2
    from stagemesh.shared.rpc.access import router_dial
    from stagemesh.shared.rpc.client import Client

    service = generator_pb2.DESCRIPTOR.services_by_name["Generator"]
    async with Client(router, service, wait=False, dial=router_dial(files)) as client:
        info = await client.call("GetModelInfo", generator_pb2.GetModelInfoRequest(), timeout_s=CALL_TIMEOUT_S)
    return info.vocab_size, info.max_request_tokens


def _measure(load: Load, files: ClientFiles) -> Measurement:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from stagemesh.shared.bench.drive import measure
    from stagemesh.shared.bench.frames import Progress
    from stagemesh.shared.runtime.loop import run

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=load.workload.num_prompts)

        def show(progress: Progress) -> None:
            failed = f", {progress.failed} failed" if progress.failed else ""
            bar.update(task, completed=progress.done, description=f"{progress.tokens} tokens{failed}")

        measurement = run(measure(load, show, files))
        tokens = sum(record.output_tokens for record in measurement.records)
        failed = sum(bool(record.failure) for record in measurement.records)
        show(Progress(len(measurement.records), failed, tokens))
    return measurement


def _report(load: Load, measurement: Measurement, json_file: Path | None) -> bool:
    """True if every request was a success."""
    from stagemesh.shared.bench.report import lag_warning, table, to_json
    from stagemesh.shared.bench.stats import summarize

    summary = summarize(measurement.records)
    print(table(summary, measurement.max_lag_s, load.num_processes))
    if json_file is not None:
        json_file.write_bytes(to_json(summary, measurement.records, load, measurement.max_lag_s))
    if (warning := lag_warning(measurement.max_lag_s, load.num_processes)) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    return summary.failed == 0
