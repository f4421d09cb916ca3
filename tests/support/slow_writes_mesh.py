"""`python -m tests.support.slow_writes_mesh up ...`: `stagemesh up` whose prefill stages take their time over KV.

Each batch of KV that the real transfer engine carries waits DELAY_S / 2 in its thread before, and as long after: on a
fast host a transfer of the tiny model's KV is over before one can look.
"""

from __future__ import annotations

import time
from typing import Any, cast

from stagemesh.shared.config import Config
from stagemesh.shared.runtime.plan import ENTRIES
from stagemesh.shared.transfer.base import Lane

DELAY_S = 0.02


def run(config: Config, instance: str | None, pp_rank: int | None) -> None:
    """A prefill stage."""
    from stagemesh.services.prefill.service import run as run_prefill
    from stagemesh.shared.transfer.mooncake import MooncakeEndpoint

    send = MooncakeEndpoint._send

    def slow(self: MooncakeEndpoint, endpoint: str, batch: Any, lane: Lane) -> Any:
        if lane is not Lane.BULK:
            return send(self, endpoint, batch, lane)
        time.sleep(DELAY_S / 2)
        failure = send(self, endpoint, batch, lane)
        time.sleep(DELAY_S / 2)
        return failure

    cast("Any", MooncakeEndpoint)._send = slow
    run_prefill(config, instance, pp_rank)


if __name__ == "__main__":
    from stagemesh.shared.cli.main import main

    cast("dict[str, str]", ENTRIES)["prefill"] = "tests.support.slow_writes_mesh:run"
    main()
