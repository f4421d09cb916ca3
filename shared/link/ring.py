"""The ring of slots that activations travel through from one stage to the next.

sender: stage(step, hidden) --> transmit(step, rows) --> one write --> [notice on the command stream]
receiver:                                                              view(step, rows) --> forward pass

A step's slot is `step_number % num_slots` on both sides. Flow control is the head's: it never has more than
`num_slots` steps outstanding, so whoever reaches slot s again knows that its previous step has come back, and with
that been read. The ring itself only checks the half it can see: the sender's previous write of the slot has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stagemesh.shared.errors import Bug, ProtocolViolation
from stagemesh.shared.transfer.base import Endpoint, Lane, Piece, RegionKey, TransferHandle, TransferState


@dataclass(frozen=True, slots=True)
class RingSpec:
    """What the receiver publishes: where its slots are. Each is `slot_bytes` long, one after the other."""

    key: RegionKey
    num_slots: int
    slot_bytes: int


class RingReceiver:
    """Owns the slots, `[num_slots, max_tokens, hidden_size]`, that the previous stage writes into."""

    def __init__(
        self, endpoint: Endpoint, *, num_slots: int, max_tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._endpoint = endpoint
        self._slots = torch.zeros(num_slots, max_tokens, hidden_size, dtype=dtype)
        self._region = endpoint.register(self._slots)
        self.spec = RingSpec(endpoint.publish(self._region), num_slots, self._region.length // num_slots)

    def view(self, step_number: int, num_tokens: int) -> torch.Tensor:
        """`[num_tokens, hidden_size]` of the step's slot, no copy. Valid until the step has come back to the head.

        Raises ProtocolViolation if the slot does not hold that many rows.
        """
        num_slots, max_tokens, _ = self._slots.shape
        if not 0 < num_tokens <= max_tokens:
            raise ProtocolViolation(f"step {step_number} has {num_tokens} rows, a ring slot holds 1..{max_tokens}")
        return self._slots[step_number % num_slots, :num_tokens]

    def close(self) -> None:
        """Ends the registration. The sender must have stopped."""
        self._endpoint.unregister(self._region)


@dataclass(slots=True)
class Slot:
    """The sender's side of a slot: who staged into it last, and the write that took it away."""

    step_number: int = -1
    num_tokens: int = 0
    write: TransferHandle | None = None


class RingSender:
    """Owns as many staging slots as the receiver has slots.

    Raises ProtocolViolation if the spec does not fit the hidden size and dtype, or its own region.
    """

    def __init__(self, endpoint: Endpoint, spec: RingSpec, *, hidden_size: int, dtype: torch.dtype) -> None:
        row_bytes = hidden_size * dtype.itemsize
        if spec.num_slots < 1 or spec.slot_bytes < row_bytes or spec.slot_bytes % row_bytes:
            raise ProtocolViolation(f"{spec.num_slots} slots of {spec.slot_bytes} bytes hold no rows of {row_bytes}")
        if spec.num_slots * spec.slot_bytes > spec.key.length:
            raise ProtocolViolation(f"{spec.num_slots} slots of {spec.slot_bytes} bytes exceed {spec.key}")
        self._endpoint = endpoint
        self._spec = spec
        self._row_bytes = row_bytes
        self._staging = torch.zeros(spec.num_slots, spec.slot_bytes // row_bytes, hidden_size, dtype=dtype)
        self._region = endpoint.register(self._staging)
        self._slots = [Slot() for _ in range(spec.num_slots)]

    def stage(self, step_number: int, hidden: torch.Tensor) -> None:
        """Copies `[num_tokens, hidden_size]` into the step's staging slot. May run on the worker thread.

        Raises Bug if the slot's previous step has not left it: the head has more steps outstanding than slots.
        """
        index = step_number % self._spec.num_slots
        slot, (num_tokens, hidden_size) = self._slots[index], hidden.shape
        if step_number <= slot.step_number:
            raise Bug(f"step {step_number} is staged after step {slot.step_number} in the same ring slot")
        if slot.step_number >= 0 and (slot.write is None or slot.write.state is not TransferState.DONE):
            raise Bug(f"step {step_number} needs a ring slot that step {slot.step_number} has not left")
        if hidden_size != self._staging.shape[2] or not 0 < num_tokens <= self._staging.shape[1]:
            raise Bug(f"{tuple(hidden.shape)} does not fit a ring slot of {tuple(self._staging.shape[1:])}")
        if hidden.dtype != self._staging.dtype:
            raise Bug(f"{hidden.dtype} in a ring of {self._staging.dtype}")
        self._staging[index, :num_tokens].copy_(hidden)
        slot.step_number, slot.num_tokens, slot.write = step_number, num_tokens, None

    def transmit(self, step_number: int) -> TransferHandle:
        """Writes the staged rows into the receiver's slot, on the loop's thread. Raises Bug if nothing is staged.

        Once the handle is done the receiver may be told that step `step_number` has come.
        """
        index = step_number % self._spec.num_slots
        slot = self._slots[index]
        if slot.step_number != step_number or slot.write is not None:
            raise Bug(f"step {step_number} is not staged")
        offset = index * self._spec.slot_bytes
        piece = Piece(self._region.address + offset, self._spec.key.address + offset, slot.num_tokens * self._row_bytes)
        slot.write = self._endpoint.write(self._spec.key, [piece], Lane.URGENT)
        return slot.write

    def send(self, step_number: int, hidden: torch.Tensor) -> TransferHandle:
        """`stage`, then `transmit`."""
        self.stage(step_number, hidden)
        return self.transmit(step_number)

    def close(self) -> None:
        """Ends the registration. Every write must have settled."""
        self._endpoint.unregister(self._region)
