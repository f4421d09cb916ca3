"""Everything that takes input from outside. A target's inputs are mutations of right ones, and noise."""

from __future__ import annotations

from typing import Final

from tests.fuzz.judge import Target
from tests.fuzz.targets import (
    access,
    configs,
    generate,
    gguf,
    heads,
    messages,
    model_dirs,
    replies,
    structured,
    templates,
    wire,
)

TARGETS: Final[tuple[Target, ...]] = (
    *generate.TARGETS,
    *structured.TARGETS,
    *messages.TARGETS,
    *heads.TARGETS,
    *wire.TARGETS,
    *access.TARGETS,
    *configs.TARGETS,
    *model_dirs.TARGETS,
    *gguf.TARGETS,
    *templates.TARGETS,
    *replies.TARGETS,
)
