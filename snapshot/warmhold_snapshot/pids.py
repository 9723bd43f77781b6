# SPDX-License-Identifier: Apache-2.0
"""Process and thread ids: which a tree has, which are taken, and how new ones come out high.

A restore gives every process and thread its old number back, so that each must be free. Short-lived
processes of a new container use up the low numbers; an engine that starts above them meets none.
"""

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import SnapshotError

PROC = Path("/proc")
_POLL_S = 0.01


@dataclass(frozen=True)
class Process:
    """A process: its place in the tree, its threads, and its start (clock ticks since boot)."""

    pid: int
    parent: int
    group: int
    session: int
    name: str
    start_ticks: int
    threads: tuple[int, ...]

    def ids(self) -> set[int]:
        """All numbers that a restore needs for it."""
        return {self.pid, self.group, self.session, *self.threads} - {0}


class Stat(NamedTuple):
    """What /proc/PID/stat says of a process; `start_ticks` are clock ticks since boot."""

    name: str
    parent: int
    group: int
    session: int
    start_ticks: int
    ended: bool  # a zombie: it still has its id


def read_stat(pid: int, proc: Path = PROC) -> Stat | None:
    """Given a PID, return what the kernel says of it, or None where there is no such process.
    Source: proc(5)."""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    parent, group, session = (int(field) for field in fields[1:4])
    return Stat(name, parent, group, session, int(fields[19]), fields[0] in "ZX")


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    """Given a PID, return the process, or None where it has ended; a zombie still has its id."""
    stat = read_stat(pid, proc)
    try:
        threads = tuple(sorted(int(entry.name) for entry in (proc / str(pid) / "task").iterdir()))
    except OSError:
        return None
    if stat is None:
        return None
    return Process(pid, stat.parent, stat.group, stat.session, stat.name, stat.start_ticks, threads)


def read_all(proc: Path = PROC) -> list[Process]:
    """Return every process that can be seen."""
    found = (read_process(int(e.name), proc) for e in proc.iterdir() if e.name.isdigit())
    return [process for process in found if process is not None]


def read_tree(root_pid: int, proc: Path = PROC) -> tuple[Process, ...]:
    """Given a root, return it and all its descendants, the root first; raise SnapshotError
    `snapshot.no-process` where there is none."""
    processes = {process.pid: process for process in read_all(proc)}
    if root_pid not in processes:
        remedy = "see `warmhold status`: the engine may be starting or stopped"
        raise SnapshotError("snapshot.no-process", f"no process {root_pid}", remedy)
    below = find_below(root_pid, {pid: process.parent for pid, process in processes.items()})
    return tuple(processes[pid] for pid in (root_pid, *below))


def find_below(root_pid: int, parents: Mapping[int, int]) -> list[int]:
    """Given a root and each process's parent, return the root's descendants, every one of them
    after its parent. They were read one by one: where a number was given out anew meanwhile,
    parents may form a ring."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root_pid]
    while queue:
        below = sorted({*children.pop(queue.pop(), ())} - {root_pid})
        found += below
        queue += below
    return found


def collect_ids(tree: Iterable[Process]) -> set[int]:
    """Given a tree, return every number that a restore of it needs."""
    return {number for process in tree for number in process.ids()}


def find_taken(ids: Iterable[int], proc: Path = PROC) -> dict[int, str]:
    """Given numbers, return those in use now, each with its user: a process, one of its threads,
    or a group or session that outlives its leader."""
    wanted = set(ids)
    taken: dict[int, str] = {}
    for process in read_all(proc):
        who = f"{process.name} ({process.pid})"
        for number in {process.group, process.session} & wanted:
            taken.setdefault(number, f"group or session of {who}")
        for number in set(process.threads) & wanted:
            taken[number] = f"thread of {who}"
        if process.pid in wanted:
            taken[process.pid] = who
    return taken


def wait_until_free(ids: Iterable[int], timeout_s: float, proc: Path = PROC) -> dict[int, str]:
    """Given numbers, wait until all are free; return those still taken after `timeout_s`.

    What sits on a number is mostly short-lived, such as a health check, or a child of the caller
    that has ended: those are reaped here. The leader of a process looks ended before its threads
    are, so that whoever killed a tree may not have been able to reap all of it.
    """
    wanted = set(ids)
    deadline = time.monotonic() + timeout_s
    while taken := find_taken(wanted, proc):
        for pid in taken:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return taken


def read_cursor(proc: Path = PROC) -> int:
    """Return the number that was given out last in this PID namespace. Source: proc(5), loadavg."""
    return int((proc / "loadavg").read_text().split()[4])


def read_pid_max(proc: Path = PROC) -> int:
    """Return the number that no PID reaches."""
    return int((proc / "sys/kernel/pid_max").read_text())


def raise_cursor(above: int, most: int = 20_000) -> int:
    """Use up numbers until the last one given out is `above` or more; return it.

    `most` bounds how many. Threads are made and not processes: both take from the same numbers, and
    a thread costs a tenth. A clone3 with a chosen number would leave the cursor where it is, and
    ns_last_pid cannot be written in an unprivileged container. Raise SnapshotError
    `snapshot.pid-range` where the bound or the kernel's own limit is in the way.
    """
    remedy = "lower the number, or raise kernel.pid_max on the host"
    if above >= read_pid_max():
        detail = f"PIDs end at {read_pid_max()}, below {above}"
        raise SnapshotError("snapshot.pid-range", detail, remedy)
    last = read_cursor()
    for _ in range(most):
        if last >= above:
            return last
        last = _use_one_up()
    if last >= above:
        return last
    detail = f"the last PID is {last} after {most} were used up, below {above}"
    raise SnapshotError("snapshot.pid-range", detail, remedy)


def send_signal(pid: int, start_ticks: int, signum: int) -> bool:
    """Given a PID, its start and a signal, send it if that still is the same process and has not
    ended; tell whether it was sent."""
    import signal

    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        now = read_stat(pid)
        if now is None or now.ended or now.start_ticks != start_ticks:
            return False
        signal.pidfd_send_signal(fd, signum)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _use_one_up() -> int:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(threading.get_native_id()))
    thread.start()
    thread.join()
    return int(seen[0])
