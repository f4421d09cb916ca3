"""The tokenizer that the metadata of a GGUF file describes, rebuilt with the Rust library.

gpt2    byte-level BPE: tokens and merges are given, how text is cut before merging has a name ("pre")
llama   SentencePiece BPE: tokens and scores are given, merges follow from them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.gguf_file import GgufFile
from stagemesh.shared.model.gguf_vocab import NORMAL, GgufSettings, GgufVocab
from stagemesh.shared.model.tokenizer import Tokenizer
from stagemesh.shared.model.tokenizer_errors import tokenizer_errors

CONTROL, USER_DEFINED = 3, 4  # token types, beside NORMAL
SPACE: Final = "\u2581"
SPECIAL_IDS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS: Final = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
CUTS: Final[Mapping[str, Sequence[Any]]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": (
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    "qwen2": (
        pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}
SAME_CUT: Final = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Raises Rejected if the file has no tokenizer, or one of a kind that is not supported, or that is damaged."""
    if file.get("tokenizer.ggml.model") is None:
        raise Rejected("model", f"{file.path}: has no tokenizer")
    settings = GgufSettings(file)
    kind = settings.text("model")
    if kind not in ("gpt2", "llama"):
        raise settings.complaint("model", f"{kind!r} is not supported, only gpt2 and llama")
    vocab = settings.vocab()
    special = {name: vocab.tokens[token_id] for name, token_id in _special_ids(settings, len(vocab.tokens)).items()}
    with tokenizer_errors("model", f"{file.path}: its tokenizer cannot be built"):
        backend = _byte_level(settings, vocab) if kind == "gpt2" else _sentencepiece(settings, vocab)
        _add_tokens(backend, vocab)
        adds_bos = kind == "llama" or _cut_name(settings) == "llama-bpe"  # what holds for files too old to say
        if settings.flag("add_bos_token", adds_bos) and (bos := special.get("bos_token")):
            backend.post_processor = _with_bos(backend, bos)
    return Tokenizer(backend, special, settings.template())


def _special_ids(settings: GgufSettings, num_tokens: int) -> dict[str, int]:
    """Those that are among the tokens: some files have others."""
    ids = {name: settings.token_id(key) for name, key in SPECIAL_IDS.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None and token_id < num_tokens}


def _cut_name(settings: GgufSettings) -> str:
    name = settings.text("pre", "None")
    return SAME_CUT.get(name, name)


def _byte_level(settings: GgufSettings, vocab: GgufVocab) -> Backend:
    name = _cut_name(settings)
    if name not in CUTS:
        raise settings.complaint("pre", f"{name!r} is not supported, only {', '.join(CUTS)}")
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in settings.merges())]
    # Llama 3 takes a word that is a token as it is, even if no merges lead there.
    backend = Backend(models.BPE(vocab=vocab.ids, merges=merges, ignore_merges=name == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(CUTS[name]))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(settings: GgufSettings, vocab: GgufVocab) -> Backend:
    unknown = _special_ids(settings, len(vocab.tokens)).get("unk_token")
    backend = Backend(
        models.BPE(
            vocab=vocab.ids,
            merges=merges_from_scores(vocab.tokens, settings.scores(len(vocab.tokens)), vocab.types),
            unk_token=None if unknown is None else vocab.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = settings.flag("add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint token scores best: every cut of a token into two tokens is a
    merge, ranked by the token's score, then by the parts' ids."""
    ids = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == NORMAL}
    ranked = [
        (-scores[token_id], ids[token[:cut]], ids[token[cut:]])
        for token, token_id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(ranked)]


def _add_tokens(backend: Backend, vocab: GgufVocab) -> None:
    """Control and user-defined tokens are found whole in a text; the former are no text when decoded."""
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [token for token, its_kind in zip(vocab.tokens, vocab.types, strict=True) if its_kind == kind]
        added = [AddedToken(token, normalized=False, special=special) for token in chosen]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _with_bos(backend: Backend, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )
