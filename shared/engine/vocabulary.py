"""The tokens of a model as xgrammar sees them, and structures compiled for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from stagemesh.shared.core.sampling import Structure, StructureKind
from stagemesh.shared.errors import Rejected

_PLACE: Final = re.compile(r"^\[[0-9:]+\] \S+?:\d+: (Check failed: \(.*?\) is (?:true|false): )?")
MOST_COMPLAINT: Final = 300  # characters of what is wrong with a structure


class Vocabulary:
    """`tokens[i]` is the text of token i as its tokenizer writes it, "" for those that are no text. `tokenizer_json` is
    the tokenizer as its library saves it. `end_ids` end an answer."""

    def __init__(self, tokens: Sequence[str], tokenizer_json: str, end_ids: Sequence[int]) -> None:
        self.tokens, self.tokenizer_json, self.end_ids = tokens, tokenizer_json, tuple(end_ids)

    @property
    def num_words(self) -> int:
        """Of 32 tokens each, a mask has so many."""
        return -(-len(self.tokens) // 32)

    def info_for(self, kind: StructureKind) -> Any:
        """xgrammar's own form."""
        return self._json_info if kind == "json_schema" else self._info

    @cached_property
    def _info(self) -> Any:
        return self._made(list(self.tokens))

    @cached_property
    def _json_info(self) -> Any:
        """Without the tokens that have control characters, which JSON has in no string, and we nowhere: the compiler
        lets them into strings of a limited length."""
        decoded = self._info.decoded_vocab
        plain = [token if min(decoded[at], default=32) >= 32 else "" for at, token in enumerate(self.tokens)]
        return self._made(plain)

    def _made(self, tokens: list[str]) -> Any:
        from xgrammar import TokenizerInfo

        kind = TokenizerInfo._detect_metadata_from_hf(self.tokenizer_json)
        return TokenizerInfo(
            tokens,
            kind["vocab_type"],
            vocab_size=len(self.tokens),
            stop_token_ids=list(self.end_ids),
            add_prefix_space=kind["add_prefix_space"],
        )


def compile_structure(vocabulary: Vocabulary, structure: Structure) -> Any:
    """A compiled grammar. Raises Rejected, naming the kind, for what is none. May take any time and memory."""
    from xgrammar import GrammarCompiler

    compiler = GrammarCompiler(vocabulary.info_for(structure.kind), max_threads=1, cache_enabled=False)
    try:
        match structure.kind:
            case "json_schema":
                return compiler.compile_json_schema(structure.text, any_whitespace=False)
            case "regex":
                return compiler.compile_regex(structure.text)
            case "ebnf":
                return compiler.compile_grammar(structure.text)
    except (RuntimeError, ValueError, TypeError) as error:
        raise Rejected(structure.kind, complaint(str(error))) from None


def complaint(said: str) -> str:
    """What the library has said, without where in its source it said so."""
    return " ".join(_PLACE.sub("", said.strip()).split())[:MOST_COMPLAINT] or "is none that can be used"
