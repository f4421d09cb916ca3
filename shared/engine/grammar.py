"""Structured output: grammars that are compiled, and how far each sequence is in its own.

take (a compiled grammar, made elsewhere) --begin, for a sequence--> Matcher: accept a token -> the mask of the next one

A mask is computed on a thread of its own as soon as its token is known, under the forward pass of other microbatches,
and is waited for only when the next token is drawn. xgrammar is imported when the first grammar comes: that is slow.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stagemesh.shared.core.sampling import Structure
from stagemesh.shared.engine.vocabulary import Vocabulary, compile_structure
from stagemesh.shared.errors import Rejected

Words = npt.NDArray[np.int32]
MAX_GRAMMARS: Final = 256
MAX_GRAMMAR_BYTES: Final = 256 << 20
FREE_NS, TOKEN_NS = 250_000_000, 2_000_000
"""What the masks of a sequence may take of a core: so much, and so much more a token. Common ones take 0.05 ms a token;
a grammar that is ambiguous without end takes longer with each, and everybody's steps wait for it."""


class GrammarState(Protocol):
    """xgrammar's matcher."""

    def accept_token(self, token_id: int) -> bool: ...

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool: ...

    def rollback(self, num_tokens: int = 1) -> None: ...

    def is_terminated(self) -> bool: ...


class Matcher:
    """Where one sequence is in its grammar. What happens is put in order by the thread, which alone touches `state`."""

    def __init__(self, grammars: Grammars, begin: Callable[[], GrammarState]) -> None:
        self._grammars, self._begin = grammars, begin
        self._state: GrammarState | None = None
        self.failure = ""  # why there are no masks any more
        self._spent_ns = 0
        self._accepted = 0  # tokens that the grammar has taken: the first ones of the output
        self._offered = 0
        self._mask: Future[Words] = grammars.run(self._start)

    def accept(self, token_id: int) -> None:
        """The output goes on with `token_id`."""
        self._mask = self._grammars.run(self._accept, token_id)

    def go_back(self, num_tokens: int) -> None:
        """Only the first `num_tokens` of the output are left."""
        self._mask = self._grammars.run(self._go_back, num_tokens)

    def mask(self, banned: Sequence[int] = ()) -> Tensor:
        """int32 [ceil(vocab / 32)], a bit for each token that may come next: all that the grammar allows but `banned`,
        or those too where it allows no others. Waits for it."""
        start_ns = time.monotonic_ns()
        words = self._mask.result()
        self._grammars.wait_ns += time.monotonic_ns() - start_ns
        if banned:
            left = words.copy()
            for token_id in banned:
                left[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).astype(np.int32))
            words = left if left.any() else words
        return torch.from_numpy(words)

    # -- on the thread --

    @property
    def _may_go_on(self) -> bool:
        """The output so far is on its way, and not complete with an end."""
        is_whole = self._accepted == self._offered and not self.failure
        return is_whole and self._state is not None and not self._state.is_terminated()

    def _start(self) -> Words:
        try:
            self._state = self._begin()
        except Rejected as error:  # it was forgotten, and does not compile again
            self.failure = str(error).partition(": ")[2]
        return self._words(time.thread_time_ns())

    def _accept(self, token_id: int) -> Words:
        start_ns, was_on_its_way = time.thread_time_ns(), self._may_go_on
        self._offered += 1
        if was_on_its_way and self._state is not None:
            self._accepted += self._state.accept_token(token_id)
        return self._words(start_ns)

    def _go_back(self, num_tokens: int) -> Words:
        if self._accepted > num_tokens and self._state is not None:
            self._state.rollback(self._accepted - num_tokens)
            self._accepted = num_tokens
        self._offered = num_tokens
        return self._words(time.thread_time_ns())

    def _words(self, start_ns: int) -> Words:
        """Past its end, or off its way, an output may only end: what follows an end is discarded anyway."""
        words = np.zeros(self._grammars.vocabulary.num_words, dtype=np.int32)
        if self._may_go_on and self._state is not None:
            self._state.fill_next_token_bitmask(torch.from_numpy(words).view(1, -1))
        if not words.any():
            for token_id in self._grammars.vocabulary.end_ids:
                words[token_id // 32] |= np.uint32(1 << token_id % 32).astype(np.int32)
        took_ns = time.thread_time_ns() - start_ns
        self._grammars.masks, self._grammars.mask_ns = self._grammars.masks + 1, self._grammars.mask_ns + took_ns
        self._spent_ns += took_ns
        if not self.failure and self._spent_ns > FREE_NS + self._offered * TOKEN_NS:
            self.failure = f"its masks take too long: {self._spent_ns // 1_000_000} ms for {self._offered} tokens"
        return words


class Grammars:
    """The compiled grammars of one last stage, those used least recently forgotten first."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_bytes: int = MAX_GRAMMAR_BYTES,
        begin: Callable[[Any], GrammarState] | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._max_grammars, self._max_bytes, self._begin = max_grammars, max_bytes, begin
        self._compiled: OrderedDict[Structure, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self.masks = self.mask_ns = self.wait_ns = self.late_compiles = 0

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, structure: object) -> bool:
        return structure in self._compiled

    def touch(self, structure: Structure) -> bool:
        """True if it is here; it will be kept longer than others then."""
        if structure not in self._compiled:
            return False
        self._compiled.move_to_end(structure)
        return True

    def take(self, structure: Structure, compiled: Any, num_bytes: int) -> None:
        """It has been compiled, and is held in `num_bytes`."""
        if (before := self._compiled.pop(structure, None)) is not None:
            self._bytes -= before[1]
        self._compiled[structure] = compiled, num_bytes
        self._bytes += num_bytes
        while len(self._compiled) > self._max_grammars or (self._bytes > self._max_bytes and len(self._compiled) > 1):
            _, (_, freed) = self._compiled.popitem(last=False)
            self._bytes -= freed

    def matcher(self, structure: Structure) -> Matcher:
        """For a new sequence. A grammar that has been forgotten since it was prepared is compiled once more, which it
        has been shown to allow."""
        known = self._compiled.get(structure)
        return Matcher(self, lambda: self._start(structure, None if known is None else known[0]))

    def run(self, work: Callable[..., Words], *args: Any) -> Future[Words]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        return self._thread.submit(work, *args)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start(self, structure: Structure, compiled: Any) -> GrammarState:
        if compiled is None:
            self.late_compiles += 1
            compiled = compile_structure(self.vocabulary, structure)
        if self._begin is not None:
            return self._begin(compiled)
        from xgrammar import GrammarMatcher

        state: GrammarState = GrammarMatcher(compiled)
        return state
