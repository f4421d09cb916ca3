"""Who may say and hear what on NATS: a user for each role, as one literal table.

    stagemesh.events.<mesh>.<name>      what happens, said by the broker
    stagemesh.<mesh>.admin.>            commands of operators, served by the broker: nobody else hears them
    $SRV.PING | INFO | STATS            discovery of who serves, by NATS's micro protocol
    $KV.stagemesh_epochs.<instance>     the number of each start
    _INBOX.<role>.>                     answers: no role hears another's, but for an operator, whom the stock CLI gives
                                        an inbox of its own choice

A server takes a publication that a user may not make as an error of that user, logs it, and passes it on to nobody.
Whoever serves requests may answer each once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

EPOCH_BUCKET: Final = "stagemesh_epochs"
EVENTS: Final = "stagemesh.events.>"
ADMIN: Final = "stagemesh.*.admin.>"
_STREAM: Final = f"KV_{EPOCH_BUCKET}"
_EPOCHS: Final = (
    f"$KV.{EPOCH_BUCKET}.>",
    f"$JS.API.STREAM.INFO.{_STREAM}",
    f"$JS.API.STREAM.CREATE.{_STREAM}",
    f"$JS.API.STREAM.MSG.GET.{_STREAM}",
    f"$JS.API.DIRECT.GET.{_STREAM}.>",
)
_DISCOVERY: Final = tuple(f"$SRV.{verb}{rest}" for verb in ("PING", "INFO", "STATS") for rest in ("", ".>"))


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects, with NATS's wildcards. `answers`: one message to whoever has asked."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def inbox_of(role: str) -> str:
    """The prefix of the subjects at which a role gets its answers."""
    return f"_INBOX.{role}"


def _own(role: str) -> str:
    return f"{inbox_of(role)}.>"


ROLES: Final[Mapping[str, Permissions]] = {
    "stage": Permissions(_EPOCHS, (_own("stage"),)),
    "broker": Permissions((EVENTS,), (_own("broker"), EVENTS, ADMIN, *_DISCOVERY), answers=True),
    "router": Permissions((_own("router"),), (_own("router"),)),  # it has no business there yet
    "admin": Permissions((ADMIN, *_DISCOVERY, *_EPOCHS), ("_INBOX.>", EVENTS, ADMIN)),
    "observer": Permissions(_DISCOVERY, (f"{inbox_of('observer')}.>", EVENTS)),
}


def variable_of(role: str) -> str:
    """The name under which the server's config knows a role's password."""
    return f"{role}_password"


def render_roles(passwords: Mapping[str, str] | None = None) -> str:
    """The `authorization` block of a server's config, with those passwords, else with what `passwords.conf` beside it
    says: the file that includes it cannot, for the server looks for a variable in the file that uses it alone."""

    def password(role: str) -> str:
        return f"${variable_of(role)}" if passwords is None else json.dumps(passwords[role])

    include = 'include "passwords.conf"\n' if passwords is None else ""
    users = "\n".join(_user(role, permissions, password(role)) for role, permissions in ROLES.items())
    return f"{include}authorization {{\n  users = [\n{users}\n  ]\n}}\n"


def render_passwords(passwords: Mapping[str, str]) -> str:
    """What `roles.conf` takes the passwords from."""
    return "".join(f"{variable_of(role)}: {json.dumps(word)}\n" for role, word in passwords.items())


def _user(role: str, permissions: Permissions, password: str) -> str:
    answers = "        allow_responses: true\n" if permissions.answers else ""
    return (
        f"    {{\n      user: {role}, password: {password}\n      permissions: {{\n"
        f"        publish: [{_subjects(permissions.publish)}]\n"
        f"        subscribe: [{_subjects(permissions.subscribe)}]\n"
        f"{answers}      }}\n    }}"
    )


def _subjects(subjects: tuple[str, ...]) -> str:
    return ", ".join(json.dumps(subject) for subject in subjects)
