"""A tokenizer as the files that others expect of a model, in a zip: whoever tokenizes for a model of this mesh need not
have it. A GGUF file's tokenizer gets them too."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Final

from stagemesh.shared.model.tokenizer import Tokenizer

_CLASS: Final = "PreTrainedTokenizerFast"


def tokenizer_bundle(tokenizer: Tokenizer) -> bytes:
    """tokenizer.json, and tokenizer_config.json with the special tokens, chat_template.jinja. Equal bytes for equal
    tokenizers."""
    settings: dict[str, object] = {"tokenizer_class": _CLASS, **tokenizer.special_tokens}
    files = {"tokenizer.json": tokenizer.to_json(), "tokenizer_config.json": json.dumps(settings)}
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in files.items():
            bundle.writestr(zipfile.ZipInfo(name), text.encode(), zipfile.ZIP_DEFLATED)  # whose date is always the same
    return data.getvalue()
