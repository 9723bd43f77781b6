# SPDX-License-Identifier: Apache-2.0
"""The processes of an engine: who belongs to it, what they hold, and their certain end.

An engine is marked by a supplementary group that its launcher sets. Every descendant inherits it,
no process without CAP_SETGID can shed it, and /proc shows it even after a title was rewritten. So
members are found whatever their parent or session is. Where the mark cannot be set (no CAP_SETGID)
the descendants of the caller count instead.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from warmhold_snapshot import pids

ENGINE_GROUP = 30631
HOLDER_GROUP = 30632  # upstream's holder of weights: it outlives engines
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same PID by its start time (clock ticks)."""

    pid: int
    start_ticks: int
    parent: int
    name: str

    @property
    def age_s(self) -> float:
        """How long ago it started, in seconds, to a tick of the clock (a hundredth)."""
        started_s = self.start_ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def read_process(pid: int) -> Process | None:
    """Given a PID, return the process, or None where it has ended (a zombie has)."""
    stat = pids.read_stat(pid)
    if stat is None or stat.ended:
        return None
    return Process(pid, stat.start_ticks, stat.parent, stat.name)


def find_members(also_below: int | None = None, group: int | None = None) -> list[Process]:
    """Return every living process of an engine, or of another marking group; with a PID, its
    descendants too.

    Never the caller or one of its ancestors, whatever their marks: members get killed.
    """
    processes = read_all()
    mark = ENGINE_GROUP if group is None else group
    members = {pid for pid in processes if mark in _groups(pid)}
    if also_below is not None:
        members |= _descendants(also_below, processes)
    spared = os.getpid()
    while spared in processes:
        members.discard(spared)
        spared = processes[spared].parent
    return [processes[pid] for pid in sorted(members)]


def kill_members(
    also_below: int | None, timeout_s: float, group: int | None = None
) -> list[Process]:
    """Kill every member until none is left; return those that outlast `timeout_s` (none, mostly).

    Looks again after each round, since a dying tree may still fork. Reaping is the caller's.
    """
    deadline = time.monotonic() + timeout_s
    while members := find_members(also_below, group):
        for process in members:
            _kill(process, deadline)
        if time.monotonic() > deadline:
            return members
    return []


def kill_below(root: int, timeout_s: float) -> None:
    """Kill every descendant of a process, whatever its mark; give up after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for process in find_below(root):
        _kill(process, deadline)


def send_signal(process: Process, signum: int) -> bool:
    """Given a process, signal it if it still is the same one; tell whether it was."""
    return pids.send_signal(process.pid, process.start_ticks, signum)


def become_subreaper() -> None:
    """Let orphans of this process's tree become its children, so that it can find and reap them.

    Raise OSError where the kernel refuses. Source: linux/prctl.h.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap_adopted() -> None:
    """Reap every child that has ended: orphans that came to us (no child of ours may be left)."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _kill(process: Process, deadline: float) -> None:
    """Kill one process and wait until it has ended, within the deadline."""
    with suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            if send_signal(process, signal.SIGKILL):
                # A pidfd becomes readable when its process has ended, reaped or not.
                select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(fd)


def find_below(root: int) -> list[Process]:
    """Return every descendant of a process, whatever its mark."""
    processes = read_all()
    return [processes[pid] for pid in sorted(_descendants(root, processes))]


def read_all() -> dict[int, Process]:
    """Return every living process by its PID."""
    numbers = (int(entry.name) for entry in pids.PROC.iterdir() if entry.name.isdigit())
    return {process.pid: process for process in map(read_process, numbers) if process}


def _groups(pid: int) -> set[int]:
    try:
        status = (pids.PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return set()
    for line in status.splitlines():
        if line.startswith("Groups:"):
            return {int(group) for group in line.split()[1:]}
    return set()


def _descendants(root: int, processes: Mapping[int, Process]) -> set[int]:
    parents = {pid: process.parent for pid, process in processes.items()}
    return set(pids.find_below(root, parents))
