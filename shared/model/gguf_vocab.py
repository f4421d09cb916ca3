"""The tokenizer's part of a GGUF file's metadata, every value of the type and size that it must have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import MAX_INTEGER, Settings, shown
from stagemesh.shared.model.gguf_file import GgufFile

PREFIX: Final = "tokenizer.ggml."
TEMPLATE: Final = "tokenizer.chat_template"
NORMAL: Final = 1  # a token's type
MAX_TOKEN_LENGTH: Final = 4096  # characters: every cut of each is looked at


@dataclass(frozen=True)
class GgufVocab:
    """Tokens by id, all different, and the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}


class GgufSettings:
    """Look-ups by the last part of a key. All raise Rejected naming file and key."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._plain = Settings(file.path, file.plain())

    def complaint(self, key: str, problem: str) -> Rejected:
        return self._plain.complaint(PREFIX + key, problem)

    def text(self, key: str, default: str | None = None) -> str:
        return self._plain.text(PREFIX + key, default)

    def flag(self, key: str, default: bool) -> bool:
        return self._plain.flag(PREFIX + key, default)

    def token_id(self, key: str) -> int | None:
        """None where the file has none, or says so with a number below zero."""
        value = self._file.get(PREFIX + key)
        if value is not None and (type(value) is not int or value > MAX_INTEGER):
            raise self.complaint(key, f"must be a token id, got {shown(value)}")
        return value if value is not None and value >= 0 else None

    def template(self) -> str | None:
        return None if self._file.get(TEMPLATE) is None else self._plain.text(TEMPLATE)

    def vocab(self) -> GgufVocab:
        tokens = self._texts("tokens")
        if not tokens:
            raise self.complaint("tokens", "must hold tokens")
        for number, token in enumerate(tokens):
            if len(token) > MAX_TOKEN_LENGTH:
                raise self.complaint("tokens", f"token {number} has {len(token)} characters, over {MAX_TOKEN_LENGTH}")
        types = self._numbers("token_type", len(tokens), int)
        return GgufVocab(tokens, [NORMAL] * len(tokens) if types is None else types)

    def merges(self) -> Sequence[str]:
        return self._texts("merges")

    def scores(self, count: int) -> Sequence[float]:
        scores = self._numbers("scores", count, float)
        if scores is None:
            raise self.complaint("scores", "must hold one score a token")
        return scores

    def _texts(self, key: str) -> Sequence[str]:
        value = self._file.get(PREFIX + key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.complaint(key, "must be a list of strings")
        return value

    def _numbers(self, key: str, count: int, kind: type[Any]) -> Sequence[Any] | None:
        value = self._file.get(PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.complaint(key, f"must be a list of numbers, each a {kind.__name__}")
        if len(value) != count or not all(map(math.isfinite, value)):
            raise self.complaint(key, f"must hold {count} finite numbers, one a token, has {len(value)}")
        return value
