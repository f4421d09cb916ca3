"""`stagemesh up`: a whole deployment on this machine, from a config file or from a few options."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.shared.errors import Rejected

if TYPE_CHECKING:
    from stagemesh.shared.config import Config
    from stagemesh.shared.config.local import LocalLayout


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command()(up)


def up(
    config: Annotated[Path | None, typer.Option(help="A deployment's TOML file.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="The router's; 0: any free. [8470]")] = None,
    openai_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="An OpenAI server's, on loopback; 0: any free. [none]")
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written as JSON when requests can be sent.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Kept at the end. [a private temporary one]")] = None,
    startup_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds until all must be ready.")] = 180.0,
    model: Annotated[
        str | None, typer.Option(help="smollm2, a directory, a GGUF file or dummy:PATH. [smollm2]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [cpu]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float64 or bfloat16. [float32]")] = None,
    transfer: Annotated[str | None, typer.Option(help="mooncake or nixl. [mooncake]")] = None,
    num_pages: Annotated[int | None, typer.Option(help="KV pages of each instance.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens of a page. [16]")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Prompt tokens of a prefill step. [256]")] = None,
    max_running: Annotated[int | None, typer.Option(help="Sequences of a decode instance. [64]")] = None,
    prefill_pp: Annotated[int | None, typer.Option(min=1, help="Stages of a prefill instance. [2]")] = None,
    decode_pp: Annotated[int | None, typer.Option(min=1, help="Stages of a decode instance. [2]")] = None,
    prefill_layers: Annotated[str | None, typer.Option(help="Layers a stage, as 12,18. [balanced]")] = None,
    decode_layers: Annotated[str | None, typer.Option(help="Layers a stage, as 16,14. [balanced]")] = None,
    prefill_gpus: Annotated[str | None, typer.Option(help="The GPUs of its stages, as 0,1. [all share 0]")] = None,
    decode_gpus: Annotated[str | None, typer.Option(help="The GPUs of its stages, as 0,1. [all share 0]")] = None,
    prefill_instances: Annotated[int | None, typer.Option(min=1, help="[1]")] = None,
    decode_instances: Annotated[int | None, typer.Option(min=1, help="[1]")] = None,
) -> None:
    """Start a whole mesh on this machine: NATS server, broker, router, prefill and decode stages.

    Returns when it is told to stop (Ctrl-C, SIGTERM) and has drained.
    """
    from stagemesh.shared.cli.model_check import check_model
    from stagemesh.shared.runtime.options import Limits, UpOptions
    from stagemesh.shared.runtime.preflight import check_engine, check_gateway, check_ports
    from stagemesh.shared.runtime.reporter import Reporter
    from stagemesh.shared.runtime.supervisor import supervise

    layout = _Layout(
        prefill_pp,
        decode_pp,
        prefill_layers,
        decode_layers,
        prefill_gpus,
        decode_gpus,
        prefill_instances,
        decode_instances,
    )
    settings: dict[str, object] = {
        "router.listen": None if port is None else f"127.0.0.1:{port}",
        "openai.port": openai_port,
        "model.path": model,
        "model.device": device,
        "model.dtype": dtype,
        "transfer.backend": transfer,
        "engine.num_pages": num_pages,
        "engine.page_size": page_size,
        "engine.chunk_size": chunk_size,
        "engine.max_running": max_running,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    if ready_file is not None and not ready_file.absolute().parent.is_dir():
        raise Rejected("ready_file", f"its directory {ready_file.absolute().parent} does not exist")
    with ExitStack() as stack:
        effective = _effective_config(stack, config, run_dir, layout, given)
        check_engine(effective)
        check_gateway(effective)
        check_ports(effective)
        check_model(effective)
        options = UpOptions(
            config=effective,
            ready_file=ready_file.absolute() if ready_file else None,
            startup_timeout_s=startup_timeout,
            limits=Limits(start_s=startup_timeout),
            child_environ=_child_environ(),
        )
        code = supervise(options, Reporter(sys.stderr))
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout options as they were given."""

    prefill_pp: int | None
    decode_pp: int | None
    prefill_layers: str | None
    decode_layers: str | None
    prefill_gpus: str | None
    decode_gpus: str | None
    prefill_instances: int | None
    decode_instances: int | None

    def refuse_any(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) is not None:
                raise Rejected(f"--{name.replace('_', '-')}", "the layout comes from --config; give one or the other")

    def local(self, device: str) -> LocalLayout:
        from stagemesh.shared.config.local import LocalLayout, RoleLayout

        return LocalLayout(
            device=device,
            prefill=RoleLayout(
                self.prefill_pp or 2,
                self.prefill_instances or 1,
                _numbers("--prefill-layers", self.prefill_layers),
                _numbers("--prefill-gpus", self.prefill_gpus),
            ),
            decode=RoleLayout(
                self.decode_pp or 2,
                self.decode_instances or 1,
                _numbers("--decode-layers", self.decode_layers),
                _numbers("--decode-gpus", self.decode_gpus),
            ),
        )


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise Rejected(option, f"expected numbers with commas between them, such as 12,18; got {text!r}")
    return tuple(int(part) for part in parts)


def _effective_config(
    stack: ExitStack, path: Path | None, run_dir: Path | None, layout: _Layout, given: dict[str, object]
) -> Config:
    """The config to run, with its run dir made and entered into `stack`."""
    from stagemesh.shared.config.load import build_config, read_document
    from stagemesh.shared.config.local import local_document
    from stagemesh.shared.runtime.rundir import private_run_dir

    if path is None:
        entered = stack.enter_context(private_run_dir(run_dir))
        document = local_document(layout.local(str(given.get("model.device", "cpu"))), entered)
        # its addresses lie in the run dir, so an override of that from the environment would tear them apart
        given = {**given, "mesh.run_dir": str(entered)}
        return build_config(document, source="the options of up", environ=os.environ, options=given)
    layout.refuse_any()
    if run_dir is not None:
        given = {**given, "mesh.run_dir": str(run_dir.absolute())}
    config = build_config(read_document(path), source=str(path), environ=os.environ, options=given)
    stack.enter_context(private_run_dir(Path(config.mesh.run_dir)))
    return config


def _child_environ() -> dict[str, str]:
    """The services' stderr is a pipe to us; whether people read it is known here alone."""
    from stagemesh.shared.obs.log import FORM_VARIABLE, choose_form

    return {FORM_VARIABLE: choose_form(os.environ, sys.stderr)}
