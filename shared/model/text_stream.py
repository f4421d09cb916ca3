"""Token ids to text, piece by piece, as they come.

Ids whose text is not complete (half a character) are held back; what is shown is never taken back.
"""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from stagemesh.shared.model.tokenizer_errors import is_of_tokenizer, tokenizer_errors

REPLACEMENT: Final = "\ufffd"


class TextStream:
    """One answer's text. The pieces of `push` and `finish` joined are the text of all ids.

    shown: the ids of the last piece, which the decoder needs to see before the next; held: the ids after them.
    """

    def __init__(self, backend: Backend, *, skip_special_tokens: bool = True) -> None:
        self._backend, self._skip = backend, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._shown: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" in the middle of a character and for a token without text."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except BaseException as error:
            if not is_of_tokenizer(error):
                raise
            piece = self._restart()
        if piece is None:
            return ""
        self._shown, self._held = self._held, []
        return str(piece)

    def finish(self) -> str:
        """What is left; U+FFFD for bytes that are no character."""
        left = self._text(self._shown + self._held)
        before = self._text(self._shown)
        held = left.removeprefix(before) if left.startswith(before) else self._text(self._held)
        self._shown, self._held = self._shown + self._held, []
        return held

    def _restart(self) -> str:
        """The ids held change the text of those shown, which happens where byte tokens are no UTF-8. What is shown
        stays; the held ids are read on their own, and the stream goes on after them."""
        self._stream = DecodeStream(ids=self._held, skip_special_tokens=self._skip)
        return self._text(self._held)

    def _text(self, ids: list[int]) -> str:
        with tokenizer_errors("model", "its tokenizer cannot decode what it has made"):
            return str(self._backend.decode(ids, skip_special_tokens=self._skip))
