from stagemesh.shared.pb import mesh_pb2 as _mesh_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TicketLeg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TICKET_LEG_UNSPECIFIED: _ClassVar[TicketLeg]
    TICKET_LEG_WAITING: _ClassVar[TicketLeg]
    TICKET_LEG_RESERVED: _ClassVar[TicketLeg]
    TICKET_LEG_FILLING: _ClassVar[TicketLeg]
    TICKET_LEG_COMMITTED: _ClassVar[TicketLeg]
    TICKET_LEG_ENDING: _ClassVar[TicketLeg]
TICKET_LEG_UNSPECIFIED: TicketLeg
TICKET_LEG_WAITING: TicketLeg
TICKET_LEG_RESERVED: TicketLeg
TICKET_LEG_FILLING: TicketLeg
TICKET_LEG_COMMITTED: TicketLeg
TICKET_LEG_ENDING: TicketLeg

class InstanceReport(_message.Message):
    __slots__ = ("info", "progress", "has_work", "leaving", "tickets")
    INFO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HAS_WORK_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    info: _mesh_pb2.InstanceInfo
    progress: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.StageProgress]
    has_work: bool
    leaving: bool
    tickets: _containers.RepeatedCompositeFieldContainer[TicketReport]
    def __init__(self, info: _Optional[_Union[_mesh_pb2.InstanceInfo, _Mapping]] = ..., progress: _Optional[_Iterable[_Union[_mesh_pb2.StageProgress, _Mapping]]] = ..., has_work: _Optional[bool] = ..., leaving: _Optional[bool] = ..., tickets: _Optional[_Iterable[_Union[TicketReport, _Mapping]]] = ...) -> None: ...

class TicketReport(_message.Message):
    __slots__ = ("ticket_id", "request_id", "attempt", "peer", "prompt_tokens", "max_tokens", "leg", "pages", "doubtful_writers")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DOUBTFUL_WRITERS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request_id: str
    attempt: int
    peer: InstanceRef
    prompt_tokens: int
    max_tokens: int
    leg: TicketLeg
    pages: bytes
    doubtful_writers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., peer: _Optional[_Union[InstanceRef, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., leg: _Optional[_Union[TicketLeg, str]] = ..., pages: _Optional[bytes] = ..., doubtful_writers: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: str
    def __init__(self, router: _Optional[str] = ...) -> None: ...

class RouterQuestion(_message.Message):
    __slots__ = ("id", "list", "abort")
    class ListLive(_message.Message):
        __slots__ = ("limit",)
        LIMIT_FIELD_NUMBER: _ClassVar[int]
        limit: int
        def __init__(self, limit: _Optional[int] = ...) -> None: ...
    class AbortLive(_message.Message):
        __slots__ = ("request_id",)
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        def __init__(self, request_id: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    id: int
    list: RouterQuestion.ListLive
    abort: RouterQuestion.AbortLive
    def __init__(self, id: _Optional[int] = ..., list: _Optional[_Union[RouterQuestion.ListLive, _Mapping]] = ..., abort: _Optional[_Union[RouterQuestion.AbortLive, _Mapping]] = ...) -> None: ...

class RouterAnswer(_message.Message):
    __slots__ = ("router", "id", "entries", "total", "was_live")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WAS_LIVE_FIELD_NUMBER: _ClassVar[int]
    router: str
    id: int
    entries: bytes
    total: int
    was_live: bool
    def __init__(self, router: _Optional[str] = ..., id: _Optional[int] = ..., entries: _Optional[bytes] = ..., total: _Optional[int] = ..., was_live: _Optional[bool] = ...) -> None: ...

class DirectoryUpdate(_message.Message):
    __slots__ = ("snapshot", "changed", "removed", "gathering", "broker")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    GATHERING_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    changed: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.InstanceInfo]
    removed: _containers.RepeatedCompositeFieldContainer[InstanceRef]
    gathering: bool
    broker: str
    def __init__(self, snapshot: _Optional[bool] = ..., changed: _Optional[_Iterable[_Union[_mesh_pb2.InstanceInfo, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[InstanceRef, _Mapping]]] = ..., gathering: _Optional[bool] = ..., broker: _Optional[str] = ...) -> None: ...

class InstanceRef(_message.Message):
    __slots__ = ("name", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenTicketRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prefill", "decode", "prompt_tokens", "max_tokens", "router")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prefill: InstanceRef
    decode: InstanceRef
    prompt_tokens: int
    max_tokens: int
    router: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prefill: _Optional[_Union[InstanceRef, _Mapping]] = ..., decode: _Optional[_Union[InstanceRef, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., router: _Optional[str] = ...) -> None: ...

class OpenTicketReply(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    def __init__(self, ticket_id: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    def __init__(self, ticket_id: _Optional[str] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("pages", "targets")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    pages: bytes
    targets: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.StageInfo]
    def __init__(self, pages: _Optional[bytes] = ..., targets: _Optional[_Iterable[_Union[_mesh_pb2.StageInfo, _Mapping]]] = ...) -> None: ...

class FillRequest(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    def __init__(self, ticket_id: _Optional[str] = ...) -> None: ...

class FillReply(_message.Message):
    __slots__ = ("taken_back",)
    TAKEN_BACK_FIELD_NUMBER: _ClassVar[int]
    taken_back: bool
    def __init__(self, taken_back: _Optional[bool] = ...) -> None: ...

class UnreserveRequest(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    def __init__(self, ticket_id: _Optional[str] = ...) -> None: ...

class UnreserveReply(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class PieceRange(_message.Message):
    __slots__ = ("target_rank", "first_page", "last_page", "crcs")
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_PAGE_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    target_rank: int
    first_page: int
    last_page: int
    crcs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, target_rank: _Optional[int] = ..., first_page: _Optional[int] = ..., last_page: _Optional[int] = ..., crcs: _Optional[_Iterable[int]] = ...) -> None: ...

class WriterReport(_message.Message):
    __slots__ = ("ticket_id", "instance", "pp_rank", "pieces", "kv_bytes", "error", "in_doubt")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    instance: InstanceRef
    pp_rank: int
    pieces: _containers.RepeatedCompositeFieldContainer[PieceRange]
    kv_bytes: int
    error: str
    in_doubt: bool
    def __init__(self, ticket_id: _Optional[str] = ..., instance: _Optional[_Union[InstanceRef, _Mapping]] = ..., pp_rank: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[PieceRange, _Mapping]]] = ..., kv_bytes: _Optional[int] = ..., error: _Optional[str] = ..., in_doubt: _Optional[bool] = ...) -> None: ...

class WriterReportReply(_message.Message):
    __slots__ = ("broker",)
    BROKER_FIELD_NUMBER: _ClassVar[int]
    broker: str
    def __init__(self, broker: _Optional[str] = ...) -> None: ...

class FailTicketRequest(_message.Message):
    __slots__ = ("ticket_id", "reason", "quiescent")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUIESCENT_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    reason: str
    quiescent: bool
    def __init__(self, ticket_id: _Optional[str] = ..., reason: _Optional[str] = ..., quiescent: _Optional[bool] = ...) -> None: ...

class FailTicketReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReapedReport(_message.Message):
    __slots__ = ("instance", "pp_rank")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    instance: InstanceRef
    pp_rank: int
    def __init__(self, instance: _Optional[_Union[InstanceRef, _Mapping]] = ..., pp_rank: _Optional[int] = ...) -> None: ...

class ReapedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
