# SPDX-License-Identifier: Apache-2.0
"""The kernel's page cache, by file: dropped, filled, and asked what of a file has been read.

A file that is dropped before a start and has no page afterwards was not read by it, whoever says
otherwise: reads and mappings both leave pages behind.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_CHUNK_BYTES = 8 << 20


def drop(files: Iterable[Path]) -> None:
    """Given files, let the kernel forget their clean pages. Those that a process maps stay."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(files: Iterable[Path]) -> None:
    """Given files, read them whole."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass


def resident_bytes(files: Iterable[Path]) -> int:
    """Given files, return how many of their bytes the page cache holds, in whole pages. Raise
    OSError where the kernel does not say. Source: mincore(2)."""
    return sum(map(_resident_bytes, files))


def _resident_bytes(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    with path.open("rb") as file:
        # A mapping that nobody touches reads nothing.
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap", str(path))
    try:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        libc.munmap(address, size)
    return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE
