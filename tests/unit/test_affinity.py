# SPDX-License-Identifier: Apache-2.0
"""Threads that CRIU let run everywhere run again where they ran."""

import os
import threading
from collections.abc import Iterator

import pytest
from warmhold_wcache import affinity


@pytest.fixture
def thread() -> Iterator[int]:
    """The id of a thread that does nothing."""
    end, ids = threading.Event(), []
    started = threading.Event()

    def idle() -> None:
        ids.append(threading.get_native_id())
        started.set()
        end.wait(60)

    other = threading.Thread(target=idle)
    other.start()
    started.wait(60)
    yield ids[0]
    end.set()
    other.join()


def test_each_thread_gets_its_own_back(thread: int) -> None:
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(thread, {min(everywhere)})
    found = affinity.read_affinities()
    assert (found[thread], found[os.getpid()]) == ({min(everywhere)}, everywhere)
    os.sched_setaffinity(thread, everywhere)
    affinity.set_affinities(found)
    assert affinity.read_affinities() == found


def test_what_cannot_be_had_is_left(thread: int) -> None:
    before = affinity.read_affinities()
    gone = max(before) + 100_000
    affinity.set_affinities({thread: {1023}, gone: {0}})
    assert affinity.read_affinities() == before
