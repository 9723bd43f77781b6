# SPDX-License-Identifier: Apache-2.0
"""Whether resident bytes still are what was published: each segment against its checksum."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from .client import VaultClient
from .generation import Generation
from .protocol import FdBag
from .segments import checksum


@dataclass(frozen=True)
class Report:
    """What was found in one generation; `changed` and `unchecked` are segment numbers."""

    id: str
    model: str
    checked: int
    changed: tuple[int, ...]
    tensors: tuple[str, ...]
    unchecked: tuple[int, ...]

    @property
    def sound(self) -> bool:
        """Whether no segment differs from its checksum and each has one."""
        return not self.changed and not self.unchecked

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "sound": self.sound}

    def line(self) -> str:
        """Return the report as one line."""
        if self.sound:
            return f"{self.id} {self.model}: sound, {self.checked} segment(s) checked"
        if self.changed:
            names = ", ".join(self.tensors[:5]) + (", ..." if len(self.tensors) > 5 else "")
            return (
                f"{self.id} {self.model}: CHANGED in segment(s)"
                f" {', '.join(map(str, self.changed))}: {names}"
            )
        return f"{self.id} {self.model}: {len(self.unchecked)} segment(s) without a checksum"


def check_resident(client: VaultClient, row: dict[str, Any]) -> Report:
    """Given a row of `stat`, compare each segment's bytes with its checksum.

    Raise WcacheError where the generation has gone meanwhile.
    """
    generation, fds = client.fetch(row["key"])
    try:
        with FdBag(fds) as bag:
            return compare(generation, bag)
    finally:
        client.release(generation.id)


def compare(generation: Generation, bag: FdBag) -> Report:
    """Given a generation and its segments' descriptors, return what differs."""
    segments = generation.segments
    due = [index for index, segment in enumerate(segments) if segment.checksum]
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        found = pool.map(lambda index: checksum(bag.fds[index], segments[index].size_bytes), due)
        changed = tuple(
            index
            for index, value in zip(due, found, strict=True)
            if value != segments[index].checksum
        )
    return Report(
        id=generation.id,
        model=generation.model,
        checked=len(due),
        changed=changed,
        tensors=tuple(item.name for item in generation.tensors if item.segment in changed),
        unchecked=tuple(sorted(set(range(len(segments))) - set(due))),
    )
