# SPDX-License-Identifier: Apache-2.0
"""Gives memory back to the kernel that nobody needs as it is: it then costs no room in a snapshot.

Source: madvise(2), malloc_trim(3).
"""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

_PIECE_BYTES = 32 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def forget(address: int, size_bytes: int) -> int:
    """Given memory of this process, give its whole pages back; return their bytes. Anonymous memory
    reads as zeros then, and takes pages anew where it is written. Raise OSError."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    pieces = range(begin, end, _PIECE_BYTES)
    if pieces:
        # The kernel frees page by page: 1 GiB takes one thread 0.1 s and more.
        count = min(len(pieces), os.cpu_count() or 1)
        with ThreadPoolExecutor(count, "forget", _run_anywhere) as pool:
            list(pool.map(lambda at: _give_back(at, min(_PIECE_BYTES, end - at)), pieces))
    return max(0, end - begin)


def _run_anywhere() -> None:
    """The thread that asks may be bound to one CPU, which those that it starts inherit."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _give_back(address: int, size_bytes: int) -> None:
    if _libc.madvise(address, size_bytes, mmap.MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"madvise of {size_bytes} bytes: {os.strerror(code)}")


def trim_heap() -> None:
    """Give back what the C library keeps of freed blocks below 32 MiB; nothing where the C library
    has no such call."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
