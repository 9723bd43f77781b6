# SPDX-License-Identifier: Apache-2.0
"""The generations that the vault holds: what is kept of each, which is nearest, which is obsolete.

Owns their descriptors. Who holds a generation, and what the fd store has, is the vault's business.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import MissError, malformed
from .generation import Generation, differences, is_superseded, read_description
from .protocol import FdBag
from .segments import check_description, check_segments
from .server import LentFds

_SHOWN = 200


@dataclass
class Resident:
    """What the vault keeps of a generation: its keys and size, and the descriptors."""

    key: dict[str, str]
    launch_key: dict[str, str]
    model: str
    size_bytes: int
    lent: LentFds  # the description, then the segments
    last_use: float


class Residents:
    """Owns the residents by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Resident] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._by_id))

    def __contains__(self, generation_id: str) -> bool:
        return generation_id in self._by_id

    def __getitem__(self, generation_id: str) -> Resident:
        return self._by_id[generation_id]

    def keep(self, generation: Generation, bag: FdBag, now: float) -> None:
        """Given a generation, its descriptors (ours from now on) and the time, make it visible, in
        place of one with the same key."""
        earlier = self._by_id.get(generation.id)
        self._by_id[generation.id] = Resident(
            key=generation.key,
            launch_key=generation.launch_key,
            model=generation.model,
            size_bytes=generation.size_bytes,
            lent=LentFds(bag.take()),
            last_use=now,
        )
        if earlier is not None:
            earlier.lent.give_up()

    def give_up(self, generation_id: str) -> Resident:
        """Close a generation's descriptors, once no transfer needs them; return what it was."""
        resident = self._by_id.pop(generation_id)
        resident.lent.give_up()
        return resident

    def close(self) -> None:
        """Give all of them up."""
        for generation_id in list(self._by_id):
            self.give_up(generation_id)

    def explain_miss(self, key: Mapping[str, str]) -> MissError:
        """Given a key that is not resident, say what differs from the nearest that is."""
        if not self._by_id:
            return MissError("wcache.absent", "no generation is resident", {})
        nearest = min(
            (differences(resident.key, key) for resident in self._by_id.values()), key=len
        )
        shown = {name: (old[:_SHOWN], new[:_SHOWN]) for name, (old, new) in nearest.items()}
        return MissError("wcache.key-mismatch", ", ".join(shown), shown)

    def find_superseded(self, generation: Generation) -> list[str]:
        """Given a generation that was just published, return the ids of those that are the same
        model in the same layout, of a checkpoint that has changed since.

        Other content is required: with equal weight files a difference in the configuration may be
        a choice too (`--hf-overrides`), and both are served from one checkpoint.
        """
        return [
            generation_id
            for generation_id in self
            if is_superseded(
                self._by_id[generation_id].key,
                generation.key,
                self._by_id[generation_id].model == generation.model,
            )
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return what `stat` tells of each, holders excepted."""
        return [
            {
                "id": generation_id,
                "model": resident.model,
                "key": resident.key,
                "launch_key": resident.launch_key,
                "bytes": resident.size_bytes,
                "segments": len(resident.lent.fds) - 1,
                "last_use": resident.last_use,
            }
            for generation_id, resident in sorted(self._by_id.items())
        ]


def read_generation(bag: FdBag) -> Generation:
    """Given a description and segments, return the generation; raise WcacheError unless sound."""
    if not bag.fds:
        raise malformed("no description")
    description, *segments = bag.fds
    check_description(description)
    generation = read_description(description)
    check_segments(generation, segments)
    return generation
