# SPDX-License-Identifier: Apache-2.0
"""Segments: real memfds, real seals, real mappings at fixed addresses."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vault_process import SIZE, close_all, make_generation, open_fds
from warmhold_wcache import segments
from warmhold_wcache.errors import WcacheError


@pytest.fixture
def fd() -> Iterator[int]:
    made = segments.create(SIZE, "test")
    yield made
    os.close(made)


def content(address: int, size: int = SIZE) -> bytes:
    return ctypes.string_at(address, size)


def protection(address: int) -> str:
    """How the kernel has mapped an address: `r--s` and the like, `----` where nothing is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        first, _, last = span.partition("-")
        if int(first, 16) <= address < int(last, 16):
            return rights
    return "none"


def test_bytes_written_here_are_read_there(fd: int) -> None:
    writable = segments.map_writable(fd, SIZE)
    ctypes.memmove(writable, b"x" * SIZE, SIZE)
    read_only = segments.map_read_only(fd, SIZE)
    assert content(read_only) == b"x" * SIZE
    assert (protection(writable), protection(read_only)) == ("rw-s", "r--s")
    segments.unmap(writable, SIZE)
    segments.unmap(read_only, SIZE)


def test_a_sealed_segment_neither_changes_size_nor_gets_new_writers(fd: int) -> None:
    writable = segments.map_writable(fd, SIZE)
    segments.seal(fd)
    segments.seal(fd)  # again is fine
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError) as caught:
        segments.map_writable(fd, SIZE)
    assert caught.value.errno == errno.EPERM
    # The publisher's own mapping stays as it is, and everyone sees what it writes.
    ctypes.memmove(writable, b"late", 4)
    read_only = segments.map_read_only(fd, SIZE)
    assert content(read_only, 4) == b"late"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(read_only, SIZE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    segments.unmap(writable, SIZE)
    segments.unmap(read_only, SIZE)


def test_a_segment_comes_back_at_its_address(fd: int) -> None:
    os.pwrite(fd, b"weights", 0)
    address = segments.reserve(2 * SIZE)
    assert protection(address) == "---p"
    assert segments.map_read_only(fd, SIZE, address) == address
    assert content(address, 7) == b"weights"
    segments.unmap_keep_address(address, SIZE)
    assert protection(address) == protection(address + SIZE) == "---p"
    assert segments.map_writable(fd, SIZE, address) == address
    assert content(address, 7) == b"weights"
    assert protection(address) == "rw-s"
    segments.unmap(address, 2 * SIZE)


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="mmap"):
        segments.map_read_only(-1, SIZE)
    with pytest.raises(OSError, match="munmap"):
        segments.unmap(1, SIZE)


def test_a_checksum_sees_one_bit(fd: int) -> None:
    os.ftruncate(fd, 40 << 20)
    before = segments.checksum(fd, 40 << 20)
    assert len(before) == 32
    assert segments.checksum(fd, 40 << 20) == before
    os.pwrite(fd, b"\x01", 33 << 20)
    assert segments.checksum(fd, 40 << 20) != before


def test_sealed_content_is_final() -> None:
    fd = segments.create_sealed(b"description", "d")
    segments.check_description(fd)
    assert os.pread(fd, 100, 0) == b"description"
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def unsealed() -> int:
    return segments.create(SIZE, "unsealed")


def other_size() -> int:
    fd = segments.create(SIZE + 1, "long")
    segments.seal(fd)
    return fd


def half_sealed() -> int:
    import fcntl

    fd = segments.create(SIZE, "half")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def unsealable() -> int:
    fd = os.memfd_create("unsealable")
    os.ftruncate(fd, SIZE)
    return fd


def pipe_end() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def in_shm() -> int:
    path = f"/dev/shm/warmhold_test_{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)  # noqa: PTH108
    os.ftruncate(fd, SIZE)
    return fd


def device() -> int:
    return os.open("/dev/zero", os.O_RDWR)


def folder() -> int:
    return os.open("/proc/self", os.O_RDONLY)


def itself() -> int:
    return os.pidfd_open(os.getpid())


HOSTILE: list[Callable[[], int]] = [
    *(unsealed, other_size, half_sealed, unsealable, pipe_end, in_shm, device, folder, itself)
]


@pytest.mark.parametrize("make", HOSTILE)
def test_what_is_no_sealed_segment_is_refused(make: Callable[[], int]) -> None:
    before = open_fds()
    generation, fds = make_generation()
    for fd in fds:
        segments.seal(fd)
    segments.check_segments(generation, fds)
    hostile = make()
    with pytest.raises(WcacheError, match=r"wcache\.refused"):
        segments.check_segments(generation, [fds[0], hostile, fds[2]])
    with pytest.raises(WcacheError, match=r"wcache\.refused"):
        segments.check_description(hostile)
    close_all([*fds, hostile])
    assert open_fds() == before


def test_count_and_twins_are_checked() -> None:
    generation, fds = make_generation()
    for fd in fds:
        segments.seal(fd)
    for wrong in (fds[:2], [*fds, fds[0]], [fds[0], fds[0], fds[1]]):
        with pytest.raises(WcacheError, match=r"wcache\.refused"):
            segments.check_segments(generation, wrong)
    close_all(fds)


@pytest.mark.parametrize("make", HOSTILE)
def test_what_is_not_the_nvidia_drivers_is_refused(
    make: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, memfds = make_generation(backend="cuda-vmm")
    hostile = make()
    fds = [os.open("/dev/null", os.O_RDWR) for _ in memfds]
    for given in (fds, memfds, [hostile] * 3):
        with pytest.raises(WcacheError, match="segment 0 is not the NVIDIA driver's"):
            segments.check_segments(generation, given)
    monkeypatch.setattr(segments, "NVIDIA_MAJOR", os.major(Path("/dev/null").stat().st_rdev))
    segments.check_segments(generation, fds)
    if make is not device:  # which is one of that driver's now
        with pytest.raises(WcacheError, match="segment 1 is not the NVIDIA driver's"):
            segments.check_segments(generation, [fds[0], hostile, fds[2]])
    close_all([*fds, *memfds, hostile])
