# SPDX-License-Identifier: Apache-2.0
"""Weights in an NVIDIA GPU's memory: the driver's allocations, seen through torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from warmhold_wcache.cuda_segments import CudaSegments
from warmhold_wcache.vllm_plugin.tensor_checksum import compute_checksum


class CudaMemory(CudaSegments):
    """The memory of one GPU; see `memory.Memory`."""

    backend = "cuda-vmm"
    alignment_bytes = 512  # torch's own allocations have it

    def __init__(self, ordinal: int) -> None:
        torch.cuda.init()
        super().__init__(ordinal)
        self._torch_device = torch.device("cuda", ordinal)
        self.device = f"cuda:{torch.cuda.get_device_properties(ordinal).uuid}"

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Outside of vLLM's pool for sleep mode, which is entered again afterwards. While it is in
        use torch gives nothing back, so that weights which move would be held twice, and a pool
        within it cannot be closed (pytorch's CUDACachingAllocator.cpp: captures_underway). Small
        tensors that stay outside stay through a sleep as well."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocator = get_mem_allocator_instance()
        pool, _ = allocator.allocator_and_pools[allocator.current_tag][-1]
        place = (self._torch_device.index, pool.id)
        torch._C._cuda_endAllocateToPool(*place)
        try:
            yield
            self.trim()
        finally:
            torch._C._cuda_beginAllocateCurrentThreadToPool(*place)
            torch._C._cuda_releasePool(*place)  # it counts its users: this is none more

    def allocate(self, size_bytes: int, name: str = "") -> tuple[int, int]:
        """Return the descriptor of a new segment and its address; there is no place for a name."""
        return super().allocate(size_bytes)

    def freeze(self, fd: int, address: int, size_bytes: int) -> None:
        """Make a mapping read-only. Who has the descriptor could map it writable all the same."""
        self.forbid_writing(address, size_bytes)

    def view(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return the bytes of a mapping as a tensor."""
        return torch.as_tensor(_Bytes(address, size_bytes), device=self._torch_device)

    def checksum(self, fd: int, address: int, size_bytes: int) -> str:
        """Return the checksum of a mapped segment's bytes, computed on the GPU."""
        return compute_checksum(self.view(address, size_bytes))

    def trim(self) -> None:
        """Give torch's unused blocks back to the driver."""
        torch.cuda.synchronize(self._torch_device)
        torch.cuda.empty_cache()


class _Bytes:
    """A place in device memory, as torch reads it from other libraries' arrays."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            **{"version": 3, "data": (address, False), "shape": (size_bytes,), "typestr": "|u1"},
            **{"strides": None, "stream": None},
        }
