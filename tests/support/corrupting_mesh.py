"""`python -m tests.support.corrupting_mesh up ...`: `stagemesh up` whose prefill stages put wrong bytes on the wire.

Each stage's first STAGEMESH_FAKE_CORRUPT KV writes carry zeros instead of KV.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch

from stagemesh.shared.config import Config
from stagemesh.shared.runtime.plan import ENTRIES
from stagemesh.shared.transfer.base import Endpoint, Lane, Piece, RegionKey, TransferHandle

CORRUPT = "STAGEMESH_FAKE_CORRUPT"
LONGEST_PIECE = 1 << 20


def run(config: Config, instance: str | None, pp_rank: int | None) -> None:
    """A prefill stage."""
    from stagemesh.services.prefill.service import run as run_prefill
    from stagemesh.shared.stage import stage
    from stagemesh.shared.transfer.backends import open_endpoint

    def opened(*what: Any, **more: Any) -> Endpoint:
        return corrupting(open_endpoint(*what, **more), int(os.environ[CORRUPT]), config.model.device)

    cast("Any", stage).open_endpoint = opened
    run_prefill(config, instance, pp_rank)


def corrupting(endpoint: Endpoint, num_writes: int, device: str) -> Endpoint:
    zeros = endpoint.register(torch.zeros(LONGEST_PIECE, dtype=torch.uint8, device=device))
    write, left = endpoint.write, [num_writes]

    def wrong(key: RegionKey, pieces: Sequence[Piece], lane: Lane = Lane.BULK) -> TransferHandle:
        if lane is Lane.BULK and left[0] > 0:
            left[0] -= 1
            pieces = [Piece(zeros.address, piece.target, piece.length) for piece in pieces]
        return write(key, pieces, lane)

    cast("Any", endpoint).write = wrong
    return endpoint


if __name__ == "__main__":
    from stagemesh.shared.cli.main import main

    cast("dict[str, str]", ENTRIES)["prefill"] = "tests.support.corrupting_mesh:run"
    main()
