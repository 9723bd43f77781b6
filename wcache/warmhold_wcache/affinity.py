# SPDX-License-Identifier: Apache-2.0
"""Which CPUs the threads of this process may run on. CRIU restores a thread without that.

Source: sched_setaffinity(2); criu/cr-dump.c of CRIU 4.2, which saves policy and priority alone.
"""

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


def read_affinities() -> dict[int, Set[int]]:
    """Return the CPUs of each thread of this process, by its id."""
    found: dict[int, Set[int]] = {}
    for entry in _THREADS.iterdir():
        with suppress(OSError):  # it has ended
            found[int(entry.name)] = os.sched_getaffinity(int(entry.name))
    return found


def set_affinities(wanted: Mapping[int, Set[int]]) -> None:
    """Given what `read_affinities` returned, set it for the threads that are still there; one whose
    CPUs are not to be had here keeps those that it has."""
    present = read_affinities()
    for thread, cpus in wanted.items():
        if thread in present and present[thread] != cpus:
            with suppress(OSError):
                os.sched_setaffinity(thread, cpus)
