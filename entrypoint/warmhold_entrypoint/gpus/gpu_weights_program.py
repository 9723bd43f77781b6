# SPDX-License-Identifier: Apache-2.0
"""The process that copies a GPU's weights between the vault and a flat file; without torch.

    python -m warmhold_entrypoint.gpus.gpu_weights_program write|publish FOLDER GENERATION VAULT

The GPU is the one that the environment shows. Bytes pass through a block of 1 MiB per thread. It
ends as soon as its stdin does; at its end one line of JSON says how it went.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache.cuda_segments import CudaSegments
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.protocol import FdBag

from ..snapshot_mode.flat_weights import open_weights, publish, read_generation
from .gpu_weights import ABSENT, PUBLISH, WRITE


@dataclass(frozen=True)
class Mapped:
    """A segment's bytes, mapped at an address."""

    memory: CudaSegments
    address: int

    def read(self, block: memoryview, start: int) -> None:
        """Fill the block from that offset on."""
        self.memory.read(self.address + start, block)

    def write(self, block: memoryview, start: int) -> None:
        """Put the block at that offset."""
        self.memory.write(self.address + start, block)


def write_file(store: Store, generation_id: str, vault: Path) -> None:
    """Given the store, an id and the vault's socket, bring what the vault holds into a flat file.
    Raise SnapshotError and WcacheError."""
    with open_weights(vault, {generation_id}) as (weights,):
        memory, places = CudaSegments(0), []
        for fd, size in weights.segments:
            assert isinstance(fd, int)
            places.append((Mapped(memory, memory.map(fd, size)), size))
        store.flat.write(replace(weights, segments=tuple(places)))


def publish_file(store: Store, generation_id: str, vault: Path) -> None:
    """Given the store, an id and the vault's socket, bring a flat file into new memory of the GPU,
    with every byte verified, and publish that: its descriptors keep it. Raise SnapshotError,
    WcacheError and OSError."""
    with store.flat.open(generation_id) as file, FdBag() as bag:
        generation = read_generation(file.header.description)
        memory, places = CudaSegments(0), []
        with ExitStack() as mapped:
            for segment in generation.segments:
                fd, address = memory.allocate(segment.size_bytes)
                bag.add([fd])
                mapped.callback(memory.unmap, address, segment.size_bytes)
                places.append(Mapped(memory, address))
            file.copy(places)
        # Unmapped, and so the last byte has arrived.
        publish(generation, bag.fds, vault)


def answer(act: str, folder: str, generation_id: str, vault: str) -> Mapping[str, Any]:
    """Given the arguments, do it; return how it went."""
    acts = {WRITE: write_file, PUBLISH: publish_file}
    try:
        acts[act](Store(Path(folder)), generation_id, Path(vault))
    except SnapshotError as error:
        return {"ok": False, **error.to_json()}
    except (WcacheError, OSError) as error:
        detail = f"{generation_id} between GPU and flat file: {error}"
        return {"ok": False, "code": ABSENT, "detail": detail, "remedy": "see dmesg"}
    return {"ok": True}


def main() -> NoReturn:
    """Do what the arguments ask."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    result = answer(*sys.argv[1:])
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(0 if result["ok"] else 1)


def _end_with_stdin() -> None:
    """Whoever started this has the other end, and loses it by ending."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
