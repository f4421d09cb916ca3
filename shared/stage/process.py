"""A stage as a process, whatever its role."""

from __future__ import annotations

import os
import sys

from stagemesh.shared.config import Config
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import choose_form, configure
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.service import StopSignals, run_to_end
from stagemesh.shared.stage.stage import StageService


def run_stage(
    config: Config,
    instance: str | None,
    pp_rank: int | None,
    *,
    role: str,
) -> None:
    """Runs until told to stop. Raises Rejected if `instance` is not of `role`, or has no such rank."""
    if instance is None or pp_rank is None:
        raise Rejected("instance", "a stage needs an instance and a rank")
    section = config.instance(instance)
    if section.role != role or not 0 <= pp_rank < section.pp_size:
        raise Rejected("instance", f"{instance} is {section.role} of {section.pp_size} stages, not {role} {pp_rank}")
    log = configure(role, instance, pp_rank, form=choose_form(os.environ, sys.stderr))
    notifier = Notifier.from_environ(os.environ)
    signals = StopSignals()
    service = StageService(
        config,
        instance,
        pp_rank,
        notifier=notifier,
        on_stop=signals.drain.set,
        log=log,
    )
    drain_timeout_s = config.engine.drain_timeout_s
    run_to_end(service, drain_timeout_s=drain_timeout_s, notifier=notifier, log=log, signals=signals)
