"""The ring of slots between two stages on GPUs of one host: hand-over is ordered on the devices, no host waits.

sender:   [forward] --copy into the peer's slot--> --write the step's number into the peer's flag-->
receiver:                         --wait until the flag has reached the step--> [forward reads the slot]

All of it is enqueued ahead of time: the wait on the receiver's computing stream, the copy on the sender's or, of
decode's steps, on one beside it. A step's slot is `step_number % num_slots`, and flow control is the head's, as in the
ring over the transfer backend. Steps come in order, so the flag only grows. The receiver's memory is mapped by the
sender with CUDA IPC; both processes may see no other GPU than their own.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from stagemesh.shared.core.directory import RegionKey
from stagemesh.shared.errors import ProtocolViolation, StagemeshError
from stagemesh.shared.link.ring import RingSpec

FLAG_BYTES: Final = 4096  # the flag has a page of its own, before the slots
SCHEME: Final = "cuda-ipc"
MASK_32: Final = 0xFFFFFFFF


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a call of the CUDA bindings. Raises StagemeshError if it failed."""
    code, *values = result
    if int(code) != 0:
        raise StagemeshError(f"{what} failed: {code!r}")
    return values[0] if values else None


class DeviceInbox:
    """Owns the slots that the previous stage writes into: `num_slots` of `slot_bytes` on this process's GPU."""

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        from cuda.bindings import driver, runtime

        self._driver = driver
        self._memory = torch.zeros(FLAG_BYTES + num_slots * slot_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()  # zeroed before anybody may write
        address = self._memory.data_ptr()
        base = int(checked(driver.cuMemGetAddressRange(address), "cuMemGetAddressRange"))
        handle = checked(runtime.cudaIpcGetMemHandle(base), "cudaIpcGetMemHandle")
        name = f"{SCHEME}:{bytes(handle.reserved).hex()}:{address - base}"
        self.spec = RingSpec(RegionKey(name, address, self._memory.numel()), num_slots, slot_bytes)

    def slot(self, step_number: int) -> torch.Tensor:
        """uint8 [slot_bytes] of the step's slot."""
        start = FLAG_BYTES + step_number % self.spec.num_slots * self.spec.slot_bytes
        return self._memory[start : start + self.spec.slot_bytes]

    def slots(self) -> torch.Tensor:
        """uint8 [num_slots, slot_bytes]."""
        return self._memory[FLAG_BYTES:].view(self.spec.num_slots, self.spec.slot_bytes)

    def wait(self, stream: torch.cuda.Stream, step_number: int) -> None:
        """`stream` goes on when step `step_number` is in its slot."""
        driver = self._driver
        reached = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        address, value = self._memory.data_ptr(), step_number & MASK_32
        checked(driver.cuStreamWaitValue32(stream.cuda_stream, address, value, reached), "cuStreamWaitValue32")


class DeviceOutbox:
    """Writes into another stage's inbox, or into an inbox of this process."""

    def __init__(self, spec: RingSpec, local: DeviceInbox | None = None) -> None:
        from cuda.bindings import driver, runtime

        self._driver, self._runtime, self._spec = driver, runtime, spec
        self._mapped: int | None = None
        if local is not None:
            self._address = spec.key.address
            return
        scheme, _, rest = spec.key.endpoint.partition(":")
        handle_hex, _, offset = rest.partition(":")
        if scheme != SCHEME or not offset.isdecimal():
            raise ProtocolViolation(f"{spec.key.endpoint!r} is no slots on a GPU of this host")
        handle = runtime.cudaIpcMemHandle_t()
        handle.reserved = bytes.fromhex(handle_hex)
        mapped = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        self._mapped = int(checked(mapped, "cudaIpcOpenMemHandle"))
        self._address = self._mapped + int(offset)

    def send(self, stream: torch.cuda.Stream, step_number: int, data: torch.Tensor) -> None:
        """Enqueues the copy of contiguous `data` into the step's slot, and the news of it."""
        num_bytes = data.numel() * data.element_size()
        if num_bytes > self._spec.slot_bytes:
            raise ProtocolViolation(f"step {step_number}: {num_bytes} bytes in a slot of {self._spec.slot_bytes}")
        target = self._address + FLAG_BYTES + step_number % self._spec.num_slots * self._spec.slot_bytes
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        copied = self._runtime.cudaMemcpyAsync(target, data.data_ptr(), num_bytes, kind, stream.cuda_stream)
        checked(copied, "cudaMemcpyAsync")
        written = self._driver.cuStreamWriteValue32(stream.cuda_stream, self._address, step_number & MASK_32, 0)
        checked(written, "cuStreamWriteValue32")

    def close(self) -> None:
        """Nothing that was sent may be on its way any more."""
        if self._mapped is not None:
            self._runtime.cudaIpcCloseMemHandle(self._mapped)
            self._mapped = None
