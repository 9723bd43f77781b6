# SPDX-License-Identifier: Apache-2.0
"""The weights of this process that live in shared segments: moved there, mapped, unmapped, mapped
again.

Owns mappings and the lease that keeps their generation in the vault. The memory behind a tensor
view belongs to a Residency, which lives as long as the process: views hold addresses, not
references.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, Segment, Tensor
from warmhold_wcache.vllm_plugin.memory import Memory
from warmhold_wcache.vllm_plugin.model_state import (
    BUFFER,
    Found,
    Inventory,
    dtype_name,
)

MAX_SEGMENTS = 200
_log = logging.getLogger("vllm.warmhold")  # below vLLM's own, or its handlers would not see it
# Post-processing and forward passes write into small buffers (scales, counters) and never into
# weights. What is smaller is therefore private in every mode; what is larger is mapped read-only.
PRIVATE_BUFFER_BYTES = 1 << 20


@dataclass
class Residency:
    """One generation mapped in this process; `addresses` go with its segments."""

    memory: Memory
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
            self.memory.unmap_keep_address(address, segment.size_bytes)

    def resume(self) -> None:
        """Fetch the generation again and map it where it was; raise WcacheError where it is
        gone."""
        if self.mapped:
            return
        began = time.monotonic()
        with VaultClient(self.socket_path, self.timeout_s) as client:
            fetched, fds = client.fetch(self.generation.key)
        fetched_at = time.monotonic()
        try:
            if not _same_layout(fetched, self.generation):
                detail = "the vault holds these weights in another layout by now"
                raise WcacheError("wcache.refused", detail, "restart the engine")
            for segment, address, fd in zip(
                self.generation.segments, self.addresses, fds, strict=True
            ):
                self.memory.map(fd, segment.size_bytes, address)
        finally:
            close_all(fds)
        self.mapped = True
        _log.info(
            "weights mapped again segments=%d bytes=%d fetch_s=%.4f map_s=%.4f",
            len(fds),
            sum(segment.size_bytes for segment in self.generation.segments),
            fetched_at - began,
            time.monotonic() - fetched_at,
        )


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


def require_held() -> None:
    """Before weights are unmapped, raise WcacheError unless the vault has them: after a publish
    that failed, or `wcache drop --force`, the mappings here are all that there is of them."""
    for resident in RESIDENT:
        if resident.mapped:
            with VaultClient(resident.socket_path, resident.timeout_s) as client:
                client.lease(resident.generation.id)


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
            residency.memory.make_private(address, segment.size_bytes)
        RESIDENT.pop()
        DETACHED.append(residency.generation.id)
        with (
            suppress(WcacheError, OSError),
            VaultClient(residency.socket_path, residency.timeout_s) as client,
        ):
            client.release(residency.generation.id)


def build_layout(
    memory: Memory, inventory: Inventory, segment_bytes: int
) -> tuple[list[int], list[Tensor]]:
    """Given a memory, a model's tensors and the size that a segment should not exceed, return the
    sizes of the segments and each tensor's place. A tensor that is larger has a segment of its own.
    """
    align = memory.alignment_bytes
    total = sum(_up(_span_bytes(item.tensor), align) for item in inventory.tensors)
    limit = max(segment_bytes, -(-total // MAX_SEGMENTS) + align)
    sizes: list[int] = []
    tensors: list[Tensor] = []
    for item in inventory.tensors:
        span = _span_bytes(item.tensor)
        offset = _up(sizes[-1], align) if sizes else 0
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
    unit = memory.granularity_bytes
    return [max(unit, _up(size, unit)) for size in sizes], tensors


def move_into_segments(
    memory: Memory, inventory: Inventory, sizes: Sequence[int], places: Sequence[Tensor], name: str
) -> tuple[tuple[Segment, ...], list[int]]:
    """Given a memory, a model's tensors and their layout, copy them into new sealed segments and
    let them go on there, read-only; return the segments and their descriptors, which the caller
    closes.

    A tensor's own memory is freed as soon as it was copied: one segment is the most that is held
    twice. Where memory does not suffice the model goes on as it is, part of it in segments that are
    writable still."""
    fds: list[int] = []
    addresses: list[int] = []
    by_segment: dict[int, list[tuple[Found, Tensor]]] = {}
    for item, place in zip(inventory.tensors, places, strict=True):
        by_segment.setdefault(place.segment, []).append((item, place))
    try:
        for index, size in enumerate(sizes):
            fd, address = memory.allocate(size, f"{name}-{index}")
            fds.append(fd)
            addresses.append(address)
            for item, place in by_segment.get(index, []):
                view = view_at(memory, address, size, place)
                view.copy_(item.tensor.detach())
                if not is_private(place, view.nbytes):
                    item.tensor.data = view
                    for twin in item.twins:
                        twin.data = view
            memory.trim()
        made = []
        for fd, address, size in zip(fds, addresses, sizes, strict=True):
            memory.freeze(fd, address, size)
            made.append(Segment(size, address, memory.checksum(fd, address, size)))
    except BaseException:
        close_all(fds)
        raise
    return tuple(made), fds


def move_to_pool(memory: Memory, inventory: Inventory) -> None:
    """Given a memory and the tensors of a model that was loaded in its `loading`, and that no
    segments take, move them to where vLLM would have loaded them. One is held twice."""
    for item in inventory.tensors:
        moved = item.tensor.detach().clone()
        with memory.loading():
            for tensor in (item.tensor, *item.twins):
                tensor.data = moved


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a segment of this process, also while that is unmapped."""
    return any(
        address <= tensor.data_ptr() < address + segment.size_bytes
        for resident in RESIDENT
        for segment, address in zip(resident.generation.segments, resident.addresses, strict=True)
    )


def map_generation(memory: Memory, generation: Generation, fds: Sequence[int]) -> list[int]:
    """Given a memory, a generation and its descriptors, map every segment read-only; return the
    addresses."""
    if generation.backend != memory.backend:
        detail = f"the generation is {generation.backend}, this device {memory.backend}"
        raise WcacheError("wcache.refused", detail)
    addresses: list[int] = []
    try:
        for segment, fd in zip(generation.segments, fds, strict=True):
            addresses.append(memory.map(fd, segment.size_bytes))
    except BaseException:
        unmap(memory, generation, addresses)
        raise
    return addresses


def unmap(memory: Memory, generation: Generation, addresses: Sequence[int]) -> None:
    """Given what map_generation returned, unmap it; no view of it may be used afterwards."""
    for segment, address in zip(generation.segments, addresses, strict=False):
        memory.unmap(address, segment.size_bytes)


def read_tensors(
    memory: Memory, generation: Generation, addresses: Sequence[int], copy: bool
) -> dict[str, tuple[str, torch.Tensor]]:
    """Given a mapped generation, return its tensors by name with their kind: views, or private
    copies of small buffers and, with `copy`, of everything."""
    tensors = {}
    for place in generation.tensors:
        size = generation.segments[place.segment].size_bytes
        view = view_at(memory, addresses[place.segment], size, place)
        if copy or is_private(place, view.nbytes):
            view = view.clone()
        tensors[place.name] = (place.kind, view)
    return tensors


def is_private(place: Tensor, size_bytes: int) -> bool:
    """Whether a tensor of that size is kept in private memory in every mode."""
    return place.kind == BUFFER and size_bytes <= PRIVATE_BUFFER_BYTES


def view_at(memory: Memory, address: int, size_bytes: int, place: Tensor) -> torch.Tensor:
    """Given a mapping and a tensor's place in it, return the tensor there, without a copy."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    whole = memory.view(address, size_bytes)
    if 0 in place.shape:
        return torch.empty(place.shape, dtype=dtype, device=whole.device)
    room = (size_bytes - place.offset_bytes) // dtype.itemsize * dtype.itemsize
    flat = whole[place.offset_bytes : place.offset_bytes + room].view(dtype)
    return flat.as_strided(place.shape, place.stride)


def _same_layout(one: Generation, other: Generation) -> bool:
    sizes = [[segment.size_bytes for segment in item.segments] for item in (one, other)]
    return sizes[0] == sizes[1] and one.tensors == other.tensors


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


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _span_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def close_all(fds: Sequence[int]) -> None:
    """Given descriptors, close them."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
