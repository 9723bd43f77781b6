# SPDX-License-Identifier: Apache-2.0
"""What the loader asks of the memory that weights live in, and which there is for a device.

The loader knows no more of it than this, so that it does the same on a CPU and on a GPU.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

import torch


class Memory(Protocol):
    """A device's segments in this process. Sizes are in bytes, addresses the process's own.

    What is mapped by a descriptor is read-only where the device can forbid writing. Raise
    WcacheError or OSError.
    """

    @property
    def backend(self) -> str:
        """What a generation in this memory calls it."""

    @property
    def device(self) -> str:
        """The device, by a name that no other on this machine has."""

    @property
    def alignment_bytes(self) -> int:
        """Of a tensor in its segment."""

    @property
    def granularity_bytes(self) -> int:
        """What a segment's size is a multiple of."""

    def loading(self) -> AbstractContextManager[object]:
        """Return where a model is loaded and moves into segments, outside of the pool in use, which
        does not return what it is not using."""

    def allocate(self, size_bytes: int, name: str) -> tuple[int, int]:
        """Return the descriptor of a new segment and the address where it is mapped, writable."""

    def freeze(self, fd: int, address: int, size_bytes: int) -> None:
        """Let nobody write into a segment any more that `allocate` returned."""

    def map(self, fd: int, size_bytes: int, address: int | None = None) -> int:
        """Map a segment and return its address: exactly the given one, which was reserved."""

    def unmap_keep_address(self, address: int, size_bytes: int) -> None:
        """Unmap a segment and keep its range reserved; again is fine."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap a segment and give its range back."""

    def make_private(self, address: int, size_bytes: int) -> None:
        """Put a writable copy, which nobody else has, in the place of a mapping."""

    def view(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return the bytes of a mapping as a tensor (uint8), without a copy."""

    def checksum(self, fd: int, address: int, size_bytes: int) -> str:
        """Return the checksum of a mapped segment's bytes, hexadecimal."""

    def trim(self) -> None:
        """Give back what tensors that are gone have left with the allocator."""


def find_memory(device: torch.device) -> Memory | None:
    """Given a device, return its memory; None where weights cannot be shared on such a device.

    Raise WcacheError where they could be, and the driver is missing.
    """
    if device.type == "cpu":
        return _host()
    if device.type == "cuda" and torch.version.cuda is not None:
        index = device.index
        return _cuda(torch.cuda.current_device() if index is None else index)
    return None


# One each, because mappings are known to the one that made them.
@cache
def _host() -> Memory:
    from warmhold_wcache.vllm_plugin.host_memory import HostMemory

    return HostMemory()


@cache
def _cuda(ordinal: int) -> Memory:
    from warmhold_wcache.vllm_plugin.cuda_memory import CudaMemory

    return CudaMemory(ordinal)
