# SPDX-License-Identifier: Apache-2.0
"""Memory that is given back to the kernel."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest
from warmhold_wcache import pages

PAGE = mmap.PAGESIZE


def resident_kib(address: int) -> int:
    """Of the mapping with this address, as the kernel counts it."""
    with Path("/proc/self/smaps").open() as lines:
        inside = False
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if "-" in head:
                begin, end = (int(text, 16) for text in head.split("-"))
                inside = begin <= address < end
            elif inside and head == "Rss:":
                return int(line.split()[1])
    raise AssertionError("no such mapping")


def test_whole_pages_are_forgotten_and_edges_stay() -> None:
    with mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE) as memory:
        memory.write(b"x" * (64 * PAGE))
        view = (ctypes.c_char * 0).from_buffer(memory)
        address = ctypes.addressof(view)
        before = resident_kib(address)
        assert pages.forget(address + 100, 62 * PAGE) == 61 * PAGE
        assert before - resident_kib(address) == 61 * PAGE >> 10
        assert memory[:PAGE] == b"x" * PAGE
        assert memory[PAGE : 62 * PAGE] == bytes(61 * PAGE)
        assert memory[62 * PAGE :] == b"x" * (2 * PAGE)
        memory[PAGE : 2 * PAGE] = b"y" * PAGE
        assert memory[PAGE : 2 * PAGE] == b"y" * PAGE
        del view


def test_many_pieces_by_a_thread_that_is_bound() -> None:
    size = 100 << 20
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE) as memory:
            memory[-1:] = b"x"
            view = (ctypes.c_char * 0).from_buffer(memory)
            address = ctypes.addressof(view)
            assert pages.forget(address, size) == size
            assert (resident_kib(address), memory[-1:]) == (0, bytes(1))
            del view
        assert os.sched_getaffinity(0) == {min(cpus)}
    finally:
        os.sched_setaffinity(0, cpus)


def test_less_than_a_page_is_left_alone() -> None:
    memory = ctypes.create_string_buffer(b"x" * 100, 100)
    assert pages.forget(ctypes.addressof(memory), 100) == 0
    assert memory.raw == b"x" * 100


def test_what_is_not_mapped() -> None:
    with pytest.raises(OSError, match="madvise"):
        pages.forget(PAGE, PAGE)


def test_trim_heap() -> None:
    blocks = [ctypes.create_string_buffer(1 << 16) for _ in range(100)]
    last = blocks[-1]
    del blocks
    pages.trim_heap()
    assert last.raw == bytes(1 << 16)
