# SPDX-License-Identifier: Apache-2.0
"""The weights of this process that live in shared segments: moved there, mapped, unmapped, mapped
again.

Owns mappings and the lease that keeps their generation in the vault. The memory behind a tensor
view belongs to a Residency, which lives as long as the process: views hold addresses, not
references.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from warmhold_wcache import pages, segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, Segment, Tensor
from warmhold_wcache.vllm_plugin.model_state import (
    BUFFER,
    Found,
    Inventory,
    dtype_name,
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, *(ctypes.c_size_t,) * 2, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAYMOVE, _FIXED = 1, 2  # linux/mman.h

ALIGNMENT_BYTES = 64  # torch's own CPU allocations have it, and vector loads like it
MAX_SEGMENTS = 200
# Post-processing and forward passes write into small buffers (scales, counters) and never into
# weights. What is smaller is therefore private in every mode; what is larger is mapped read-only.
PRIVATE_BUFFER_BYTES = 1 << 20


@dataclass
class Residency:
    """One generation mapped in this process; `addresses` go with its segments."""

    generation: Generation
    addresses: list[int]
    socket_path: Path
    timeout_s: float
    mapped: bool = True

    def quiesce(self) -> None:
        """Unmap every segment and keep its addresses reserved; no tensor may be touched until
        resume(). The lease stays: it is the process's."""
        self.mapped = False  # first: where only some can be unmapped, resume() maps all again
        for segment, address in zip(self.generation.segments, self.addresses, strict=True):
            segments.unmap_keep_address(address, segment.size_bytes)

    def resume(self) -> None:
        """Fetch the generation again and map it where it was; raise WcacheError where it is
        gone."""
        if self.mapped:
            return
        with VaultClient(self.socket_path, self.timeout_s) as client:
            _, fds = client.fetch(self.generation.key)
        try:
            for segment, address, fd in zip(
                self.generation.segments, self.addresses, fds, strict=True
            ):
                segments.map_read_only(fd, segment.size_bytes, address)
        finally:
            close_all(fds)
        self.mapped = True


# Every generation that this process has mapped, in the order of loading: target, then draft.
RESIDENT: list[Residency] = []
# Not empty once a model of this process has left its segments: it must not be snapshotted any more.
DETACHED: list[str] = []
# Called before anything writes into weights of this process.
BEFORE_WRITING: list[Callable[[], None]] = []


def keep(residency: Residency, model: nn.Module) -> None:
    """Given a model whose tensors lie in a residency, keep it for good, and see to it that loading
    other weights into the model makes its memory private first."""
    RESIDENT.append(residency)
    load_weights = model.load_weights

    def load_into_private(*args: Any, **kwargs: Any) -> Any:
        detach()
        return load_weights(*args, **kwargs)

    model.load_weights = load_into_private


def detach() -> None:
    """Put private, writable copies in the place of this process's mappings, at the same addresses,
    and end the leases: every tensor is what it was, and can be written. One segment at a time is
    held twice."""
    for act in BEFORE_WRITING:
        act()
    while RESIDENT:
        residency = RESIDENT[-1]
        residency.resume()
        for segment, address in zip(
            residency.generation.segments, residency.addresses, strict=True
        ):
            _make_private(address, segment.size_bytes)
        RESIDENT.pop()
        DETACHED.append(residency.generation.id)
        with (
            suppress(WcacheError, OSError),
            VaultClient(residency.socket_path, residency.timeout_s) as client,
        ):
            client.release(residency.generation.id)


def build_layout(inventory: Inventory, segment_bytes: int) -> tuple[list[int], list[Tensor]]:
    """Given a model's tensors and the size that a segment should not exceed, return the sizes of
    the segments and each tensor's place. A tensor that is larger has a segment of its own."""
    total = sum(_span_bytes(item.tensor) for item in inventory.tensors)
    limit = max(segment_bytes, -(-total // MAX_SEGMENTS) + ALIGNMENT_BYTES)
    sizes: list[int] = []
    tensors: list[Tensor] = []
    for item in inventory.tensors:
        span = _span_bytes(item.tensor)
        offset = -(-sizes[-1] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if sizes else 0
        if not sizes or (offset + span > limit and sizes[-1] > 0):
            sizes.append(0)
            offset = 0
        tensors.append(
            Tensor(
                name=item.name,
                kind=item.kind,
                segment=len(sizes) - 1,
                offset_bytes=offset,
                shape=tuple(item.tensor.shape),
                stride=_stride(item.tensor),
                dtype=dtype_name(item.tensor.dtype),
            )
        )
        sizes[-1] = offset + span
    page = os.sysconf("SC_PAGE_SIZE")
    return [max(page, -(-size // page) * page) for size in sizes], tensors


def move_into_segments(
    inventory: Inventory, sizes: Sequence[int], places: Sequence[Tensor], name: str
) -> tuple[tuple[Segment, ...], list[int]]:
    """Given a model's tensors and their layout, copy them into new sealed segments and let them go
    on there, read-only; return the segments and their descriptors, which the caller closes.

    A tensor's own memory is freed as soon as it was copied: one segment is the most that is held
    twice."""
    made: list[Segment] = []
    fds: list[int] = []
    by_segment: dict[int, list[tuple[Found, Tensor]]] = {}
    for item, place in zip(inventory.tensors, places, strict=True):
        by_segment.setdefault(place.segment, []).append((item, place))
    try:
        for index, size in enumerate(sizes):
            fd = segments.create(size, f"{name}-{index}")
            fds.append(fd)
            address = segments.map_writable(fd, size)
            for item, place in by_segment.get(index, []):
                view = view_at(address, size, place)
                view.copy_(item.tensor.detach())
                if not is_private(place, view.nbytes):
                    item.tensor.data = view
                    for twin in item.twins:
                        twin.data = view
            # The same range again, read-only: the seal forbids new writable mappings, and none is
            # left.
            segments.map_read_only(fd, size, address)
            segments.seal(fd)
            made.append(Segment(size, address, segments.checksum(fd, size)))
    except BaseException:
        close_all(fds)
        raise
    pages.trim_heap()  # most of what was just moved
    return tuple(made), fds


def map_generation(generation: Generation, fds: Sequence[int]) -> list[int]:
    """Given a generation and its descriptors, map every segment read-only; return the addresses."""
    addresses: list[int] = []
    try:
        for segment, fd in zip(generation.segments, fds, strict=True):
            addresses.append(segments.map_read_only(fd, segment.size_bytes))
    except BaseException:
        unmap(generation, addresses)
        raise
    return addresses


def unmap(generation: Generation, addresses: Sequence[int]) -> None:
    """Given what map_generation returned, unmap it; no view of it may be used afterwards."""
    for segment, address in zip(generation.segments, addresses, strict=False):
        segments.unmap(address, segment.size_bytes)


def read_tensors(
    generation: Generation, addresses: Sequence[int], copy: bool
) -> dict[str, tuple[str, torch.Tensor]]:
    """Given a mapped generation, return its tensors by name with their kind: views, or private
    copies of small buffers and, with `copy`, of everything."""
    tensors = {}
    for place in generation.tensors:
        size = generation.segments[place.segment].size_bytes
        view = view_at(addresses[place.segment], size, place)
        if copy or is_private(place, view.nbytes):
            view = view.clone()
        tensors[place.name] = (place.kind, view)
    return tensors


def is_private(place: Tensor, size_bytes: int) -> bool:
    """Whether a tensor of that size is kept in private memory in every mode."""
    return place.kind == BUFFER and size_bytes <= PRIVATE_BUFFER_BYTES


def view_at(address: int, size_bytes: int, place: Tensor) -> torch.Tensor:
    """Given a mapping and a tensor's place in it, return the tensor there, without a copy."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    if 0 in place.shape:
        return torch.empty(place.shape, dtype=dtype)
    memory = (ctypes.c_char * size_bytes).from_address(address)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    room = (size_bytes - place.offset_bytes) // dtype.itemsize * dtype.itemsize
    flat = whole[place.offset_bytes : place.offset_bytes + room].view(dtype)
    return flat.as_strided(place.shape, place.stride)


def _make_private(address: int, size_bytes: int) -> None:
    copy = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0)
    if copy in (None, _FAILED):
        raise OSError(ctypes.get_errno(), f"no memory for a private copy of {size_bytes} bytes")
    ctypes.memmove(copy, address, size_bytes)
    # In one step: no reader finds a hole, or memory that is half copied.
    if _libc.mremap(copy, size_bytes, size_bytes, _MAYMOVE | _FIXED, address) in (None, _FAILED):
        code = ctypes.get_errno()
        segments.unmap(copy, size_bytes)
        raise OSError(code, "mremap of a private copy")


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride a tensor has in its segment: its own if its elements lie densely, else
    contiguous."""
    if torch._C._has_storage(tensor) and _is_dense(tensor):
        return tuple(tensor.stride())
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _span_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def close_all(fds: Sequence[int]) -> None:
    """Given descriptors, close them."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
