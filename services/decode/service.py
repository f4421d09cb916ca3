"""A decode stage as a process."""

from __future__ import annotations

from stagemesh.services.decode.head import DecodeHead
from stagemesh.shared.config import Config
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.stage.head import Head, HeadContext
from stagemesh.shared.stage.parts import StageLimits
from stagemesh.shared.stage.process import run_stage
from stagemesh.shared.stage.roles import RoleParts

SPARE_STEPS = 2
"""Beyond those that the config asks for: so far extra_depth may be raised while it runs."""


def role_parts(config: Config) -> RoleParts:
    """What makes a stage one of this role."""
    engine = config.engine

    def make_head(context: HeadContext) -> Head:
        info = context.info
        scheduler = DecodeScheduler(
            num_pages=info.manifest.num_pages,
            page_size=engine.page_size,
            num_microbatches=len(info.stages) + engine.extra_depth,
            max_running=engine.max_running,
            run_ahead=engine.run_ahead,
            pp_size=len(info.stages),
            host_pages=engine.host_kv_bytes // info.widest_page_bytes,
            schedule_conservativeness=engine.schedule_conservativeness,
            priority_ageing_s=engine.priority_ageing_s,
            yield_s=engine.decode_yield_s,
            late_issue=engine.late_issue and config.model.device == "cuda",  # on a CPU launches are steps
            room=context.room,
        )
        return DecodeHead(context, scheduler)

    def limits(pp_size: int) -> StageLimits:
        spare = SPARE_STEPS if config.model.device == "cpu" else 0  # on a GPU each has graphs of its own
        steps = pp_size + engine.extra_depth + engine.run_ahead + spare
        return StageLimits(step_tokens=engine.max_running, num_slots=engine.ring_slots or steps)

    return RoleParts(make_head, limits)


def run(config: Config, instance: str | None, pp_rank: int | None) -> None:
    """Runs stage `pp_rank` of `instance` until it is told to stop."""
    run_stage(config, instance, pp_rank, role="decode")
