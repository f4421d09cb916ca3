"""What `stagemesh up` says on stderr: who does what, who said what, and where to send requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TextIO

DIM, BOLD, RED, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"

TAIL_SHOWN: Final = 20


class Reporter:
    """Plain lines; on a terminal those of the services are dim and errors red."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._styled = stream.isatty()

    def info(self, text: str) -> None:
        self._write(f"stagemesh: {text}", "")

    def announce(self, text: str) -> None:
        self._write(text, BOLD)

    def error(self, text: str) -> None:
        self._write(f"stagemesh: error: {text}", RED)

    def output(self, name: str, lines: Iterable[str]) -> None:
        """Lines that the process `name` wrote."""
        for line in lines:
            self._write(f"[{name}] {line}", DIM)

    def tail(self, name: str, lines: Sequence[str]) -> None:
        """The last of what a process wrote that has failed."""
        self.error(f"the last lines of {name}:" if lines else f"{name} wrote nothing")
        self.output(name, lines[-TAIL_SHOWN:])

    def _write(self, line: str, style: str) -> None:
        try:
            print(f"{style}{line}{PLAIN}" if self._styled and style else line, file=self._stream, flush=True)
        except OSError:
            # nobody reads any more (a closed terminal or pipe): the mesh must still be drained in order
            self._styled = False
