"""The tokenizer of a Hugging Face directory: tokenizer.json, with the special tokens and chat template beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.hf_config import read_json
from stagemesh.shared.model.tokenizer import Tokenizer
from stagemesh.shared.model.tokenizer_errors import tokenizer_errors

SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_dir(directory: Path, config: ModelConfig) -> Tokenizer:
    """Reads the tokenizer of a model. Raises Rejected if there is no usable tokenizer.json."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise Rejected("model", f"{file}: is missing, and no other form of tokenizer is supported")
    with tokenizer_errors("model", f"{file}: cannot be used"):
        backend = Backend.from_file(str(file))
    settings_file = directory / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    return Tokenizer(backend, _special_tokens(settings, backend, config), _chat_template(directory, settings))


def _special_tokens(settings: Mapping[str, Any], backend: Backend, config: ModelConfig) -> dict[str, str]:
    found = {name: _token_text(settings.get(name)) for name in SPECIAL_NAMES}
    if found["bos_token"] is None and config.bos_token_id is not None:
        found["bos_token"] = backend.id_to_token(config.bos_token_id)
    if found["eos_token"] is None and config.eos_token_ids:
        found["eos_token"] = backend.id_to_token(config.eos_token_ids[0])
    return {name: token for name, token in found.items() if token is not None}


def _token_text(entry: Any) -> str | None:
    """A special token is written as its text or as an object with a `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the settings, where it may be one text or a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Rejected("model", f"{file}: cannot be read ({error})") from error
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = [item for item in entry if isinstance(item, dict) and item.get("name") == "default"]
        entry = named[-1].get("template") if named else None
    return entry if isinstance(entry, str) else None
