"""What makes a stage one of prefill or of decode, by the name of the role: nothing under `shared` imports a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from stagemesh.shared.config import Config
from stagemesh.shared.stage.head import Head, HeadContext
from stagemesh.shared.stage.parts import StageLimits


@dataclass(frozen=True, slots=True)
class RoleParts:
    """`limits` are of an instance of so many stages."""

    make_head: Callable[[HeadContext], Head]
    limits: Callable[[int], StageLimits]


_ENTRIES: Final[Mapping[str, str]] = {
    "prefill": "stagemesh.services.prefill.service:role_parts",
    "decode": "stagemesh.services.decode.service:role_parts",
}


def role_parts(role: str, config: Config) -> RoleParts:
    """Imports what the role needs."""
    module, _, name = _ENTRIES[role].partition(":")
    made: RoleParts = getattr(import_module(module), name)(config)
    return made
