"""`stagemesh admin`: the commands of operators, made from their table: what NATS takes as JSON are arguments here."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from stagemesh.shared.admin.commands import Command
    from stagemesh.shared.bus.access import BusAccess
    from stagemesh.shared.bus.nats import NatsBus
    from stagemesh.shared.config import NatsSection

CALL_TIMEOUT_S = 20.0
SWITCH_TIMEOUT_S = 3800.0
_TARGET = ("nats", "ready_file", "config", "mesh", "credentials", "role_on_nats")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

NatsOption = Annotated[str, typer.Option("--nats", envvar="STAGEMESH_NATS__URL", help="The NATS server's address.")]
ReadyOption = Annotated[Path | None, typer.Option("--ready-file", help="Or that of `up`, which has it.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Or the config file, which has it.")]
CredentialsOption = Annotated[
    str,
    typer.Option(
        "--nats-credentials",
        envvar="STAGEMESH_NATS__CREDENTIALS_DIR",
        help="Has the role's password, if no file says so.",
    ),
]
RoleOption = Annotated[str, typer.Option("--nats-role", help="The user on NATS: admin; observer may only watch.")]
MeshOption = Annotated[str, typer.Option("--mesh", help="Its name, with --nats.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as it is.")]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a mesh is asked, and as whom."""

    url: str
    mesh: str
    access: BusAccess


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    from stagemesh.shared.admin.commands import COMMANDS

    admin = typer.Typer(help="Look at a mesh and change it, over NATS.", no_args_is_help=True)
    for command in COMMANDS.values():
        numbers = {"ignore_unknown_options": True}  # -1 is no option
        admin.command(command.name, help=command.help, context_settings=numbers)(_made_from(command))
    admin.command("watch", help="Print events as they are said, until Ctrl-C.")(watch)
    app.add_typer(admin, name="admin")


def _made_from(command: Command) -> Callable[..., None]:
    """A function with a parameter for each field of the request: one that must be given is an argument."""
    import msgspec

    parameters = [
        inspect.Parameter("nats", _KEYWORD, default="", annotation=NatsOption),
        inspect.Parameter("ready_file", _KEYWORD, default=None, annotation=ReadyOption),
        inspect.Parameter("config", _KEYWORD, default=None, annotation=ConfigOption),
        inspect.Parameter("mesh", _KEYWORD, default="local", annotation=MeshOption),
        inspect.Parameter("credentials", _KEYWORD, default="", annotation=CredentialsOption),
        inspect.Parameter("role_on_nats", _KEYWORD, default="admin", annotation=RoleOption),
        inspect.Parameter("as_json", _KEYWORD, default=False, annotation=JsonOption),
    ]
    for field in msgspec.structs.fields(command.request):
        # checked by the table and by the broker, so that the words are the same
        given: Any = Annotated[str | None, typer.Option(f"--{field.name.replace('_', '-')}", help=_limits(field.type))]
        default: Any = None
        if field.required:
            given, default = Annotated[str, typer.Argument(help=_limits(field.type))], inspect.Parameter.empty
        parameters.append(inspect.Parameter(field.name, _KEYWORD, default=default, annotation=given))

    def run_command(**values: Any) -> None:
        fields = {field: values[field] for field in command.request.__struct_fields__ if values[field] is not None}
        target = find_target(**{name: values[name] for name in _TARGET})
        _call(command, target, fields, as_json=values["as_json"])

    run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run_command


def _limits(kind: Any) -> str:
    choices = getattr(kind, "__args__", ())
    return ", ".join(choices) + "." if choices and all(isinstance(choice, str) for choice in choices) else ""


def find_target(
    *, nats: str, ready_file: Path | None, config: Path | None, mesh: str, credentials: str, role_on_nats: str
) -> Target:
    """Raises Rejected where nothing says where the server is, or a password cannot be read."""
    from stagemesh.shared.bus.access import bus_access
    from stagemesh.shared.config import NatsSection
    from stagemesh.shared.config.address import check_bus_url

    files = client_files()
    material = files.material(Log(logging.getLogger(__name__)))

    def reached(section: NatsSection, name: str) -> Target:
        return Target(section.url, name, bus_access(section, role_on_nats, material, files.server_name))

    if ready_file is not None:
        from stagemesh.shared.runtime.ready import read_ready

        record = read_ready(ready_file)
        folder = record.nats_credentials or credentials
        return reached(NatsSection(url=record.nats, credentials_dir=folder), record.mesh)
    if config is not None:
        import os

        from stagemesh.shared.config import look_at_config

        found = look_at_config(config, os.environ)
        return reached(_usable(found.nats, credentials), found.mesh.name)
    if not nats:
        raise Rejected("nats", "say where the server is: --ready-file, --config, --nats or $STAGEMESH_NATS__URL")
    url = nats if "://" in nats else f"nats://{nats}"
    check_bus_url(url, "--nats")
    return reached(NatsSection(url=url, credentials_dir=credentials), mesh)


def _usable(nats: NatsSection, credentials: str) -> NatsSection:
    """As an operator reaches the server. Raises Rejected for what only processes of the mesh know."""
    from stagemesh.shared.config import NatsSection
    from stagemesh.shared.config.paths import CREDENTIAL

    if not nats.url:
        raise Rejected("nats.url", "is empty, so `stagemesh up` has a server of its own: --ready-file tells which")
    folder = credentials or nats.credentials_dir
    if folder.startswith(CREDENTIAL):
        raise Rejected("nats.credentials_dir", f"{folder} is for units: --nats-credentials says where yours is")
    return NatsSection(url=nats.url, credentials_dir=folder)


def _call(command: Command, target: Target, fields: dict[str, str], *, as_json: bool) -> None:
    from stagemesh.shared.cli.tables import show
    from stagemesh.shared.runtime.loop import run

    payload = _payload(command, fields)
    answer = run(_ask(command, target, payload))
    if as_json:
        print(answer.decode())
    else:
        show(command.name, json.loads(answer))


def _payload(command: Command, fields: dict[str, str]) -> bytes:
    """Raises Rejected, as the broker would."""
    import msgspec

    from stagemesh.shared.admin.commands import read_request

    kinds = {field.name: field.type for field in msgspec.structs.fields(command.request)}
    values = {name: _value(text, kinds[name]) for name, text in fields.items()}
    payload = msgspec.json.encode(values)
    read_request(command, payload)
    return payload


def _value(text: str, kind: Any) -> int | float | str:
    """A number where the field takes one."""
    import msgspec

    tries: list[int | float | str] = [text]
    for number in (float, int):
        with suppress(ValueError):
            tries.insert(0, number(text))
    for value in tries:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            continue
        return value
    return tries[0]


def _bus(target: Target) -> AbstractAsyncContextManager[NatsBus]:
    from stagemesh.shared.bus.nats import open_nats_bus

    silent = logging.getLogger(f"{__name__}.bus")  # what goes wrong is the command's error
    silent.disabled = True
    return open_nats_bus(
        target.url, name="stagemesh admin", connect_timeout_s=5.0, access=target.access, log=Log(silent)
    )


async def _ask(command: Command, target: Target, payload: bytes) -> bytes:
    from stagemesh.shared.bus.micro import admin_subject, call_endpoint

    timeout_s = SWITCH_TIMEOUT_S if command.name == "role.switch" else CALL_TIMEOUT_S
    async with _bus(target) as bus:
        return await call_endpoint(bus, admin_subject(target.mesh, command.name), payload, timeout_s=timeout_s)


def watch(
    nats: NatsOption = "",
    ready_file: ReadyOption = None,
    config: ConfigOption = None,
    mesh: MeshOption = "local",
    credentials: CredentialsOption = "",
    role_on_nats: RoleOption = "admin",
    as_json: JsonOption = False,
) -> None:
    """A line an event, and one where some are missing."""
    from stagemesh.shared.runtime.loop import run

    target = find_target(
        nats=nats,
        ready_file=ready_file,
        config=config,
        mesh=mesh,
        credentials=credentials,
        role_on_nats=role_on_nats,
    )
    run(_watch(target, as_json=as_json))


async def _watch(target: Target, *, as_json: bool) -> None:
    import asyncio

    from stagemesh.shared.bus.events import Gaps, events_subject, read_event
    from stagemesh.shared.cli.tables import event_line

    gaps, reader_gone = Gaps(), asyncio.Event()

    def heard(subject: str, payload: bytes) -> None:
        event = read_event(payload)
        if missed := gaps.note(event):
            print(f"{missed} events are missing here", file=sys.stderr, flush=True)
        try:
            print(payload.decode() if as_json else event_line(event), flush=True)
        except BrokenPipeError:
            reader_gone.set()

    async with _bus(target) as bus:
        await bus.subscribe(events_subject(target.mesh, ">"), heard)
        print(f"listening to {events_subject(target.mesh, '>')}", file=sys.stderr, flush=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(bus.run())
            await reader_gone.wait()
            raise BrokenPipeError
