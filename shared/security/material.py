"""Certificates, their keys, and whom to trust: PEM files, checked before they are used."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.security.expiry import describe_end, is_soon, not_after_s
from stagemesh.shared.security.reloaded import Reloaded, read_file, read_secret

MAX_READS: Final = 5


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`ca` may be None on a server that asks for no client certificates; `cert` and `key` on a client that shows none.
    The sections are where the config, or the command line, names them."""

    cert: Path | None
    key: Path | None
    ca: Path | None
    section: str = "tls."
    ca_section: str = "tls."


@dataclass(frozen=True, slots=True)
class Pems:
    """The content of those files. Empty where there is none. `not_after_s` is the Unix time at which they are of no use
    any more, None if that is not known."""

    cert: bytes = b""
    key: bytes = b""
    ca: bytes = b""
    not_after_s: float | None = None

    def __repr__(self) -> str:
        return "Pems(...)"  # a key is never shown


class Material(Reloaded[Pems]):
    """A process's certificate and what it trusts. Raises Rejected at the start if they are wrong."""

    def __init__(self, files: TlsFiles, log: Log) -> None:
        self.files = files
        paths = [path for path in (files.cert, files.key, files.ca) if path is not None]
        super().__init__(paths, lambda: _read_and_warn(files, log), log)


def _read_and_warn(files: TlsFiles, log: Log) -> Pems:
    pems, now_s = read_pems(files), time.time()
    if pems.not_after_s is not None and is_soon(pems.not_after_s, now_s):
        said = describe_end(pems.not_after_s, now_s)
        log.warning("a certificate is to be replaced", files=f"{files.cert}, {files.ca}", expiry=said)
    return pems


def read_pems(files: TlsFiles) -> Pems:
    """Raises Rejected if a file is no PEM, or the key is not the certificate's."""
    for _ in range(MAX_READS):
        pems = _read(files)
        fill_context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
        if pems == _read(files):  # what was checked is what was read
            return replace(pems, not_after_s=not_after_s(pems.cert, pems.ca))
    raise Rejected(_field(files.section, "cert_file"), "its files are being changed all the time")


def _read(files: TlsFiles) -> Pems:
    return Pems(
        read_file(files.cert, _field(files.section, "cert_file")) if files.cert else b"",
        read_secret(files.key, _field(files.section, "key_file")) if files.key else b"",
        read_file(files.ca, _field(files.ca_section, "ca_file")) if files.ca else b"",
    )


def fill_context(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Connections made from now on use what the files say now. Raises Rejected."""
    if files.cert is not None:
        try:  # a key that wants a passphrase must not ask a terminal for it
            context.load_cert_chain(files.cert, files.key, password="")
        except (ssl.SSLError, OSError) as error:
            said = f"{files.cert} and {files.key} are no certificate with its key: {_reason(error)}"
            raise Rejected(_field(files.section, "cert_file"), said) from error
    if files.ca is not None:
        try:
            context.load_verify_locations(files.ca)
        except (ssl.SSLError, OSError) as error:
            raise Rejected(
                _field(files.ca_section, "ca_file"), f"{files.ca} has no certificates: {_reason(error)}"
            ) from error


def _field(section: str, key: str) -> str:
    """As the config has it, or the command line."""
    return f"{section}{key.replace('_', '-') if section.startswith('--') else key}"


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
