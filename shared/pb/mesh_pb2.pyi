from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class RegionKey(_message.Message):
    __slots__ = ("endpoint", "address", "length")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    address: int
    length: int
    def __init__(self, endpoint: _Optional[str] = ..., address: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LayerRange(_message.Message):
    __slots__ = ("lo", "hi")
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    lo: int
    hi: int
    def __init__(self, lo: _Optional[int] = ..., hi: _Optional[int] = ...) -> None: ...

class StageInfo(_message.Message):
    __slots__ = ("pp_rank", "layers", "address", "pool")
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    pp_rank: int
    layers: LayerRange
    address: str
    pool: RegionKey
    def __init__(self, pp_rank: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., address: _Optional[str] = ..., pool: _Optional[_Union[RegionKey, _Mapping]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("protocol_version", "fingerprint", "dtype", "page_size", "num_kv_heads", "head_dim", "num_layers", "transfer_backend", "num_pages", "max_context")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    fingerprint: str
    dtype: str
    page_size: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    transfer_backend: str
    num_pages: int
    max_context: int
    def __init__(self, protocol_version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., num_layers: _Optional[int] = ..., transfer_backend: _Optional[str] = ..., num_pages: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("waiting", "running", "pages_free", "waiting_tokens", "retractions")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    pages_free: int
    waiting_tokens: int
    retractions: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., pages_free: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., retractions: _Optional[int] = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("name", "role", "epoch", "address", "manifest", "stages", "load", "accepting")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    epoch: int
    address: str
    manifest: Manifest
    stages: _containers.RepeatedCompositeFieldContainer[StageInfo]
    load: InstanceLoad
    accepting: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[StageInfo, _Mapping]]] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., accepting: _Optional[bool] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("pp_rank", "steps_done", "has_work", "step_s")
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    HAS_WORK_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    pp_rank: int
    steps_done: int
    has_work: bool
    step_s: float
    def __init__(self, pp_rank: _Optional[int] = ..., steps_done: _Optional[int] = ..., has_work: _Optional[bool] = ..., step_s: _Optional[float] = ...) -> None: ...

class KvCheck(_message.Message):
    __slots__ = ("target_rank", "layers", "first_page", "crcs", "pages")
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    target_rank: int
    layers: LayerRange
    first_page: int
    crcs: _containers.RepeatedScalarFieldContainer[int]
    pages: bytes
    def __init__(self, target_rank: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., first_page: _Optional[int] = ..., crcs: _Optional[_Iterable[int]] = ..., pages: _Optional[bytes] = ...) -> None: ...
