# SPDX-License-Identifier: Apache-2.0
"""Weights in a CPU's memory: memfds, mapped through the C library."""

import ctypes
import mmap
import os
from contextlib import AbstractContextManager, nullcontext

import torch

from warmhold_wcache import pages, segments

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, *(ctypes.c_size_t,) * 2, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAYMOVE, _FIXED = 1, 2  # linux/mman.h


class HostMemory:
    """The memory of a CPU; see `memory.Memory`."""

    backend = "memfd"
    device = "cpu"
    alignment_bytes = 64  # torch's own CPU allocations have it, and vector loads like it
    granularity_bytes = os.sysconf("SC_PAGE_SIZE")

    def loading(self) -> AbstractContextManager[object]:
        """Anywhere: what a tensor leaves goes back to the system."""
        return nullcontext()

    def allocate(self, size_bytes: int, name: str) -> tuple[int, int]:
        """Return a new memfd and the address where it is mapped, writable."""
        fd = segments.create(size_bytes, name)
        try:
            return fd, segments.map_writable(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    def freeze(self, fd: int, address: int, size_bytes: int) -> None:
        """Seal a memfd and map the same range again, read-only: the seal forbids new writable
        mappings, and none is left."""
        segments.map_read_only(fd, size_bytes, address)
        segments.seal(fd)

    def map(self, fd: int, size_bytes: int, address: int | None = None) -> int:
        """Map a memfd read-only; return its address."""
        return segments.map_read_only(fd, size_bytes, address)

    def unmap_keep_address(self, address: int, size_bytes: int) -> None:
        """Unmap a segment and keep its range reserved."""
        segments.unmap_keep_address(address, size_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Give a range back."""
        segments.unmap(address, size_bytes)

    def make_private(self, address: int, size_bytes: int) -> None:
        """Put a writable copy in the place of a mapping."""
        copy = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0)
        if copy in (None, _FAILED):
            raise OSError(ctypes.get_errno(), f"no memory for a private copy of {size_bytes} bytes")
        ctypes.memmove(copy, address, size_bytes)
        # In one step: no reader finds a hole, or memory that is half copied.
        moved = _libc.mremap(copy, size_bytes, size_bytes, _MAYMOVE | _FIXED, address)
        if moved in (None, _FAILED):
            code = ctypes.get_errno()
            segments.unmap(copy, size_bytes)
            raise OSError(code, "mremap of a private copy")

    def view(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return the bytes of a mapping as a tensor."""
        memory = (ctypes.c_char * size_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def checksum(self, fd: int, address: int, size_bytes: int) -> str:
        """Return the checksum of a memfd's bytes."""
        return segments.checksum(fd, size_bytes)

    def trim(self) -> None:
        """Give back most of what was just moved."""
        pages.trim_heap()
