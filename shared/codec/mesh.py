"""Identities, manifests and instances on the wire."""

from __future__ import annotations

from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad, Manifest, RegionKey, Role, StageInfo
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.pb import broker_pb2, instance_pb2, mesh_pb2

_ROLES = {Role.PREFILL: mesh_pb2.ROLE_PREFILL, Role.DECODE: mesh_pb2.ROLE_DECODE}
_ROLES_BACK = {wire: role for role, wire in _ROLES.items()}
_MANIFEST = tuple(Manifest.__dataclass_fields__)


def ref_to_pb(ref: InstanceRef) -> broker_pb2.InstanceRef:
    return broker_pb2.InstanceRef(name=ref.name, epoch=ref.epoch)


def ref_from_pb(message: broker_pb2.InstanceRef) -> InstanceRef:
    return InstanceRef(message.name, message.epoch)


def request_to_pb(ref: RequestRef) -> instance_pb2.RequestRef:
    return instance_pb2.RequestRef(request_id=ref.request_id, attempt=ref.attempt)


def request_from_pb(message: instance_pb2.RequestRef) -> RequestRef:
    return RequestRef(message.request_id, message.attempt)


def region_to_pb(region: RegionKey) -> mesh_pb2.RegionKey:
    return mesh_pb2.RegionKey(endpoint=region.endpoint, address=region.address, length=region.length)


def region_from_pb(message: mesh_pb2.RegionKey) -> RegionKey:
    return RegionKey(message.endpoint, message.address, message.length)


def stage_to_pb(stage: StageInfo) -> mesh_pb2.StageInfo:
    layers = mesh_pb2.LayerRange(lo=stage.layers.lo, hi=stage.layers.hi)
    return mesh_pb2.StageInfo(
        pp_rank=stage.pp_rank, layers=layers, address=stage.address, pool=region_to_pb(stage.pool)
    )


def stage_from_pb(message: mesh_pb2.StageInfo) -> StageInfo:
    layers = LayerRange(message.layers.lo, message.layers.hi)
    return StageInfo(message.pp_rank, layers, message.address, region_from_pb(message.pool))


def manifest_to_pb(manifest: Manifest) -> mesh_pb2.Manifest:
    return mesh_pb2.Manifest(**{name: getattr(manifest, name) for name in _MANIFEST})


def manifest_from_pb(message: mesh_pb2.Manifest) -> Manifest:
    return Manifest(**{name: getattr(message, name) for name in _MANIFEST})


def instance_to_pb(info: InstanceInfo) -> mesh_pb2.InstanceInfo:
    load = info.load
    return mesh_pb2.InstanceInfo(
        name=info.ref.name,
        role=_ROLES[info.role],
        epoch=info.ref.epoch,
        address=info.address,
        manifest=manifest_to_pb(info.manifest),
        stages=[stage_to_pb(stage) for stage in info.stages],
        load=load_to_pb(load),
        accepting=info.accepting,
    )


def instance_from_pb(message: mesh_pb2.InstanceInfo) -> InstanceInfo:
    """Raises ProtocolViolation for a role that this version does not know."""
    role = _ROLES_BACK.get(message.role)
    if role is None:
        raise ProtocolViolation(f"instance {message.name}: unknown role {message.role}")
    return InstanceInfo(
        ref=InstanceRef(message.name, message.epoch),
        role=role,
        address=message.address,
        manifest=manifest_from_pb(message.manifest),
        stages=tuple(stage_from_pb(stage) for stage in message.stages),
        load=load_from_pb(message.load),
        accepting=message.accepting,
    )


def load_to_pb(load: InstanceLoad) -> mesh_pb2.InstanceLoad:
    return mesh_pb2.InstanceLoad(
        waiting=load.waiting,
        running=load.running,
        pages_free=load.pages_free,
        waiting_tokens=load.waiting_tokens,
        retractions=load.retractions,
    )


def load_from_pb(message: mesh_pb2.InstanceLoad) -> InstanceLoad:
    return InstanceLoad(
        message.waiting, message.running, message.pages_free, message.waiting_tokens, message.retractions
    )


def progress_to_pb(progress: StageProgress) -> mesh_pb2.StageProgress:
    return mesh_pb2.StageProgress(
        pp_rank=progress.pp_rank,
        steps_done=progress.steps_done,
        has_work=progress.has_work,
        step_s=progress.step_s,
    )


def progress_from_pb(message: mesh_pb2.StageProgress) -> StageProgress:
    return StageProgress(message.pp_rank, message.steps_done, message.has_work, message.step_s)
