"""Text to token ids and back, and chat messages to prompts. Built by `hf_tokenizer` and `gguf_tokenizer`.

Imports no torch: the router uses it. All methods may be called from several threads at once; a `TextStream` belongs
to one answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as Backend

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.chat_renderer import ChatRenderer
from stagemesh.shared.model.text_stream import REPLACEMENT, TextStream
from stagemesh.shared.model.tokenizer_errors import tokenizer_errors


class Tokenizer:
    """A tokenizer of the Rust library with the model's special tokens and chat template.

    `special_tokens` maps names like "bos_token" to the token's text.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        with tokenizer_errors("model", "the tokenizer cannot be used"):
            backend.no_truncation()
            backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of(special_tokens.get("bos_token"))
        self.eos_token_id = self._id_of(special_tokens.get("eos_token"))
        self.special_tokens, self.chat_template = dict(special_tokens), chat_template
        self._template = None if chat_template is None else ChatRenderer(chat_template, special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def start(self) -> None:
        """What the first chat would wait for. Raises Rejected if the chat template cannot be compiled."""
        if self._template is not None:
            self._template.start()

    def plain_tokens(self, count: int) -> list[str]:
        """The first `count` tokens as the tokenizer writes them; "" for special ones, and where there are none."""
        special = {token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special}
        tokens = [""] * count
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id < count and token_id not in special:
                tokens[token_id] = token
        return tokens

    def to_json(self) -> str:
        """The tokenizer as its library saves it."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the tokens that the model wants around a text if `add_special_tokens`. Raises
        Rejected("text") for a text that the model's tokenizer cannot take."""
        with tokenizer_errors("text", "the model's tokenizer fails with it"):
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def apply_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation: messages have a `role` and a `content`. Raises Rejected("messages") if the
        model has no chat template or it refuses them."""
        if self._template is None:
            raise Rejected("messages", "this model has no chat template; send text or token ids")
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; U+FFFD for bytes that are no character. Equal to what a stream gives piece by piece."""
        with tokenizer_errors("model", "its tokenizer cannot decode these ids"):
            text = str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        if REPLACEMENT not in text:
            return text
        # One bad byte may cost a whole run of byte tokens here, of which a stream has shown the good ones.
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A new stream for one answer."""
        return TextStream(self._backend, skip_special_tokens=skip_special_tokens)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)
