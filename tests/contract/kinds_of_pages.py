# SPDX-License-Identifier: Apache-2.0
"""Memory of every kind that criu has to bring back, page by page: zeros that were written, pages
that may not be read, pages of a file that were overwritten, pages that a child shares with its
parent.
"""

import ctypes
import hashlib
import mmap
import os
import tempfile

PAGE_BYTES = mmap.PAGESIZE
PAGES = 96  # of each kind; more than one block of criu's
ZERO = bytes(PAGE_BYTES)
_READABLE = mmap.PROT_READ | mmap.PROT_WRITE
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def make_inherited():
    """Return memory without zeros: a parent makes it, and `Pages` of its child overwrites it."""
    memory = mmap.mmap(-1, PAGES * PAGE_BYTES, _ANONYMOUS)
    memory[:] = b"\x55" * len(memory)
    return memory


class Pages:
    """The memory of one process."""

    def __init__(self, inherited):
        self.inherited = inherited
        inherited[: 8 * PAGE_BYTES] = 8 * ZERO
        inherited[9 * PAGE_BYTES : 10 * PAGE_BYTES] = os.urandom(PAGE_BYTES)
        self.mixed = mmap.mmap(-1, PAGES * PAGE_BYTES, _ANONYMOUS)
        for number in range(PAGES):
            page = ZERO if number % 3 else os.urandom(PAGE_BYTES)
            self.mixed[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = page
        self.mixed[-PAGE_BYTES:] = ZERO[:-1] + b"\x01"
        with tempfile.TemporaryFile() as file:
            file.write(b"\xff" * PAGES * PAGE_BYTES)
            file.flush()
            self.of_file = mmap.mmap(file.fileno(), PAGES * PAGE_BYTES, mmap.MAP_PRIVATE)
        self.of_file[PAGE_BYTES : 2 * PAGE_BYTES] = ZERO
        self.of_file[5 * PAGE_BYTES : 6 * PAGE_BYTES] = os.urandom(PAGE_BYTES)
        self.closed = mmap.mmap(-1, PAGES * PAGE_BYTES, _ANONYMOUS)
        self.closed[:] = os.urandom(len(self.closed))
        self.protect(0)

    def protect(self, protection):
        """Let the closed pages be read, or not."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.closed))
        if libc.mprotect(ctypes.c_void_p(address), len(self.closed), protection):
            raise OSError(ctypes.get_errno(), "mprotect")

    def digest(self):
        """One digest of all."""
        self.protect(_READABLE)
        every = (self.inherited, self.mixed, self.of_file, self.closed)
        found = hashlib.blake2b(b"".join(memory[:] for memory in every)).hexdigest()
        self.protect(0)
        return found
