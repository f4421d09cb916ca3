"""Whether a stage fits into the memory that is there, asked before anything is allocated."""

from __future__ import annotations

from pathlib import Path

from stagemesh.shared.errors import Rejected

MEMINFO = Path("/proc/meminfo")
GIB = 1 << 30


def available_memory(meminfo: Path = MEMINFO) -> int:
    """Bytes that can be allocated without swapping, as the kernel estimates it. Raises Rejected if it does not say."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024  # the file counts in KiB
    raise Rejected("memory", f"{meminfo} has no MemAvailable")


def check_memory(weights_bytes: int, pool_bytes: int, available_bytes: int) -> None:
    """Raises Rejected if weights and pool together need more than is available."""
    if weights_bytes + pool_bytes > available_bytes:
        raise Rejected(
            "memory",
            f"weights need {_gib(weights_bytes)} and the KV pool {_gib(pool_bytes)}, "
            f"together {_gib(weights_bytes + pool_bytes)}, but {_gib(available_bytes)} are available",
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
