"""Which prefill instance and which decode instance a request gets. Pure: a function of the directory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from stagemesh.shared.core.directory import InstanceInfo, Role, mismatch
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import Retryable


class Drained(Retryable):
    """Nobody takes the request now. Somebody of the role that lacks is there: an operator may take it back, or it is
    about to end."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`decode` is None where no KV has to move: one token is asked for."""

    prefill: InstanceInfo
    decode: InstanceInfo | None


@dataclass(frozen=True, slots=True)
class Sent:
    """What went to an instance since its last report; `tokens` of prompts, those that it has to compute."""

    requests: int = 0
    tokens: int = 0


NOTHING_SENT: Final[Mapping[str, Sent]] = MappingProxyType({})
NONE_CACHED: Final[Mapping[str, int]] = MappingProxyType({})


def place(
    instances: Sequence[InstanceInfo],
    *,
    prompt_tokens: int,
    max_tokens: int,
    sent: Mapping[str, Sent] = NOTHING_SENT,
    cached: Mapping[str, int] = NONE_CACHED,
    avoid: Collection[InstanceRef] = (),
) -> Placement:
    """The best pair that accepts requests, fits together and can ever hold this one: of prefill instances the one that
    has computed the prompt first, of decode instances the least loaded. `sent` and `cached`, tokens of this prompt that
    need not be computed, are by name of the instance. Those to `avoid` are taken where there is no other of their role.
    Raises Retryable if there is none; Drained if there is one that takes nothing new."""
    accepting = [info for info in instances if info.accepting]
    prefills = _best([i for i in accepting if i.role is Role.PREFILL and _holds(i, prompt_tokens)], avoid)
    if not prefills:
        raise _nobody(instances, Role.PREFILL)
    if max_tokens == 1:
        return Placement(min(prefills, key=lambda info: _prefill_cost(info, sent, cached)), None)
    budget_tokens = prompt_tokens + max_tokens - 1
    decodes = _best([i for i in accepting if i.role is Role.DECODE and _holds(i, budget_tokens)], avoid)
    if not decodes:
        raise _nobody(instances, Role.DECODE)
    pairs = [(p, d) for p in prefills for d in decodes if mismatch(p.manifest, d.manifest) is None]
    if not pairs:
        difference = mismatch(prefills[0].manifest, decodes[0].manifest)
        raise Retryable(f"no prefill and decode instance fit together: {difference}")
    prefill, decode = min(pairs, key=lambda pair: (_prefill_cost(pair[0], sent, cached), _decode_load(pair[1], sent)))
    return Placement(prefill, decode)


def _nobody(instances: Sequence[InstanceInfo], role: Role) -> Retryable:
    if any(info.role is role and not info.accepting for info in instances):
        return Drained(f"no {role.value} instance takes new requests")
    return Retryable(f"no {role.value} instance is there to take the request")


def max_request_tokens(instances: Iterable[InstanceInfo]) -> int | None:
    """Prompt and new tokens of the largest request that some decode instance can ever hold; None if none is there."""
    return max((i.manifest.max_request_tokens for i in instances if i.role is Role.DECODE), default=None)


def max_prompt_tokens(instances: Iterable[InstanceInfo]) -> int | None:
    """Tokens of the largest prompt that some prefill instance can ever hold; None if none is there."""
    pools = (i.manifest.num_pages * i.manifest.page_size for i in instances if i.role is Role.PREFILL)
    return max(pools, default=None)


def _best(infos: list[InstanceInfo], avoid: Collection[InstanceRef]) -> list[InstanceInfo]:
    return [info for info in infos if info.ref not in avoid] or infos


def _holds(info: InstanceInfo, num_tokens: int) -> bool:
    return num_tokens <= info.manifest.num_pages * info.manifest.page_size


def _prefill_cost(info: InstanceInfo, sent: Mapping[str, Sent], cached: Mapping[str, int]) -> tuple[int, int, str]:
    """Tokens to compute before the prompt is through, but for those of the prompt that cost the same everywhere."""
    name = info.ref.name
    since = sent.get(name, Sent())
    tokens = info.load.waiting_tokens + since.tokens - cached.get(name, 0)
    return tokens, info.load.waiting + info.load.running + since.requests, name


def _decode_load(info: InstanceInfo, sent: Mapping[str, Sent]) -> tuple[int, int, str]:
    queued = info.load.waiting + info.load.running + sent.get(info.ref.name, Sent()).requests
    return queued, -info.load.pages_free, info.ref.name
