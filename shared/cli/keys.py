"""`stagemesh keys`: who may call the router. Takes effect within moments, without a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagemesh.shared.errors import Rejected

KeysFileOption = Annotated[
    Path, typer.Option("--file", envvar="STAGEMESH_AUTH__KEYS_FILE", help="The keys file, auth.keys_file.")
]
NameArgument = Annotated[str, typer.Argument(help="Of the client: it goes into logs and metrics.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    keys = typer.Typer(
        help="Make and take away API keys, and the passwords of the roles on NATS.", no_args_is_help=True
    )
    keys.command("add", help="Make a key, and print it this once.")(add)
    keys.command("remove", help="Take all keys of a client away.")(remove)
    keys.command("list", help="Show the clients.")(list_)
    keys.command("nats", help="Make passwords for the roles on NATS, in files.")(nats)
    app.add_typer(keys, name="keys")


def add(
    name: NameArgument,
    file: KeysFileOption,
    weight: Annotated[float | None, typer.Option(help="The client's share of the turns. [1]")] = None,
) -> None:
    """A client that has a key gets another one; the old one stays until it is removed from the file."""
    from stagemesh.shared.security.keys import make_key

    lines = _lines(file)
    key, line = make_key(name)
    _write(file, [*lines, line if weight is None else f"{line} weight={weight:g}"])
    print(key)


def remove(name: NameArgument, file: KeysFileOption) -> None:
    """Raises Rejected if there is none."""
    lines = _lines(file)
    kept = [line for line in lines if line.partition("#")[0].split()[:1] != [name]]
    if len(kept) == len(lines):
        raise Rejected("name", f"no key of {name!r} is in {file}")
    _write(file, kept)


def list_(file: KeysFileOption) -> None:
    """Names, numbers of keys, weights."""
    from stagemesh.shared.security.keys import parse_keys

    for client in parse_keys("\n".join(_lines(file))).values():
        print(f"{client.name}  keys {len(client.keys)}  weight {client.weight:g}")


def nats(
    directory: Annotated[Path, typer.Argument(help="nats.credentials_dir: a file for each role, and passwords.conf.")],
) -> None:
    """Roles that have a password keep it: to change one, remove its file first. The server takes it at its reload."""
    import secrets

    from stagemesh.shared.bus.access import read_password
    from stagemesh.shared.bus.roles import ROLES, render_passwords
    from stagemesh.shared.runtime.rundir import write_atomically

    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role in ROLES:
            if not (directory / role).exists():
                write_atomically(directory / role, f"{secrets.token_urlsafe(32)}\n")
        passwords = {role: read_password(directory / role) for role in ROLES}
        write_atomically(directory / "passwords.conf", render_passwords(passwords))
    except OSError as error:
        raise Rejected("directory", f"cannot use {directory}: {error.strerror}") from error
    print(f"{directory}: {', '.join(ROLES)}")


def _lines(file: Path) -> list[str]:
    from stagemesh.shared.security.keys import FIELD
    from stagemesh.shared.security.reloaded import read_secret

    return read_secret(file, FIELD).decode().splitlines() if file.exists() else []


def _write(file: Path, lines: list[str]) -> None:
    from stagemesh.shared.runtime.rundir import write_atomically
    from stagemesh.shared.security.keys import parse_keys

    text = "".join(f"{line}\n" for line in lines)
    parse_keys(text)
    write_atomically(file, text)
