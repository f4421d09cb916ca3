"""What the commands take and give, as JSON. Ranges of single values are here; what depends on the mesh is checked where
it is carried out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from stagemesh.shared.config.sections import Name, Role

Setting = Literal["schedule_conservativeness", "extra_depth", "max_running", "log_level"]
LogLevel = Literal["debug", "info", "warning", "error"]


class Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object, or no text at all."""


class OfInstance(Struct, frozen=True, forbid_unknown_fields=True):
    instance: Name


class DrainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer waits so long for what runs to be finished; it is not cut off."""

    instance: Name
    wait_s: Annotated[float, Meta(ge=0, le=10)] = 1.0


class SetRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`value` is a number, of log_level one of debug, info, warning, error."""

    instance: Name
    setting: Setting
    value: float | str


class SwitchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The instance is drained first, for `drain_timeout_s` at most; by default as long as at a stop."""

    instance: Name
    role: Role
    drain_timeout_s: Annotated[float, Meta(gt=0, le=3600)] | None = None


class ListRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The oldest `limit` ones."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class AbortRequest(Struct, frozen=True, forbid_unknown_fields=True):
    request_id: Annotated[str, Meta(min_length=1, max_length=256)]


class FlushRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Without an instance, of every prefill instance."""

    instance: Name | None = None


class ConfigRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`section` of the config, such as engine; without one, all of it."""

    section: str | None = None


# -- answers --


class BusStatus(Struct, frozen=True):
    connected: bool
    events_dropped: int
    slow: int
    reconnects: int


class MeshStatus(Struct, frozen=True):
    """`tickets` by state, `tickets_closed` by outcome; the rest of the numbers are sums over the instances."""

    mesh: str
    broker: str
    up_s: float
    routers: list[str]
    instances: dict[str, int]
    states: dict[str, int]
    waiting: int
    running: int
    pages_free: int
    pages: int
    tickets: dict[str, int]
    tickets_closed: dict[str, int]
    nats: BusStatus


class StageStatus(Struct, frozen=True):
    """`layers` are [first, last)."""

    pp_rank: int
    layers: tuple[int, int]
    address: str
    steps_done: int
    has_work: bool


class InstanceStatus(Struct, frozen=True):
    """`state` is serving, draining or drained."""

    name: str
    role: str
    state: str
    epoch: int
    address: str
    waiting: int
    running: int
    waiting_tokens: int
    pages_free: int
    pages: int
    joined_s: float
    last_report_s: float
    stages: list[StageStatus]


class InstanceList(Struct, frozen=True):
    instances: list[InstanceStatus]


class StateReply(Struct, frozen=True):
    """`held` is what is in flight still."""

    instance: str
    state: str
    held: dict[str, int] = {}


class SetReply(Struct, frozen=True):
    instance: str
    setting: str
    previous: float | str
    value: float | str


class SwitchReply(Struct, frozen=True):
    instance: str
    role: str
    epoch: int


class RequestStatus(Struct, frozen=True):
    request_id: str
    router: str
    age_s: float
    state: str
    waits_for: str
    on: list[str]
    details: dict[str, Any]


class RequestList(Struct, frozen=True):
    """`total` counts those over the limit too. `silent` are routers that have not answered."""

    total: int
    requests: list[RequestStatus]
    silent: list[str]


class AbortReply(Struct, frozen=True):
    request_id: str
    was_live: bool


class FlushReply(Struct, frozen=True):
    """Pages that were cached and are free now, by instance."""

    pages: dict[str, int]


class ConfigReply(Struct, frozen=True):
    config: dict[str, Any]


class EventsReply(Struct, frozen=True):
    """`subject` is where they are said; `events` are the last ones."""

    subject: str
    dropped: int
    events: list[dict[str, Any]]
