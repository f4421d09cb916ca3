"""How the stages of an instance find each other when they start.

head: a new epoch --connect--> rank 1 --connect--> ... --connect--> head: the ring is closed

Each connect carries the manifest and the stages so far, and is answered with the place for activations. A stage that
is not up yet is tried again until the starter gives up.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stagemesh.shared.codec.mesh import (
    manifest_from_pb,
    manifest_to_pb,
    region_from_pb,
    region_to_pb,
    stage_from_pb,
    stage_to_pb,
)
from stagemesh.shared.core.directory import Manifest, RegionKey, StageInfo, mismatch
from stagemesh.shared.errors import ProtocolViolation, Rejected
from stagemesh.shared.link.ring import RingSpec
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.runtime.backoff import retry

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """What the previous stage has said: the epoch, and the stages of ranks 0 to its own."""

    epoch: int
    stages: tuple[StageInfo, ...]


class Connector:
    """One stage's part in closing the ring."""

    def __init__(self, instance: str, pp_rank: int, pp_size: int, manifest: Manifest, slots: RingSpec | None) -> None:
        self._instance, self._pp_rank, self._pp_size = instance, pp_rank, pp_size
        self._manifest, self._slots = manifest, slots
        self.upstream: asyncio.Future[Upstream] = asyncio.get_running_loop().create_future()

    def accept(self, request: stage_pb2.ConnectRequest) -> stage_pb2.ConnectReply:
        """The previous stage connects. Raises Rejected, naming the field that does not fit."""
        self._check(request)
        stages = tuple(stage_from_pb(stage) for stage in request.stages)
        upstream = Upstream(request.epoch, stages)
        if not self.upstream.done():
            self.upstream.set_result(upstream)
        elif self.upstream.result() != upstream:
            raise ProtocolViolation("this stage belongs to an earlier start of its instance")
        if self._slots is None:
            return stage_pb2.ConnectReply()
        key = RegionKey(self._slots.key.endpoint, self._slots.key.address, self._slots.key.length)
        return stage_pb2.ConnectReply(
            ring=region_to_pb(key), num_slots=self._slots.num_slots, slot_bytes=self._slots.slot_bytes
        )

    async def connect(self, next_stage: Client, upstream: Upstream, own: StageInfo) -> RingSpec | None:
        """Says who we are to the next stage. Returns where it wants activations; None if it is the head."""
        message = stage_pb2.ConnectRequest(
            instance=self._instance,
            epoch=upstream.epoch,
            from_rank=self._pp_rank,
            pp_size=self._pp_size,
            manifest=manifest_to_pb(self._manifest),
            stages=[stage_to_pb(stage) for stage in (*upstream.stages, own)],
        )
        reply = await retry(lambda: next_stage.call("Connect", message, timeout_s=CONNECT_TIMEOUT_S))
        if not reply.num_slots:
            return None
        return RingSpec(region_from_pb(reply.ring), reply.num_slots, reply.slot_bytes)

    def _check(self, request: stage_pb2.ConnectRequest) -> None:
        wanted = (self._pp_rank - 1) % self._pp_size
        for field, got, expected in (
            ("instance", request.instance, self._instance),
            ("pp_size", request.pp_size, self._pp_size),
            ("from_rank", request.from_rank, wanted),
        ):
            if got != expected:
                raise Rejected(field, f"{got!r}, but this stage expects {expected!r}")
        if (difference := mismatch(self._manifest, manifest_from_pb(request.manifest))) is not None:
            raise Rejected("manifest", difference)
