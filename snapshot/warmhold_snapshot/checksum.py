# SPDX-License-Identifier: Apache-2.0
"""Checksums of image files at the speed of memory: all files in pieces, several threads.

A file's checksum is the BLAKE3 of its pieces' BLAKE3s. The blake3 package comes with vLLM and lets
other threads run while it works; it is imported only where bytes are read.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 16 << 20
# A piece is read in blocks that stay in a core's cache until they are hashed.
_BLOCK_BYTES = 1 << 20

Progress = Callable[[int, int], None]  # bytes done, bytes in all


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
    handles: dict[str, int] = {}
    try:
        for name in names:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            handles[name] = os.open(folder / name, flags)
        sizes = {name: os.fstat(handle).st_size for name, handle in handles.items()}
        pieces = [
            (handles[name], start, min(PIECE_BYTES, size - start))
            for name, size in sizes.items()
            for start in range(0, size, PIECE_BYTES)
        ]
        total, done = sum(sizes.values()), 0
        digests: list[bytes] = []
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), "checksum") as pool:
            for piece, digest in zip(pieces, pool.map(_hash_piece, pieces), strict=True):
                digests.append(digest)
                done += piece[2]
                if progress is not None:
                    progress(done, total)
    finally:
        for handle in handles.values():
            os.close(handle)
    return {name: (size, _combine(size, digests)) for name, size in sizes.items()}


def _combine(size: int, digests: list[bytes]) -> str:
    """Take the file's digests off the front of the list."""
    from blake3 import blake3

    count = -(-size // PIECE_BYTES)
    own, digests[:] = digests[:count], digests[count:]
    return str(blake3(b"".join(own)).hexdigest())


def _hash_piece(piece: tuple[int, int, int]) -> bytes:
    from blake3 import blake3

    handle, position, left = piece
    hasher = blake3()
    block = memoryview(bytearray(min(_BLOCK_BYTES, left)))
    while left > 0:
        # Read, not mapped: a file that is cut while it is mapped kills the process with SIGBUS.
        count = os.preadv(handle, [block[:left]], position)
        if count == 0:
            raise OSError(f"{left} bytes are missing at {position}")
        hasher.update(block[:count])
        position += count
        left -= count
    return bytes(hasher.digest())
