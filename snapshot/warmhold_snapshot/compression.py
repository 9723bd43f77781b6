# SPDX-License-Identifier: Apache-2.0
"""Memory images at rest in LZ4, and as criu reads them: in pieces, by several threads.

`pages-1.img` becomes `pages-1.img.lz4`: for each MiB a head (bytes stored, bytes of memory), then
one LZ4 block. Checksums are of what lies on the disk, and come before anything is expanded. What is
expanded lies in a folder of its own beside the artifact, which stays as it is; a folder that a
killed restore left is swept as drafts are. The library is Debian's liblz4.
Source: lz4.h (LZ4_compress_default, LZ4_decompress_safe).
"""

import ctypes
import os
import secrets
import shutil
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .checksum import Progress
from .errors import SnapshotError
from .folder import ALONE, locked

SUFFIX = ".lz4"
_LIBRARY = "liblz4.so.1"
_PIECE_BYTES = 1 << 20
_AT_ONCE = 64  # pieces in this process's memory
_HEAD = struct.Struct("<II")
_REMEDY = "see `snapshot check`, or make one with WARMHOLD_SNAPSHOT_COMPRESS=false"
_buffers = threading.local()


class _Piece(NamedTuple):
    """A block: where it begins and its size in the stored file, its place and size in memory's."""

    start: int
    stored: int
    target: int
    size: int


def compress(images: Path) -> None:
    """Given the image folder, put every file of pages there into LZ4, one after the other. Raise
    SnapshotError `snapshot.disk` where there is no room."""
    try:
        _compress_all(images)
    except OSError as error:
        raise SnapshotError("snapshot.disk", f"memory is not in LZ4: {error}", _REMEDY) from error


def is_compressed(images: Path) -> bool:
    """Given the image folder, tell whether it has to be expanded for criu."""
    return any(images.glob(f"pages-*.img{SUFFIX}"))


@contextmanager
def expanded(
    images: Path, parent: Path, prefix: str, progress: Progress | None = None
) -> Iterator[tuple[Path, int]]:
    """Given the image folder, make a folder in `parent`, with a name that begins with the prefix,
    where criu finds every image as it wrote it; yield it and a descriptor that keeps it from being
    swept. It is gone afterwards. Raise SnapshotError `snapshot.disk` where there is no room,
    `snapshot.damaged` where what is stored is not LZ4, and what `progress` raises."""
    folder = parent / f"{prefix}{secrets.token_hex(4)}"
    try:
        _make(folder)
        with locked(folder, ALONE, "it is being expanded") as lock_fd:
            _fill(images, folder, progress)
            yield folder, lock_fd
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compress_all(images: Path) -> None:
    lz4 = _load()
    for path in sorted(images.glob("pages-*.img")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        out = os.open(path.with_name(path.name + SUFFIX), flags, 0o600)
        with os.fdopen(out, "wb") as stored, path.open("rb") as source, _pool() as pool:
            starts = range(0, path.stat().st_size, _PIECE_BYTES)
            compress_at = partial(_compress, lz4, source.fileno())
            for first in range(0, len(starts), _AT_ONCE):
                stored.writelines(pool.map(compress_at, starts[first : first + _AT_ONCE]))
        path.unlink()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        detail = f"{folder} cannot be made: {error.strerror}"
        raise SnapshotError("snapshot.disk", detail, _REMEDY) from error


def _fill(images: Path, folder: Path, progress: Progress | None) -> None:
    try:
        for path in images.iterdir():
            if path.suffix != SUFFIX:
                (folder / path.name).symlink_to(path.resolve())
        _expand(sorted(images.glob(f"pages-*.img{SUFFIX}")), folder, progress)
    except OSError as error:
        detail = f"the images cannot be expanded in {folder}: {error}"
        raise SnapshotError("snapshot.disk", detail, _REMEDY) from error


def _expand(paths: list[Path], folder: Path, progress: Progress | None) -> None:
    lz4 = _load()
    total, before = sum(path.stat().st_size for path in paths), 0
    with _pool() as pool:
        for path in paths:
            source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            target = os.open(folder / path.name.removesuffix(SUFFIX), flags, 0o600)
            try:
                pieces = _read_pieces(source, path)
                expand = partial(_restore, lz4, source, target)
                # No name for what map returns: with it the pieces that are left go.
                for piece, is_right in zip(pieces, pool.map(expand, pieces), strict=True):
                    if not is_right:
                        raise _damaged(path)
                    if progress is not None:
                        progress(before + piece.start + piece.stored, total)
                before += os.fstat(source).st_size
            finally:
                os.close(target)
                os.close(source)


def _read_pieces(source: int, path: Path) -> list[_Piece]:
    size, at, target = os.fstat(source).st_size, 0, 0
    pieces = []
    while at < size:
        head = os.pread(source, _HEAD.size, at)
        if len(head) < _HEAD.size:
            raise _damaged(path)
        stored, expands = _HEAD.unpack(head)
        at += _HEAD.size
        if not 0 < expands <= _PIECE_BYTES or not 0 < stored <= min(_bound(expands), size - at):
            raise _damaged(path)
        pieces.append(_Piece(at, stored, target, expands))
        at, target = at + stored, target + expands
    return pieces


def _compress(lz4: ctypes.CDLL, source: int, start: int) -> bytes:
    block = os.pread(source, _PIECE_BYTES, start)
    _, out = _scratch()
    size = lz4.LZ4_compress_default(block, out, len(block), len(out))
    return _HEAD.pack(size, len(block)) + bytes(memoryview(out)[:size])


def _restore(lz4: ctypes.CDLL, source: int, target: int, piece: _Piece) -> bool:
    """Expand one piece to its place; tell whether it was what its head says."""
    plain, stored = _scratch()
    if os.preadv(source, [memoryview(stored)[: piece.stored]], piece.start) != piece.stored:
        return False
    if lz4.LZ4_decompress_safe(stored, plain, piece.stored, piece.size) != piece.size:
        return False
    view, at = memoryview(plain)[: piece.size], piece.target
    while view:
        written = os.pwrite(target, view, at)
        view, at = view[written:], at + written
    return True


def _scratch() -> tuple["ctypes.Array[ctypes.c_char]", "ctypes.Array[ctypes.c_char]"]:
    """This thread's two buffers, for a piece and for a stored one."""
    if not hasattr(_buffers, "pair"):
        sizes = (_PIECE_BYTES, _bound(_PIECE_BYTES))
        _buffers.pair = tuple(ctypes.create_string_buffer(size) for size in sizes)
    pair: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]] = _buffers.pair
    return pair


def _bound(size: int) -> int:
    """The most bytes that a block of that size is stored in. Source: lz4.h (LZ4_COMPRESSBOUND)."""
    return size + size // 255 + 16


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "lz4")


def _load() -> ctypes.CDLL:
    lz4 = ctypes.CDLL(_LIBRARY)
    for function in (lz4.LZ4_compress_default, lz4.LZ4_decompress_safe):
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return lz4


def _damaged(path: Path) -> SnapshotError:
    detail = f"{path.name} cannot be expanded: it is not what was stored"
    return SnapshotError("snapshot.damaged", detail, "create a new snapshot")
