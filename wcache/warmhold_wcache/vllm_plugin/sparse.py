# SPDX-License-Identifier: Apache-2.0
"""Memory of vLLM's sleep-mode pool that is mostly zeros, across a sleep: only what is not zero is
copied to the host.

vLLM copies whole allocations. Counters for penalties alone, one for each token of the vocabulary
and each request that can run, are 0.5 GB on an H200, and zeros as long as nobody asks for
penalties. In a snapshot they would be written and read each time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

# An allocation's tag while it sleeps: none that vLLM copies, and none that a wake-up can leave out.
TAG = "warmhold-sparse"
CHUNK_BYTES = 2 << 20  # the pool's allocations are multiples of it

View = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class _Kept:
    data: Any  # vLLM's record of the allocation
    tag: str
    runs: list[tuple[int, torch.Tensor]]  # offset in bytes, and a copy on the host


class SparseCopies:
    """The copies of one pool; `view` returns an address range's bytes as a tensor (uint8)."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._kept: dict[int, _Kept] = {}

    def keep(self, allocations: dict[int, Any], tags: Iterable[str]) -> None:
        """Given the pool's allocations by address, and the tags of those that vLLM is about to
        copy, copy what is not zero of those that are zeros for more than half, and give them a tag
        of which vLLM discards the memory."""
        wanted = set(tags)
        for address, data in allocations.items():
            if data.is_asleep or data.tag not in wanted:
                continue
            memory = self._view(address, data.handle[1])
            found = find_runs(memory)
            if 2 * sum(end - begin for begin, end in found) > memory.numel():
                continue
            runs = [(begin, memory[begin:end].to("cpu", copy=True)) for begin, end in found]
            self._kept[address] = _Kept(data, data.tag, runs)
            data.tag = TAG

    def put_back(self, allocations: dict[int, Any]) -> None:
        """Given the pool's allocations by address, write into those that are there again; what was
        freed meanwhile is forgotten."""
        for address, kept in list(self._kept.items()):
            data = allocations.get(address)
            if data is not None and data is kept.data:
                if data.is_asleep:
                    continue
                memory = self._view(address, data.handle[1])
                memory.zero_()
                for begin, copy in kept.runs:
                    memory[begin : begin + copy.numel()].copy_(copy)
                data.tag = kept.tag
            del self._kept[address]


def find_runs(memory: torch.Tensor) -> list[tuple[int, int]]:
    """Given bytes, return begin and end of the pieces, in chunks, that are not all zeros."""
    whole = memory.numel() // CHUNK_BYTES * CHUNK_BYTES
    chunks = memory[:whole].view(torch.int64).view(-1, CHUNK_BYTES // 8)
    used = [index * CHUNK_BYTES for index in chunks.any(1).nonzero().flatten().tolist()]
    if whole < memory.numel():  # never looked at
        used.append(whole)
    runs: list[tuple[int, int]] = []
    for begin in used:
        end = min(begin + CHUNK_BYTES, memory.numel())
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return runs
