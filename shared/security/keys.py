"""API keys: who a caller of the Generate API is. The file has salted hashes only.

    NAME SALT HASH [weight=W]        a line a key; `#` begins a comment

A key is NAME.SECRET, so that one hash tells whether it is right. Two lines of one name are two keys of one client,
which is how a key is changed without a gap. A secret has 256 random bits: there is nothing to guess, so a fast hash
is as good as a slow one, and a flood of wrong keys costs little.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stagemesh.shared.errors import Rejected, Unauthenticated
from stagemesh.shared.obs.log import Log
from stagemesh.shared.security.reloaded import Reloaded, read_secret

FIELD: Final = "auth.keys_file"
SALT_BYTES: Final = 16
SECRET_BYTES: Final = 32
MAX_KEYS: Final = 10_000
MAX_WEIGHT: Final = 1000.0
MAX_KEY_CHARS: Final = 256  # of what a caller sends
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_HEX: Final = re.compile(r"[0-9a-f]+")
_BEARER: Final = "bearer "


@dataclass(frozen=True, slots=True)
class Hashed:
    """What the file has of a key."""

    salt: bytes
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Client:
    """Who may call. `weight` is its share of the turns where clients wait for each other."""

    name: str
    keys: tuple[Hashed, ...]
    weight: float = 1.0


def make_key(name: str) -> tuple[str, str]:
    """A new key, and the line for the file. Raises Rejected for a name that is none."""
    check_name(name, "name")
    secret, salt = secrets.token_urlsafe(SECRET_BYTES), secrets.token_bytes(SALT_BYTES)
    return f"{name}.{secret}", f"{name} {salt.hex()} {hash_secret(salt, secret).hex()}"


def check_name(name: str, field: str) -> None:
    if not _NAME.fullmatch(name):
        raise Rejected(field, f"must be 1..40 characters of a-z 0-9 _ -, the first a letter or a digit; got {name!r}")


def hash_secret(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode(errors="replace")).digest()


def parse_keys(text: str) -> dict[str, Client]:
    """The clients of a keys file, by name. Raises Rejected, naming the line and never what it says."""
    clients: dict[str, Client] = {}
    for name, hashed, weight in _lines(text):
        before = clients.get(name)
        if before is None:
            clients[name] = Client(name, (hashed,), 1.0 if weight is None else weight)
        else:
            clients[name] = Client(name, (*before.keys, hashed), before.weight if weight is None else weight)
    return clients


def _lines(text: str) -> Iterator[tuple[str, Hashed, float | None]]:
    count = 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        count += 1
        if count > MAX_KEYS:
            raise Rejected(FIELD, f"has more than {MAX_KEYS} keys")
        if len(words) not in (3, 4) or not all(_is_hex(word) for word in words[1:3]):
            raise Rejected(FIELD, f"line {number} is not `NAME SALT HASH [weight=W]`, as `stagemesh keys add` makes it")
        check_name(words[0], FIELD)
        weight = _weight(words[3], number) if len(words) == 4 else None
        yield words[0], Hashed(bytes.fromhex(words[1]), bytes.fromhex(words[2])), weight


def _is_hex(word: str) -> bool:
    return len(word) % 2 == 0 and _HEX.fullmatch(word) is not None


def _weight(word: str, number: int) -> float:
    name, _, text = word.partition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if name != "weight" or not 0.0 < weight <= MAX_WEIGHT:  # also false for NaN
        raise Rejected(FIELD, f"line {number}: a weight is written weight=W, above 0 and at most {MAX_WEIGHT:g}")
    return weight


class KeyRing:
    """The keys that are right. `current` follows the file."""

    def __init__(self, path: Path, log: Log) -> None:
        self._clients = Reloaded([path], lambda: _read_clients(path), log)

    @property
    def clients(self) -> Mapping[str, Client]:
        """By name."""
        return self._clients.current()

    def authenticate(self, authorization: str | None) -> Client:
        """Whose key an `authorization` header has. Raises Unauthenticated, which never quotes it."""
        if authorization is None:
            raise Unauthenticated("no API key: send `authorization: Bearer KEY` with each call")
        if authorization[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated("the authorization must read `Bearer KEY`")
        key = authorization[len(_BEARER) :].strip()
        name, _, secret = key[:MAX_KEY_CHARS].partition(".")
        client = self.clients.get(name)
        if not _matches(_NOBODY if client is None else client, secret) or client is None:
            raise Unauthenticated("the API key is not known here")
        return client


def _read_clients(path: Path) -> Mapping[str, Client]:
    try:
        return parse_keys(read_secret(path, FIELD).decode())
    except UnicodeDecodeError:
        raise Rejected(FIELD, f"{path} is no text") from None


_NOBODY: Final = Client("", (Hashed(bytes(SALT_BYTES), bytes(32)),))
"""An unknown name costs the time of a known one."""


def _matches(client: Client, secret: str) -> bool:
    found = False
    for each in client.keys:  # all of them, whichever it is
        found |= hmac.compare_digest(hash_secret(each.salt, secret), each.digest)
    return found
