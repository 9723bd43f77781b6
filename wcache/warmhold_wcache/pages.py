# SPDX-License-Identifier: Apache-2.0
"""Gives memory back to the kernel that nobody needs as it is: it then costs no room in a snapshot.

Source: madvise(2), malloc_trim(3).
"""

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def forget(address: int, size_bytes: int) -> int:
    """Given memory of this process, give its whole pages back; return their bytes. Anonymous memory
    reads as zeros then, and takes pages anew where it is written. Raise OSError."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return 0
    if _libc.madvise(begin, end - begin, mmap.MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"madvise of {end - begin} bytes: {os.strerror(code)}")
    return end - begin


def trim_heap() -> None:
    """Give back what the C library keeps of freed blocks below 32 MiB; nothing where the C library
    has no such call."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
