"""The question asked before a stage allocates anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.memory import GIB, available_memory, check_memory


def test_what_fits_passes_and_what_does_not_says_why() -> None:
    check_memory(GIB, GIB, 2 * GIB)
    with pytest.raises(Rejected) as caught:
        check_memory(3 * GIB, GIB // 2, 2 * GIB)
    assert caught.value.field == "memory"
    for amount in ("weights need 3.00 GiB", "KV pool 0.50 GiB", "together 3.50 GiB", "2.00 GiB are available"):
        assert amount in str(caught.value)


def test_available_memory_is_read_in_bytes(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:    40 kB\n")
    assert available_memory(meminfo) == 40 * 1024
    assert available_memory() > 1 << 20
    meminfo.write_text("MemTotal:       100 kB\n")
    with pytest.raises(Rejected, match="has no MemAvailable"):
        available_memory(meminfo)
