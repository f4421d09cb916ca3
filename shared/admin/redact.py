"""The config without secrets, for people to look at. Secrets are in files that it names; an URL may have one."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from stagemesh.shared.config import Config


def redacted(config: Config) -> dict[str, Any]:
    """As JSON, by section."""
    document: dict[str, Any] = msgspec.to_builtins(config)
    document["nats"]["url"] = ",".join(map(without_user, config.nats.url.split(",")))
    return document


def without_user(url: str) -> str:
    """`***` in place of user and password, or of a token."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}"))
