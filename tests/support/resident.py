"""How much memory a process has, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def rss_mib(pid: int) -> float:
    """Resident now."""
    return _kib(pid, "VmRSS") / 1024


def forget_peak(pid: int) -> None:
    """From now on `peak_mib` counts anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mib(pid: int) -> float:
    """The most that was resident at once."""
    return _kib(pid, "VmHWM") / 1024


def _kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise ValueError(f"process {pid} does not say its {name}")
