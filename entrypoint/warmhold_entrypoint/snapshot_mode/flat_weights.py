# SPDX-License-Identifier: Apache-2.0
"""Weights on their way between the vault and the flat files of snapshots, in either direction.

No weight loader is needed: segments are copied as they are. Those on a GPU are copied by a process
of its own (`gpu_weights`).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from warmhold_snapshot.artifact import Store
from warmhold_snapshot.checksum import Progress
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.flat import Flat, Weights
from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, encode_description
from warmhold_wcache.protocol import FdBag, decode

from ..gpus import gpu_weights

_CODE = gpu_weights.ABSENT


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


def write_flat(vault: Path, store: Store, weights: Weights) -> None:
    """Given the vault's socket, the store and what `open_weights` gave, bring that into its flat
    file, unless it is there. Raise SnapshotError `snapshot.disk`, or `snapshot.weights-absent`
    where a GPU's memory could not be read."""
    generation = read_generation(weights.description)
    if generation.backend != gpu_weights.BACKEND:
        store.flat.write(weights)
    elif not store.flat.holds(weights):
        gpu_weights.run(gpu_weights.WRITE, generation, store.folder, vault)


def publish_flat(
    store: Store, generation_id: str, vault: Path, progress: Progress | None = None
) -> int:
    """Given the store, the id of a generation and the vault's socket, publish it from its flat
    file, with every byte verified; return its bytes.

    Raise SnapshotError: `snapshot.weights-damaged`, the file is removed then,
    `snapshot.weights-absent`, or what `progress` raises.
    """
    try:
        with store.flat.open(generation_id) as file:
            generation = read_generation(file.header.description)
            if generation.backend == gpu_weights.BACKEND:
                gpu_weights.run(gpu_weights.PUBLISH, generation, store.folder, vault, progress)
            else:
                _publish_file(file, generation, vault, progress)
    except SnapshotError as error:
        if error.code == "snapshot.weights-damaged":
            store.flat.remove(generation_id)
        raise
    except (WcacheError, OSError) as error:
        detail = f"{generation_id} could not be published from its flat file: {error}"
        raise SnapshotError(_CODE, detail, "none: another mode loads them") from error
    return generation.size_bytes


def publish(generation: Generation, fds: Sequence[int], vault: Path) -> None:
    """Given a generation, its segments' descriptors and the vault's socket, let the vault have
    them, and hold no lease. Raise WcacheError."""
    with VaultClient(vault) as client:
        client.publish(generation, fds)
        client.release(generation.id)


def read_generation(description: bytes) -> Generation:
    """Given a description (JSON), return the generation; raise WcacheError for others."""
    return Generation.from_json(decode(bytes(description)))


def _publish_file(
    file: Flat, generation: Generation, vault: Path, progress: Progress | None
) -> None:
    with FdBag() as bag:
        for index, segment in enumerate(generation.segments):
            bag.add([segments.create(segment.size_bytes, f"weights-{index}")])
        file.copy(bag.fds, progress)
        publish(generation, bag.fds, vault)


def _describe(generation: Generation, fds: Collection[int]) -> Weights:
    # Where its publisher had it mapped means nothing to others, and would differ each time.
    moved = tuple(replace(segment, address=0) for segment in generation.segments)
    sizes = (segment.size_bytes for segment in moved)
    return Weights(
        generation.id,
        encode_description(replace(generation, segments=moved)),
        tuple(zip(fds, sizes, strict=True)),
    )
