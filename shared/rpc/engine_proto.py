"""The proto by which gateways of the field drive a vLLM engine. Its code is a package of theirs (extra [openai]), which
a router does without."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


class EngineProto:
    """The messages of the service `vllm.grpc.engine.VllmEngine`: its own, and those that it shares with others."""

    def __init__(self, engine: Any, common: Any) -> None:
        self.engine, self.common = engine, common

    @property
    def service(self) -> Any:
        """Its descriptor."""
        return self.engine.DESCRIPTOR.services_by_name["VllmEngine"]


def engine_proto() -> EngineProto | None:
    """None where the package is not installed."""
    if find_spec("smg_grpc_proto") is None:
        return None
    from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

    return EngineProto(vllm_engine_pb2, common_pb2)
