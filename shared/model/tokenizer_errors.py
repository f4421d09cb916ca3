"""What the tokenizer library raises, as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import shortened


@contextmanager
def tokenizer_errors(field: str, what: str) -> Iterator[None]:
    """Raises Rejected of `field` for an error of the library in the block. It has no class for them, and a panic of its
    Rust code is no Exception."""
    try:
        yield
    except Rejected:
        raise
    except BaseException as error:
        if is_of_tokenizer(error):
            raise Rejected(field, f"{what} ({shortened(str(error))})") from error
        raise


def is_of_tokenizer(error: BaseException) -> bool:
    """Not one of the interpreter's own, such as KeyboardInterrupt."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
