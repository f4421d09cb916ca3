"""Files of API keys and of certificates, and the headers that callers show. No refusal quotes a secret."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Final

from stagemesh.shared.errors import Rejected, Unauthenticated
from stagemesh.shared.obs.log import Log
from stagemesh.shared.security.keys import KeyRing, make_key, parse_keys
from stagemesh.shared.security.material import TlsFiles, read_pems
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import junk_text, mutate_bytes
from tests.support.certificates import Authority, write_files


def open_keys(folder: Path) -> Try:
    made = [make_key(name) for name in ("alice", "bob", "alice")]
    lines = "\n".join(line for _, line in made)
    path = folder / "keys"
    path.touch(0o600)
    path.write_text(lines)
    ring, secrets = KeyRing(path, Log(logging.getLogger("stagemesh.fuzz"))), [key.partition(".")[2] for key, _ in made]

    def attempt(rng: Random) -> None:
        try:
            if rng.random() < 0.5:
                text = mutate_bytes(rng, f"{lines} weight=2 # {junk_text(rng)}\n".encode())
                parse_keys(text.decode(errors="replace"))
            else:
                header = mutate_bytes(rng, f"Bearer {rng.choice(made)[0]}".encode()).decode(errors="replace")
                ring.authenticate(rng.choice((header, header, junk_text(rng), None)))
        except (Rejected, Unauthenticated) as error:
            _check_quotes_none(str(error), secrets)
            raise

    return attempt


def _check_quotes_none(said: str, secrets: list[str]) -> None:
    assert not any(secret[:12] in said for secret in secrets), "a refusal quotes a secret"


def open_certificates(folder: Path) -> Try:
    authority = Authority("fuzz")
    files = write_files(folder, authority.issue("mesh"), authority.pem)
    right = {path: path.read_bytes() for path in (files.cert, files.key, files.ca) if path is not None}

    def attempt(rng: Random) -> None:
        for path, data in right.items():
            path.write_bytes(data)
        path = rng.choice(list(right))
        path.write_bytes(mutate_bytes(rng, right[path]) if rng.random() < 0.9 else rng.randbytes(rng.randrange(80)))
        read_pems(TlsFiles(files.cert, files.key, files.ca))

    return attempt


TARGETS: Final = (
    Target("api-keys", 6, open_keys, (Rejected, Unauthenticated)),
    Target("certificates", 3, open_certificates),
)
