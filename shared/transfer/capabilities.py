"""What a backend can do, where backends differ; and so what the mesh does itself.

| a backend that does not | is |
|---|---|
| reach other processes, or know the device or protocol | refused at start, naming the setting |
| keep its lanes apart | given small batches, so that an urgent write waits for a small one at most |
| revoke | never asked to: a pool stays registered until its process ends |
| end writes with their process | read out: targets read their sockets to the end (RDMA: quarantine for good) |
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from stagemesh.shared.config import TransferSection
from stagemesh.shared.errors import Rejected

SMALL_BATCH_BYTES: Final = 4 << 20
LARGE_BATCH_BYTES: Final = 256 << 20  # copied from GPU to GPU in less than a millisecond


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`lanes_apart`: an urgent write does not wait while a batch of a bulk one is copied. `revokes`: what is no longer
    registered takes no more writes. `reap_ends_writes`: no byte lands once a writer's process is reaped. `one_copy`:
    memory goes to memory in one step, so that large batches cost no wait."""

    between_processes: bool = True
    lanes_apart: bool = True
    revokes: bool = False
    reap_ends_writes: bool = False
    one_copy: bool = False

    def batch_bytes(self, wanted: int) -> int:
        """What a batch may have where the config asks for `wanted`."""
        if not self.lanes_apart:
            return min(wanted, SMALL_BATCH_BYTES)
        return max(wanted, LARGE_BATCH_BYTES) if self.one_copy else wanted


# (backend, device, protocol) -> what that can do; what is not here does not exist. NIXL's `auto` may be copies in one
# host and TCP between hosts, so it promises what both can.
KNOWN: Final = {
    ("memory", "cpu", "auto"): Capabilities(between_processes=False, revokes=True, reap_ends_writes=True),
    ("mooncake", "cpu", "tcp"): Capabilities(revokes=True),
    ("mooncake", "cpu", "rdma"): Capabilities(revokes=True),
    ("mooncake", "cuda", "intranode"): Capabilities(reap_ends_writes=True, one_copy=True),
    ("mooncake", "cuda", "tcp"): Capabilities(revokes=True),
    ("mooncake", "cuda", "rdma"): Capabilities(revokes=True),
    ("nixl", "cpu", "intranode"): Capabilities(lanes_apart=False, reap_ends_writes=True),
    ("nixl", "cpu", "auto"): Capabilities(lanes_apart=False),
    ("nixl", "cpu", "tcp"): Capabilities(lanes_apart=False),
    ("nixl", "cuda", "intranode"): Capabilities(reap_ends_writes=True, one_copy=True),
    ("nixl", "cuda", "auto"): Capabilities(),
    ("nixl", "cuda", "tcp"): Capabilities(),
}
PREFERRED: Final = ("intranode", "auto", "tcp")  # where all peers are in this host
PREFERRED_BETWEEN_HOSTS: Final = ("auto", "intranode", "tcp")
PREFERRED_OVER_HOSTS: Final = {"cpu": ("auto", "tcp"), "cuda": ("auto", "rdma", "tcp")}
"""Where the config has stages on several; `rdma` is TCP where there is no card for it."""


def choose_protocol(section: TransferSection, device: str, *, one_host: bool = True) -> str:
    """How the backend moves bytes. Raises Rejected where it does not move such memory, or not in the way that is asked
    for, or not between processes."""
    known = [protocol for backend, where, protocol in KNOWN if (backend, where) == (section.backend, device)]
    if not all(KNOWN[section.backend, device, protocol].between_processes for protocol in known):
        raise Rejected("transfer.backend", f"{section.backend!r} does not work between processes")
    if not known:
        raise Rejected("transfer.backend", f"{section.backend!r} does not move memory of model.device {device!r}")
    if section.protocol == "auto":
        in_one = PREFERRED if is_loopback(section.host) else PREFERRED_BETWEEN_HOSTS
        wanted = in_one if one_host else PREFERRED_OVER_HOSTS[device]
        return next(protocol for protocol in wanted if protocol in known)
    if section.protocol not in known:
        can = ", ".join(known)
        reason = f"{section.protocol!r} is not what {section.backend!r} does where model.device is {device!r}: {can}"
        raise Rejected("transfer.protocol", reason)
    return section.protocol


def reap_is_proof(section: TransferSection, device: str, *, one_host: bool = True) -> bool:
    """Whether targets can tell that nothing more arrives of a process that has been reaped: not what a card writes.
    Raises Rejected as `choose_protocol` does."""
    return choose_protocol(section, device, one_host=one_host) != "rdma"


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def table() -> list[str]:
    """KNOWN in words, for the README."""
    columns = [field.name for field in fields(Capabilities)]
    lines = [f"| backend, device, protocol | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for known, can in KNOWN.items():
        cells = ["yes" if getattr(can, column) else "no" for column in columns]
        lines.append(f"| {', '.join(known)} | {' | '.join(cells)} |")
    return lines
