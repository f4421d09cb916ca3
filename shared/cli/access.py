"""How the commands reach a mesh: options before the command, or the environment. Secrets come from files."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated

import typer

from stagemesh.shared.security.client_files import ClientFiles

_FILES: ContextVar[ClientFiles] = ContextVar("client files", default=ClientFiles())  # noqa: B039 - it is frozen
"""Set before a command begins, and never again: what the library calls a command's context is another for each."""


def register(app: typer.Typer) -> None:
    """Adds the options to `app`."""
    app.callback()(remember)


def tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"stagemesh {version('stagemesh')}")
        raise typer.Exit


def remember(
    api_key_file: Annotated[
        str, typer.Option(envvar="STAGEMESH_API_KEY_FILE", help="Has the API key. Or $STAGEMESH_API_KEY is it.")
    ] = "",
    ca_file: Annotated[
        str, typer.Option(envvar="STAGEMESH_TLS__CA_FILE", help="Speak TLS, and trust what these have signed.")
    ] = "",
    cert_file: Annotated[
        str, typer.Option(envvar="STAGEMESH_TLS__CERT_FILE", help="A certificate of the mesh; generate needs none.")
    ] = "",
    key_file: Annotated[str, typer.Option(envvar="STAGEMESH_TLS__KEY_FILE", help="Its key.")] = "",
    server_name: Annotated[
        str, typer.Option(envvar="STAGEMESH_TLS__SERVER_NAME", help="What the mesh's certificates are for.")
    ] = "",
    version: Annotated[
        bool, typer.Option("--version", help="Print it, and end.", is_eager=True, callback=tell_version)
    ] = False,
) -> None:
    """Serves large language models with prefill and decode on separate pipelines of stages."""
    _FILES.set(ClientFiles(api_key_file, ca_file, cert_file, key_file, server_name))


def client_files() -> ClientFiles:
    """Of the command that runs."""
    return _FILES.get()
