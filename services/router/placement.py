"""Which prefill instance and which decode instance a request gets. Pure: a function of the directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stagemesh.shared.core.directory import InstanceInfo, Role, mismatch
from stagemesh.shared.errors import Retryable


@dataclass(frozen=True, slots=True)
class Placement:
    """`decode` is None where no KV has to move: one token is asked for."""

    prefill: InstanceInfo
    decode: InstanceInfo | None


def place(
    instances: Iterable[InstanceInfo], *, prompt_tokens: int, max_tokens: int, sent: dict[str, int] | None = None
) -> Placement:
    """The least loaded pair that accepts requests, fits together and can ever hold this one. `sent` counts requests
    that went to an instance since its last report. Raises Retryable if there is none."""
    sent = sent or {}
    accepting = [info for info in instances if info.accepting]
    prefills = [i for i in accepting if i.role is Role.PREFILL and _holds(i, prompt_tokens)]
    if not prefills:
        raise Retryable("no prefill instance is there to take the request")
    if max_tokens == 1:
        return Placement(min(prefills, key=lambda info: _prefill_load(info, sent)), None)
    decodes = [i for i in accepting if i.role is Role.DECODE and _holds(i, prompt_tokens + max_tokens - 1)]
    if not decodes:
        raise Retryable("no decode instance is there to take the request")
    pairs = [(p, d) for p in prefills for d in decodes if mismatch(p.manifest, d.manifest) is None]
    if not pairs:
        difference = mismatch(prefills[0].manifest, decodes[0].manifest)
        raise Retryable(f"no prefill and decode instance fit together: {difference}")
    prefill, decode = min(pairs, key=lambda pair: (_prefill_load(pair[0], sent), _decode_load(pair[1], sent)))
    return Placement(prefill, decode)


def max_request_tokens(instances: Iterable[InstanceInfo]) -> int | None:
    """Prompt and new tokens of the largest request that some decode instance can ever hold; None if none is there."""
    return max((i.manifest.max_request_tokens for i in instances if i.role is Role.DECODE), default=None)


def max_prompt_tokens(instances: Iterable[InstanceInfo]) -> int | None:
    """Tokens of the largest prompt that some prefill instance can ever hold; None if none is there."""
    pools = (i.manifest.num_pages * i.manifest.page_size for i in instances if i.role is Role.PREFILL)
    return max(pools, default=None)


def _holds(info: InstanceInfo, num_tokens: int) -> bool:
    return num_tokens <= info.manifest.num_pages * info.manifest.page_size


def _prefill_load(info: InstanceInfo, sent: dict[str, int]) -> tuple[int, int, str]:
    queued = info.load.waiting + info.load.running + sent.get(info.ref.name, 0)
    return queued, info.load.waiting_tokens, info.ref.name


def _decode_load(info: InstanceInfo, sent: dict[str, int]) -> tuple[int, int, str]:
    queued = info.load.waiting + info.load.running + sent.get(info.ref.name, 0)
    return queued, -info.load.pages_free, info.ref.name
