"""A prefill stage as a process."""

from __future__ import annotations

from stagemesh.services.prefill.head import PrefillHead
from stagemesh.shared.config import Config
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.stage.head import Head, HeadContext
from stagemesh.shared.stage.parts import StageLimits
from stagemesh.shared.stage.process import run_stage
from stagemesh.shared.stage.roles import RoleParts


def role_parts(config: Config) -> RoleParts:
    """What makes a stage one of this role."""
    engine = config.engine

    def make_head(context: HeadContext) -> Head:
        scheduler = PrefillScheduler(
            num_pages=context.info.manifest.num_pages,
            page_size=engine.page_size,
            pp_size=len(context.info.stages),
            chunk_size=engine.chunk_size,
            min_chunk_size=engine.min_chunk_size or max(1, engine.chunk_size // 4),
            max_sequences=engine.max_prefill_sequences,
            reserve_ahead=engine.reserve_ahead,
            run_ahead=engine.run_ahead,
            prefix_cache=engine.prefix_cache,
            priority_ageing_s=engine.priority_ageing_s,
        )
        return PrefillHead(context, scheduler)

    def limits(pp_size: int) -> StageLimits:
        steps = pp_size + engine.run_ahead
        return StageLimits(step_tokens=engine.chunk_size, num_slots=engine.ring_slots or steps)

    return RoleParts(make_head, limits)


def run(config: Config, instance: str | None, pp_rank: int | None) -> None:
    """Runs stage `pp_rank` of `instance` until it is told to stop."""
    run_stage(config, instance, pp_rank, role="prefill")
