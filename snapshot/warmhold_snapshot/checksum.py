# SPDX-License-Identifier: Apache-2.0
"""Checksums at the speed of memory, of bytes that may be copied on the way: in pieces, by several
threads.

A checksum is the BLAKE3 of the pieces' BLAKE3s. The blake3 package comes with vLLM and lets other
threads run while it works; it is imported only where bytes are read.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

PIECE_BYTES = 16 << 20
# A piece is read in blocks that stay in a core's cache until they are hashed.
_BLOCK_BYTES = 1 << 20
# More of them wait for each other: 32 took twice as long as 16.
_MOST_THREADS = 16
# Open at a time. A tree of a machine with many cores has an image for each of thousands of threads,
# and a container may open 1024 files.
_MOST_FILES = 128

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Memory(Protocol):
    """Bytes that no descriptor leads to, as a GPU's; several threads ask at once. Offsets in bytes;
    as many as the block has are copied. What is raised ends the work."""

    def read(self, block: memoryview, start: int) -> None:
        """Fill the block with what is there."""

    def write(self, block: memoryview, start: int) -> None:
        """Put the block there."""


Place = int | Memory  # a descriptor, or memory


class Part(NamedTuple):
    """Bytes of an open file or of memory, and the place and offset that they are copied to (-1:
    nowhere). Offsets and size in bytes."""

    source: Place
    start: int
    size: int
    target: Place = -1
    target_start: int = 0


def compute_checksums(
    folder: Path,
    names: Iterable[str],
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, tuple[int, str]]:
    """Given a folder and names of files in it, return size and checksum of each by name.

    Links are not followed. Raise OSError where one cannot be read or got shorter meanwhile.
    `progress` is called from one thread only.
    """
    listed = list(names)
    total = sum((folder / name).lstat().st_size for name in listed) if progress else 0
    found: dict[str, tuple[int, str]] = {}
    for first in range(0, len(listed), _MOST_FILES):
        before = sum(size for size, _ in found.values())
        told = partial(_tell, progress, before, total) if progress else None
        found |= _compute_some(folder, listed[first : first + _MOST_FILES], threads, told)
    return found


def _tell(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _compute_some(
    folder: Path, names: Sequence[str], threads: int | None, progress: Progress | None
) -> dict[str, tuple[int, str]]:
    handles: dict[str, int] = {}
    try:
        for name in names:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            handles[name] = os.open(folder / name, flags)
        sizes = {name: os.fstat(handle).st_size for name, handle in handles.items()}
        parts = [Part(handles[name], 0, size) for name, size in sizes.items()]
        checksums = checksum_parts(parts, threads, progress)
    finally:
        for handle in handles.values():
            os.close(handle)
    return dict(zip(sizes, zip(sizes.values(), checksums, strict=True), strict=True))


def checksum_parts(
    parts: Sequence[Part], threads: int | None = None, progress: Progress | None = None
) -> list[str]:
    """Given parts, copy those that have a target, and return the checksum of each.

    Raise OSError where one cannot be read or written, or is shorter. `progress` is called from one
    thread only; what it raises ends the work.
    """
    pieces = [
        Part(
            part.source,
            part.start + at,
            min(PIECE_BYTES, part.size - at),
            part.target,
            part.target_start + at,
        )
        for part in parts
        for at in range(0, part.size, PIECE_BYTES)
    ]
    total, done = sum(part.size for part in parts), 0
    digests: list[bytes] = []
    with ThreadPoolExecutor(threads or _count_threads(), "checksum") as pool:
        for piece, digest in zip(pieces, pool.map(_hash_piece, pieces), strict=True):
            digests.append(digest)
            done += piece.size
            if progress is not None:
                progress(done, total)
    return [_combine(part.size, digests) for part in parts]


def _count_threads() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def _combine(size: int, digests: list[bytes]) -> str:
    """Take a part's digests off the front of the list."""
    from blake3 import blake3

    count = -(-size // PIECE_BYTES)
    own, digests[:] = digests[:count], digests[count:]
    return str(blake3(b"".join(own)).hexdigest())


def _hash_piece(piece: Part) -> bytes:
    from blake3 import blake3

    hasher = blake3()
    block = memoryview(bytearray(min(_BLOCK_BYTES, piece.size)))
    at = 0
    while at < piece.size:
        count = _read(piece.source, block[: piece.size - at], piece.start + at)
        if count == 0:
            raise OSError(f"{piece.size - at} bytes are missing at {piece.start + at}")
        hasher.update(block[:count])
        if piece.target != -1:
            _write(piece.target, block[:count], piece.target_start + at)
        at += count
    return bytes(hasher.digest())


def _read(source: Place, block: memoryview, start: int) -> int:
    if not isinstance(source, int):
        source.read(block, start)
        return len(block)
    # Read, not mapped: a file that is cut while it is mapped kills the process with SIGBUS.
    return os.preadv(source, [block], start)


def _write(target: Place, block: memoryview, start: int) -> None:
    if not isinstance(target, int):
        target.write(block, start)
        return
    written = 0
    while written < len(block):
        written += os.pwrite(target, block[written:], start + written)
