from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Call(_message.Message):
    __slots__ = ("number", "method", "request", "timeout_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    method: str
    request: bytes
    timeout_s: float
    def __init__(self, number: _Optional[int] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class CallReply(_message.Message):
    __slots__ = ("number", "reply", "code", "details", "retry_after_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    reply: bytes
    code: int
    details: str
    retry_after_s: float
    def __init__(self, number: _Optional[int] = ..., reply: _Optional[bytes] = ..., code: _Optional[int] = ..., details: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...
