# SPDX-License-Identifier: Apache-2.0
"""Segments on a CPU: memfds, their seals, their mappings; and the check of foreign descriptors.

A sealed segment cannot shrink, grow or be mapped writable anew; writable mappings that existed
before stay. Mappings are made through the C library, because a segment has to come back at the
address where an engine once had it. Sources: linux/fcntl.h, asm-generic/mman.h.
"""

import ctypes
import fcntl
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Sequence

from .errors import WcacheError
from .generation import Generation

_F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_WRITE, _F_SEAL_FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10
SEALS = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_FINAL_SEALS = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_WRITE
_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_CHUNK_BYTES = 16 << 20
NVIDIA_MAJOR = 195  # Documentation/admin-guide/devices.txt; /dev/nvidiactl is 195:255

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def create(size_bytes: int, name: str) -> int:
    """Given a size and a name (for people), return a new memfd that can be sealed."""
    fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_sealed(content: bytes, name: str) -> int:
    """Given content, return a memfd of it that nobody can change any more."""
    fd = create(len(content), name)
    try:
        view = memoryview(content)
        while view:
            view = view[os.pwrite(fd, view, len(content) - len(view)) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FINAL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Given a memfd, forbid that it shrinks, grows or gets new writable mappings."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def reserve(size_bytes: int) -> int:
    """Return the address of a reserved range of that size in which nothing is mapped."""
    return _map(None, size_bytes, _PROT_NONE, _anonymous(), -1)


def map_writable(fd: int, size_bytes: int, address: int | None = None) -> int:
    """Map a segment that is not sealed yet, shared; return its address.

    With an address it is put exactly there, over whatever is there (the caller reserved it).
    """
    return _map(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)


def map_read_only(fd: int, size_bytes: int, address: int | None = None) -> int:
    """Map a segment shared and read-only; return its address. The address is as in map_writable."""
    return _map(address, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd)


def unmap_keep_address(address: int, size_bytes: int) -> None:
    """Unmap a segment and keep its range reserved, so that it can come back there."""
    _map(address, size_bytes, _PROT_NONE, _anonymous(), -1)


def unmap(address: int, size_bytes: int) -> None:
    """Give a range back."""
    if _libc.munmap(address, size_bytes) != 0:
        raise OSError(ctypes.get_errno(), "munmap")


def checksum(fd: int, size_bytes: int) -> str:
    """Given a segment, return the checksum of its bytes (BLAKE2b, 128 bits, hexadecimal)."""
    digest = hashlib.blake2b(digest_size=16)
    with (
        mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
    ):
        for start in range(0, size_bytes, _CHUNK_BYTES):
            digest.update(view[start : start + _CHUNK_BYTES])
    return digest.hexdigest()


def check_description(fd: int) -> None:
    """Given a descriptor, raise WcacheError unless it is a memfd that nobody can change."""
    if _read_seals(fd) & _FINAL_SEALS != _FINAL_SEALS:
        raise _refused("the description is not a sealed memfd")


def check_segments(generation: Generation, fds: Sequence[int]) -> None:
    """Given a generation and descriptors, raise WcacheError unless they can be its segments."""
    if len(fds) != len(generation.segments):
        raise _refused(f"{len(fds)} descriptors for {len(generation.segments)} segments")
    check = _CHECKS[generation.backend]
    seen = set()
    for index, (fd, segment) in enumerate(zip(fds, generation.segments, strict=True)):
        seen.add(check(index, fd, segment.size_bytes))
    if len(seen) != len(fds):
        raise _refused("two segments share one allocation")


def _check_memfd(index: int, fd: int, size_bytes: int) -> object:
    # The seals come first: asking them of a foreign file system's file does not touch that system.
    if _read_seals(fd) & SEALS != SEALS:
        raise _refused(f"segment {index} is not a sealed memfd")
    status = os.fstat(fd)
    if status.st_size != size_bytes:
        raise _refused(f"segment {index} has {status.st_size} bytes instead of {size_bytes}")
    return status.st_dev, status.st_ino


def _check_cuda(index: int, fd: int, size_bytes: int) -> object:
    # The driver's device file, to which it has tied an allocation. What that is, and its size, only
    # a process with CUDA can ask: who maps it does, and takes a failure for a miss.
    status = os.fstat(fd)
    if not stat.S_ISCHR(status.st_mode) or os.major(status.st_rdev) != NVIDIA_MAJOR:
        raise _refused(f"segment {index} is not the NVIDIA driver's")
    return fd


# A backend's check takes index, descriptor and size, and returns what tells allocations apart.
_CHECKS: dict[str, Callable[[int, int, int], object]] = {
    "memfd": _check_memfd,
    "cuda-vmm": _check_cuda,
}


def _read_seals(fd: int) -> int:
    """The seals of a memfd; none for what is no memfd."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def _refused(detail: str) -> WcacheError:
    return WcacheError(
        "wcache.refused",
        detail,
        "publish sealed memfds of the described sizes, or what CUDA exports",
    )


def _anonymous() -> int:
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    if address is not None:
        flags |= _MAP_FIXED
    mapped: int | None = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size_bytes} bytes: {os.strerror(code)}")
    return mapped
