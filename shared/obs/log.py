"""Structured logs: a line of JSON a record on stderr, or a line for people on a terminal.

configure(...) once a process -> Log -> bind(epoch=...) -> bind(request_id=..., attempt=...)

Who speaks (service, instance, pp_rank) is said by every line of the process, those of libraries too; what it is about
is bound to the Log that is passed down.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import msgspec

from stagemesh.shared.errors import Rejected

Form = Literal["json", "text"]
FORM_VARIABLE: Final = "STAGEMESH_LOG"
_ROOT: Final = "stagemesh"


class Log:
    """A logger with fields. Cheap to bind; immutable."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: Mapping[str, Any] | None = None) -> None:
        self._logger = logger
        self._fields = dict(fields or {})

    def bind(self, **fields: Any) -> Log:
        """A Log that says these fields too."""
        return Log(self._logger, {**self._fields, **fields})

    def debug(self, message: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        self._emit(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._emit(logging.WARNING, message, fields)

    def error(self, message: str, *, error: BaseException | None = None, **fields: Any) -> None:
        """`error` adds its traceback."""
        self._emit(logging.ERROR, message, fields, error)

    def _emit(self, level: int, message: str, fields: Mapping[str, Any], error: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            # no %-arguments, so a message with a percent sign stays as it is
            self._logger.log(level, "%s", message, extra={"fields": {**self._fields, **fields}}, exc_info=error)


class _Formatter(logging.Formatter):
    def __init__(self, identity: Mapping[str, Any]) -> None:
        super().__init__()
        self._identity = identity

    def _extra(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            fields["exc"] = self.formatException(record.exc_info)
        return fields

    def _time(self, record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(_Formatter):
    """ts, level, service, instance, pp_rank, msg, and the record's own fields; those that are None left out."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"ts": self._time(record), "level": record.levelname.lower(), **self._identity}
        said |= {"msg": record.getMessage(), **self._extra(record)}
        return msgspec.json.encode({k: v for k, v in said.items() if v is not None}, enc_hook=str).decode()


class TextFormatter(_Formatter):
    """12:00:00.000 INFO decode-0/1 message key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self._extra(record)
        trace = fields.pop("exc", None)
        who = self._identity.get("instance") or self._identity["service"]
        if self._identity.get("pp_rank") is not None:
            who = f"{who}/{self._identity['pp_rank']}"
        pairs = "".join(f" {key}={value}" for key, value in fields.items() if value is not None)
        line = f"{self._time(record)[11:-1]} {record.levelname} {who} {record.getMessage()}{pairs}"
        return f"{line}\n{trace}" if trace else line


LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def set_level(name: str) -> str:
    """From now on this process logs from there up. Returns the level before. Raises Rejected for any other word."""
    if name not in LEVELS:
        raise Rejected("log_level", f"must be one of {', '.join(LEVELS)}, got {name!r}")
    logger = logging.getLogger(_ROOT)
    previous = logging.getLevelName(logger.getEffectiveLevel()).lower()
    logger.setLevel(LEVELS[name])
    return previous


def choose_form(environ: Mapping[str, str], stream: TextIO) -> Form:
    """What STAGEMESH_LOG says, else text on a terminal and JSON elsewhere. Raises Rejected for any other word."""
    wanted = environ.get(FORM_VARIABLE)
    if wanted in ("json", "text"):
        return "text" if wanted == "text" else "json"
    if wanted:
        raise Rejected(FORM_VARIABLE, f"must be json or text, got {wanted!r}")
    return "text" if stream.isatty() else "json"


def configure(
    service: str,
    instance: str | None = None,
    pp_rank: int | None = None,
    *,
    form: Form = "json",
    level: int = logging.INFO,
    stream: TextIO | None = None,
) -> Log:
    """Sets the process's one log handler, in place of any before; returns the Log to pass down."""
    identity = {"service": service, "instance": instance, "pp_rank": pp_rank}
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(identity) if form == "json" else TextFormatter(identity))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries; our own level is below
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level)
    return Log(logger)
