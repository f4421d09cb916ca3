from stagemesh.shared.pb import mesh_pb2 as _mesh_pb2
from stagemesh.shared.pb import instance_pb2 as _instance_pb2
from stagemesh.shared.pb import broker_pb2 as _broker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("instance", "epoch", "from_rank", "pp_size", "manifest", "stages")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    from_rank: int
    pp_size: int
    manifest: _mesh_pb2.Manifest
    stages: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.StageInfo]
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., from_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., manifest: _Optional[_Union[_mesh_pb2.Manifest, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[_mesh_pb2.StageInfo, _Mapping]]] = ...) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("ring", "num_slots", "slot_bytes")
    RING_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ring: _mesh_pb2.RegionKey
    num_slots: int
    slot_bytes: int
    def __init__(self, ring: _Optional[_Union[_mesh_pb2.RegionKey, _Mapping]] = ..., num_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class RingMessage(_message.Message):
    __slots__ = ("command", "data_ready", "applied", "result", "settled", "leaving", "copied", "pulse", "read_out", "answer", "verify")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    DATA_READY_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    READ_OUT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    command: Command
    data_ready: DataReady
    applied: Applied
    result: StepResult
    settled: Settled
    leaving: Leaving
    copied: Copied
    pulse: _mesh_pb2.StageProgress
    read_out: ReadOut
    answer: Answer
    verify: Verify
    def __init__(self, command: _Optional[_Union[Command, _Mapping]] = ..., data_ready: _Optional[_Union[DataReady, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., copied: _Optional[_Union[Copied, _Mapping]] = ..., pulse: _Optional[_Union[_mesh_pb2.StageProgress, _Mapping]] = ..., read_out: _Optional[_Union[ReadOut, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ...) -> None: ...

class Copied(_message.Message):
    __slots__ = ("handle", "pp_rank", "restored")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    pp_rank: int
    restored: bool
    def __init__(self, handle: _Optional[int] = ..., pp_rank: _Optional[int] = ..., restored: _Optional[bool] = ...) -> None: ...

class ReadOut(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("number", "checks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    checks: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.KvCheck]
    def __init__(self, number: _Optional[int] = ..., checks: _Optional[_Iterable[_Union[_mesh_pb2.KvCheck, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("number", "pp_rank", "error", "num_wrong")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_WRONG_FIELD_NUMBER: _ClassVar[int]
    number: int
    pp_rank: int
    error: str
    num_wrong: int
    def __init__(self, number: _Optional[int] = ..., pp_rank: _Optional[int] = ..., error: _Optional[str] = ..., num_wrong: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("next_role",)
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    next_role: str
    def __init__(self, next_role: _Optional[str] = ...) -> None: ...

class RingClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Command(_message.Message):
    __slots__ = ("number", "drops", "page_deltas", "cancels", "joins", "step", "retracts", "resumes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    PAGE_DELTAS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RETRACTS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    number: int
    drops: bytes
    page_deltas: bytes
    cancels: bytes
    joins: _containers.RepeatedCompositeFieldContainer[Join]
    step: Step
    retracts: bytes
    resumes: bytes
    def __init__(self, number: _Optional[int] = ..., drops: _Optional[bytes] = ..., page_deltas: _Optional[bytes] = ..., cancels: _Optional[bytes] = ..., joins: _Optional[_Iterable[_Union[Join, _Mapping]]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., retracts: _Optional[bytes] = ..., resumes: _Optional[bytes] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("handle", "request", "sampling", "send", "prompt_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request: _instance_pb2.RequestRef
    sampling: _instance_pb2.Sampling
    send: SendPlan
    prompt_tokens: int
    def __init__(self, handle: _Optional[int] = ..., request: _Optional[_Union[_instance_pb2.RequestRef, _Mapping]] = ..., sampling: _Optional[_Union[_instance_pb2.Sampling, _Mapping]] = ..., send: _Optional[_Union[SendPlan, _Mapping]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class SendPlan(_message.Message):
    __slots__ = ("ticket_id", "prompt_tokens", "pages", "targets")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    prompt_tokens: int
    pages: bytes
    targets: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.StageInfo]
    def __init__(self, ticket_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., pages: _Optional[bytes] = ..., targets: _Optional[_Iterable[_Union[_mesh_pb2.StageInfo, _Mapping]]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("number", "microbatch", "rows", "tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    microbatch: int
    rows: bytes
    tokens: bytes
    def __init__(self, number: _Optional[int] = ..., microbatch: _Optional[int] = ..., rows: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class DataReady(_message.Message):
    __slots__ = ("step", "num_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_tokens: int
    def __init__(self, step: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "token_ids", "logprobs")
    class LogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _instance_pb2.TokenLogprobs
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_instance_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    token_ids: bytes
    logprobs: _containers.MessageMap[int, _instance_pb2.TokenLogprobs]
    def __init__(self, step: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Mapping[int, _instance_pb2.TokenLogprobs]] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("report", "broker")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    report: _broker_pb2.WriterReport
    broker: str
    def __init__(self, report: _Optional[_Union[_broker_pb2.WriterReport, _Mapping]] = ..., broker: _Optional[str] = ...) -> None: ...
