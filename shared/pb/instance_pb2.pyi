from stagemesh.shared.pb import mesh_pb2 as _mesh_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_END_NONE: _ClassVar[SequenceEnd]
    SEQUENCE_END_STOP: _ClassVar[SequenceEnd]
    SEQUENCE_END_LENGTH: _ClassVar[SequenceEnd]
    SEQUENCE_END_FAILED: _ClassVar[SequenceEnd]
    SEQUENCE_END_REJECTED: _ClassVar[SequenceEnd]
    SEQUENCE_END_RECOMPUTE: _ClassVar[SequenceEnd]
    SEQUENCE_END_LOST: _ClassVar[SequenceEnd]
SEQUENCE_END_NONE: SequenceEnd
SEQUENCE_END_STOP: SequenceEnd
SEQUENCE_END_LENGTH: SequenceEnd
SEQUENCE_END_FAILED: SequenceEnd
SEQUENCE_END_REJECTED: SequenceEnd
SEQUENCE_END_RECOMPUTE: SequenceEnd
SEQUENCE_END_LOST: SequenceEnd

class VerifyPagesRequest(_message.Message):
    __slots__ = ("ticket_id", "epoch", "checks")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    epoch: int
    checks: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.KvCheck]
    def __init__(self, ticket_id: _Optional[str] = ..., epoch: _Optional[int] = ..., checks: _Optional[_Iterable[_Union[_mesh_pb2.KvCheck, _Mapping]]] = ...) -> None: ...

class VerifyPagesReply(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class ReadOutRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ReadOutReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("held",)
    class HeldEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.ScalarMap[str, int]
    def __init__(self, held: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdjustRequest(_message.Message):
    __slots__ = ("setting", "value")
    SETTING_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    setting: str
    value: float
    def __init__(self, setting: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class AdjustReply(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: float
    def __init__(self, previous: _Optional[float] = ...) -> None: ...

class PrepareStructureRequest(_message.Message):
    __slots__ = ("structure",)
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    structure: Structure
    def __init__(self, structure: _Optional[_Union[Structure, _Mapping]] = ...) -> None: ...

class PrepareStructureReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("role", "drain_timeout_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    drain_timeout_s: float
    def __init__(self, role: _Optional[str] = ..., drain_timeout_s: _Optional[float] = ...) -> None: ...

class SwitchRoleReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class SetLogLevelReply(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: str
    def __init__(self, previous: _Optional[str] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheReply(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos", "eos_token_ids", "stop_token_ids", "min_tokens", "min_p", "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids", "bias_values", "prompt_logprobs", "prompt_ids", "generated", "structure")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    min_p: float
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: bytes
    bias_values: bytes
    prompt_logprobs: int
    prompt_ids: bytes
    generated: bytes
    structure: Structure
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., min_p: _Optional[float] = ..., logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_ids: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ..., prompt_logprobs: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., generated: _Optional[bytes] = ..., structure: _Optional[_Union[Structure, _Mapping]] = ...) -> None: ...

class Structure(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RequestRef(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class SessionUp(_message.Message):
    __slots__ = ("open", "submit", "first_token", "abort", "pulse")
    class Open(_message.Message):
        __slots__ = ("router", "epoch")
        ROUTER_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        router: str
        epoch: int
        def __init__(self, router: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
    class Submit(_message.Message):
        __slots__ = ("request", "sampling", "prompt_tokens", "token_ids", "ticket_id", "peer_instance", "priority", "waited_s", "recompute", "peer_epoch")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        SAMPLING_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        TICKET_ID_FIELD_NUMBER: _ClassVar[int]
        PEER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        WAITED_S_FIELD_NUMBER: _ClassVar[int]
        RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
        PEER_EPOCH_FIELD_NUMBER: _ClassVar[int]
        request: RequestRef
        sampling: Sampling
        prompt_tokens: int
        token_ids: bytes
        ticket_id: str
        peer_instance: str
        priority: int
        waited_s: float
        recompute: bool
        peer_epoch: int
        def __init__(self, request: _Optional[_Union[RequestRef, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., ticket_id: _Optional[str] = ..., peer_instance: _Optional[str] = ..., priority: _Optional[int] = ..., waited_s: _Optional[float] = ..., recompute: _Optional[bool] = ..., peer_epoch: _Optional[int] = ...) -> None: ...
    class FirstToken(_message.Message):
        __slots__ = ("request", "token_id")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        request: RequestRef
        token_id: int
        def __init__(self, request: _Optional[_Union[RequestRef, _Mapping]] = ..., token_id: _Optional[int] = ...) -> None: ...
    class AbortSequence(_message.Message):
        __slots__ = ("request",)
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        request: RequestRef
        def __init__(self, request: _Optional[_Union[RequestRef, _Mapping]] = ...) -> None: ...
    class Pulse(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    open: SessionUp.Open
    submit: SessionUp.Submit
    first_token: SessionUp.FirstToken
    abort: SessionUp.AbortSequence
    pulse: SessionUp.Pulse
    def __init__(self, open: _Optional[_Union[SessionUp.Open, _Mapping]] = ..., submit: _Optional[_Union[SessionUp.Submit, _Mapping]] = ..., first_token: _Optional[_Union[SessionUp.FirstToken, _Mapping]] = ..., abort: _Optional[_Union[SessionUp.AbortSequence, _Mapping]] = ..., pulse: _Optional[_Union[SessionUp.Pulse, _Mapping]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("request", "token_ids", "end", "error", "logprobs", "cached_tokens", "prompt_logprobs")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request: RequestRef
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    end: SequenceEnd
    error: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    cached_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request: _Optional[_Union[RequestRef, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., end: _Optional[_Union[SequenceEnd, str]] = ..., error: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs", "prompt", "failure")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: bytes
    top_logprobs: bytes
    prompt: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    failure: str
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., prompt: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class SessionDown(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ...) -> None: ...

class ReservePagesRequest(_message.Message):
    __slots__ = ("ticket_id", "request", "prompt_tokens", "max_tokens", "epoch")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request: RequestRef
    prompt_tokens: int
    max_tokens: int
    epoch: int
    def __init__(self, ticket_id: _Optional[str] = ..., request: _Optional[_Union[RequestRef, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReservePagesReply(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: bytes
    def __init__(self, pages: _Optional[bytes] = ...) -> None: ...

class CommitTicketRequest(_message.Message):
    __slots__ = ("ticket_id", "epoch")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    epoch: int
    def __init__(self, ticket_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CommitTicketReply(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class CloseTicketRequest(_message.Message):
    __slots__ = ("ticket_id", "reason", "quiesced", "epoch", "lost")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    reason: str
    quiesced: bool
    epoch: int
    lost: bool
    def __init__(self, ticket_id: _Optional[str] = ..., reason: _Optional[str] = ..., quiesced: _Optional[bool] = ..., epoch: _Optional[int] = ..., lost: _Optional[bool] = ...) -> None: ...

class CloseTicketReply(_message.Message):
    __slots__ = ("quiescent",)
    QUIESCENT_FIELD_NUMBER: _ClassVar[int]
    quiescent: bool
    def __init__(self, quiescent: _Optional[bool] = ...) -> None: ...
