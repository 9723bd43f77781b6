# SPDX-License-Identifier: Apache-2.0
"""Memory of vLLM's sleep-mode pool that is mostly zeros, across a sleep: only pages that are not
zero are copied to the host.

vLLM copies whole allocations. Counters for penalties alone, one for each token of the vocabulary
and each request that can run, are 0.5 GB on an H200, and few are ever counted up. In a snapshot
they would be written and read each time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

# An allocation's tag while it sleeps: none that vLLM copies, and none that a wake-up can leave out.
TAG = "warmhold-sparse"
PAGE_BYTES = 4096  # the pool's allocations are multiples of it

View = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class _Kept:
    data: Any  # vLLM's record of the allocation
    tag: str
    numbers: torch.Tensor  # of the pages that are not zero
    pages: torch.Tensor  # these, on the host


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
            if data.is_asleep or data.tag not in wanted or data.handle[1] % PAGE_BYTES:
                continue
            pages = self._pages(address, data)
            numbers = pages.view(torch.int64).any(1).nonzero().flatten()
            if 2 * numbers.numel() > len(pages):
                continue
            copies = pages.index_select(0, numbers).to("cpu")
            self._kept[address] = _Kept(data, data.tag, numbers.to("cpu"), copies)
            data.tag = TAG

    def put_back(self, allocations: dict[int, Any]) -> None:
        """Given the pool's allocations by address, write into those that are there again; what was
        freed meanwhile is forgotten."""
        for address, kept in list(self._kept.items()):
            data = allocations.get(address)
            if data is not None and data is kept.data:
                if data.is_asleep:
                    continue
                pages = self._pages(address, data)
                numbers = kept.numbers.to(pages.device)
                pages.zero_().index_copy_(0, numbers, kept.pages.to(pages.device))
                data.tag = kept.tag
            del self._kept[address]

    def _pages(self, address: int, data: Any) -> torch.Tensor:
        return self._view(address, data.handle[1]).view(-1, PAGE_BYTES)
