# SPDX-License-Identifier: Apache-2.0
"""Weights on their way between the vault and the flat files of snapshots, in either direction.

No weight loader is needed: segments are copied as they are.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from warmhold_snapshot.checksum import Progress
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.flat import FlatFiles, Weights
from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, encode_description
from warmhold_wcache.protocol import FdBag, decode

_CODE = "snapshot.weights-absent"


@contextmanager
def open_weights(vault: Path, wanted: Collection[str]) -> Iterator[list[Weights]]:
    """Given the vault's socket and ids of generations, yield them with their descriptors, which are
    closed afterwards. This process holds leases until its end.

    Raise SnapshotError `snapshot.weights-absent` where the vault does not give all of them.
    """
    found = []
    with FdBag() as bag:
        try:
            with VaultClient(vault) as client:
                keys = {row["id"]: row["key"] for row in client.stat()} if wanted else {}
                if absent := set(wanted) - keys.keys():
                    detail = f"the vault does not hold {', '.join(sorted(absent))}"
                    raise SnapshotError(_CODE, detail, "restart the engine: it publishes them")
                for generation_id in sorted(wanted):
                    generation, fds = client.fetch(keys[generation_id])
                    bag.add(fds)
                    found.append(_describe(generation, fds))
        except WcacheError as error:
            raise SnapshotError(_CODE, f"{error.code}: {error.detail}", error.remedy) from error
        yield found


def publish_flat(
    flat: FlatFiles, generation_id: str, vault: Path, progress: Progress | None = None
) -> int:
    """Given the flat files, the id of a generation and the vault's socket, publish it from its
    file, with every byte verified; return its bytes.

    Raise SnapshotError: `snapshot.weights-damaged`, the file is removed then,
    `snapshot.weights-absent`, or what `progress` raises.
    """
    try:
        with flat.open(generation_id) as file, FdBag() as bag:
            generation = Generation.from_json(decode(bytes(file.header.description)))
            for index, segment in enumerate(generation.segments):
                bag.add([segments.create(segment.size_bytes, f"weights-{index}")])
            file.copy(bag.fds, progress)
            with VaultClient(vault) as client:
                client.publish(generation, bag.fds)
                client.release(generation.id)
    except SnapshotError as error:
        if error.code == "snapshot.weights-damaged":
            flat.remove(generation_id)
        raise
    except (WcacheError, OSError) as error:
        detail = f"{generation_id} could not be published from its flat file: {error}"
        raise SnapshotError(_CODE, detail, "none: another mode loads them") from error
    return generation.size_bytes


def _describe(generation: Generation, fds: Collection[int]) -> Weights:
    # Where its publisher had it mapped means nothing to others, and would differ each time.
    moved = tuple(replace(segment, address=0) for segment in generation.segments)
    sizes = (segment.size_bytes for segment in moved)
    return Weights(
        generation.id,
        encode_description(replace(generation, segments=moved)),
        tuple(zip(fds, sizes, strict=True)),
    )
