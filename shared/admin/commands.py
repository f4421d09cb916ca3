"""The table of commands, and the way of JSON into them.

JSON --read_request--> a request whose single values are right --carried out--> an answer --> JSON
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Struct

from stagemesh.shared.admin import requests
from stagemesh.shared.errors import Rejected

MAX_REQUEST_BYTES: Final = 64 << 10
_COMPLAINT: Final = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_OF_KEY: Final = re.compile(r"Object (?P<what>.*) field `(?P<key>.*)`")


@dataclass(frozen=True, slots=True)
class Command:
    """`help` is a line for people."""

    name: str
    help: str
    request: type[Struct]
    reply: type[Struct]

    @property
    def metadata(self) -> Mapping[str, str]:
        """For discovery: help, and JSON schemas of what goes in and comes out."""
        return {"help": self.help, "request": schema(self.request), "reply": schema(self.reply)}


COMMANDS: Final[Mapping[str, Command]] = {
    command.name: command
    for command in (
        Command("mesh.status", "How the mesh is, in numbers.", requests.Nothing, requests.MeshStatus),
        Command("instance.list", "Each instance: state, load, stages.", requests.Nothing, requests.InstanceList),
        Command(
            "instance.drain",
            "Give an instance no new requests; it finishes what runs there, and stays.",
            requests.DrainRequest,
            requests.StateReply,
        ),
        Command(
            "instance.resume", "Let a drained instance serve again.", requests.OfInstance, requests.StateReply
        ),
        Command(
            "instance.set",
            "Change a setting of an instance until it is started again: schedule_conservativeness, extra_depth and "
            "max_running of decode, log_level of all its stages.",
            requests.SetRequest,
            requests.SetReply,
        ),
        Command(
            "role.switch",
            "Make a prefill instance a decode one, or back: it is drained, its weights stay.",
            requests.SwitchRequest,
            requests.SwitchReply,
        ),
        Command(
            "request.list", "The requests that are not over, oldest first.", requests.ListRequest, requests.RequestList
        ),
        Command("request.abort", "End a request, whoever sent it.", requests.AbortRequest, requests.AbortReply),
        Command(
            "cache.flush", "Evict the cached prompt pages that nobody uses.", requests.FlushRequest, requests.FlushReply
        ),
        Command(
            "config.get",
            "The config that the broker runs with, without secrets.",
            requests.ConfigRequest,
            requests.ConfigReply,
        ),
        Command("events", "Where events are said, and the last of them.", requests.ListRequest, requests.EventsReply),
    )
}  # fmt: skip


def schema(kind: type[Struct]) -> str:
    """As JSON."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    body = components.pop(kind.__name__)
    return json.dumps({**body, "$defs": components} if components else body, separators=(",", ":"))


def read_request(command: Command, payload: bytes) -> Struct:
    """Raises Rejected, which names the field and the limit."""
    if len(payload) > MAX_REQUEST_BYTES:
        raise Rejected("request", f"must have at most {MAX_REQUEST_BYTES} bytes, has {len(payload)}")
    try:
        return msgspec.json.decode(payload.strip() or b"{}", type=command.request)
    except msgspec.ValidationError as error:
        raise _rejected(command.request, str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected("request", f"must be a JSON object: {error}") from None


def _rejected(kind: type[Struct], complaint: str) -> Rejected:
    match = _COMPLAINT.fullmatch(complaint)
    assert match is not None, complaint
    what, path = match["what"], match["path"] or ""
    if (found := _OF_KEY.fullmatch(what)) is not None:
        known = ", ".join(kind.__struct_fields__) or "none"
        missing = "missing" in found["what"]
        return Rejected(found["key"], "is missing" if missing else f"is no field of this command; there are {known}")
    if what.startswith("Invalid enum value"):
        what += f": must be one of {', '.join(_choices(kind, path))}"
    return Rejected(path or "request", what[:1].lower() + what[1:].replace("`", ""))


def _choices(kind: type[Struct], field: str) -> tuple[Any, ...]:
    declared = {f.name: f.type for f in msgspec.structs.fields(kind)}[field]
    return tuple(declared.__args__)
