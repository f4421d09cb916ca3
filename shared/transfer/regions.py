"""The registered regions of one endpoint, and the tensors they belong to."""

from __future__ import annotations

import torch

from stagemesh.shared.errors import Rejected
from stagemesh.shared.transfer.base import Region, RegionKey


class RegionTable:
    """Keeps every registered tensor alive: the allocator must not reuse an address that peers may write to."""

    def __init__(self) -> None:
        self._held: dict[Region, torch.Tensor] = {}
        self.regions: tuple[Region, ...] = ()

    def bounds(self, memory: torch.Tensor) -> Region:
        """The region `memory` would be. Raises Rejected if it cannot be registered."""
        if memory.numel() == 0:
            raise Rejected("memory", "is empty")
        if not memory.is_contiguous():
            raise Rejected("memory", f"is not contiguous: shape {tuple(memory.shape)}, strides {memory.stride()}")
        region = Region(memory.data_ptr(), memory.numel() * memory.element_size())
        for held in self.regions:
            if region.address < held.address + held.length and held.address < region.address + region.length:
                raise Rejected("memory", f"overlaps a registered region: {region}, {held}")
        return region

    def add(self, region: Region, memory: torch.Tensor) -> None:
        self._held[region] = memory
        self.regions = tuple(self._held)

    def remove(self, region: Region) -> torch.Tensor | None:
        """The tensor, if the region was registered."""
        memory = self._held.pop(region, None)
        self.regions = tuple(self._held)
        return memory

    def memory(self, region: Region) -> torch.Tensor:
        """Raises Rejected if it is not registered."""
        if region not in self._held:
            raise Rejected("region", f"is not registered here: {region}")
        return self._held[region]

    def key(self, endpoint: str, region: Region) -> RegionKey:
        self.memory(region)
        return RegionKey(endpoint, region.address, region.length)

    def covers(self, address: int, length: int) -> bool:
        return any(region.covers(address, length) for region in self.regions)
