# SPDX-License-Identifier: Apache-2.0
"""Looks at a whole tree: everything in the way of a dump at once, since an engine is not asked
twice, and what a restore has to know of it."""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import fds
from .errors import SnapshotError
from .fds import FileStatus, Held
from .pids import PROC, Process, read_tree
from .rules import GHOST_LIMIT_BYTES, MAPPED, PROCESS, SOCKET, Offender, Rules
from .sockets import LISTEN, Sockets, read_sockets

_STDIO = (1, 2)
_LISTED, _LINE = 100, 300  # offenders, and characters of each
_REMEDY = "the engine goes on as before; close what is listed, or serve without what opens it"


@dataclass(frozen=True)
class OpenFile:
    """A regular file that a restore needs: it must be there with the same size."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class Scan:
    """What was found: offenders, and what a restore has to know.

    `notes` are files open for writing: should one change its size later, a restore fails.
    `stdio` are the inodes of the pipes that the root's stdout and stderr go to; `listeners` are
    (address, port); `counts` tells how many descriptors of which kind there are.
    """

    offenders: tuple[Offender, ...] = ()
    stdio: tuple[int, ...] = ()
    listeners: tuple[tuple[str, int], ...] = ()
    files: tuple[OpenFile, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    shm_inodes: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def require_clean(self, when: str) -> None:
        """Raise SnapshotError `snapshot.fds` with the offenders where there is one: the first of
        them, since an engine may have thousands, and the runner's answer has its bounds."""
        if self.offenders:
            lines = [offender.line()[:_LINE] for offender in self.offenders[:_LISTED]]
            if more := len(self.offenders) - len(lines):
                lines.append(f"and {more} more")
            count = len(self.offenders)
            detail = f"{count} thing(s) cannot be taken along {when}: {'; '.join(lines)}"
            raise SnapshotError("snapshot.fds", detail, _REMEDY, lines)


def scan(
    root_pid: int,
    ghost_limit_bytes: int = GHOST_LIMIT_BYTES,
    on_gpu: bool = False,
    proc: Path = PROC,
) -> Scan:
    """Given a tree's root and whether criu takes CUDA along, return what it holds; raise
    SnapshotError where there is no tree."""
    tree = read_tree(root_pid, proc)
    held = [fds.read_held(process.pid, proc) for process in tree]
    pipes = {
        inode
        for one in held
        for item in one.descriptors
        if (inode := fds.pipe_inode(item.link)) is not None
    }
    outside = fds.find_pipe_holders(pipes, [process.pid for process in tree], proc)
    sockets = read_sockets(root_pid, proc)
    found = judge(tree, held, sockets, outside, ghost_limit_bytes, on_gpu)
    return replace(found, offenders=(*_find_foreign_sessions(tree, proc), *found.offenders))


def judge(
    tree: Sequence[Process],
    held: Sequence[Held],
    sockets: Sockets,
    outside_pipes: Mapping[int, int],
    ghost_limit_bytes: int = GHOST_LIMIT_BYTES,
    on_gpu: bool = False,
) -> Scan:
    """Given what was read (a pipe's holder outside the tree by the pipe's inode), return what is in
    the way and what a restore has to know."""
    members = {process.pid for process in tree}
    inodes = {
        int(match[1])
        for one in held
        for item in one.descriptors
        if (match := SOCKET.fullmatch(item.link))
    }
    stdio = _find_stdio(held[0])
    rules = Rules(members, inodes, sockets, outside_pipes, stdio, ghost_limit_bytes, on_gpu)
    offenders: list[Offender] = []
    counts: dict[str, int] = {}
    for one in held:
        for item in one.descriptors:
            kind = re.split(r"[:/]", item.link)[0] or "file"
            counts[kind] = counts.get(kind, 0) + 1
            offenders += (
                Offender(one.pid, item.fd, kind, detail) for kind, detail in rules.descriptor(item)
            )
        for mapping in one.mappings:
            offenders += (
                Offender(one.pid, MAPPED, kind, detail)
                for kind, detail in rules.path(mapping.link, mapping.status, mapped=True)
            )
    listening = sorted({inet.local for inet in rules.inet(LISTEN)}, key=str)
    return Scan(
        offenders=tuple(offenders),
        stdio=stdio,
        listeners=tuple((str(address), port) for address, port in listening),
        files=tuple(_find_files(held)),
        counts=counts,
        shm_inodes=frozenset(fds.shm_inodes(held)),
        notes=tuple(_find_written(held)),
    )


def _find_foreign_sessions(tree: Sequence[Process], proc: Path) -> Iterator[Offender]:
    """Processes in a session or group whose leader lives outside the tree."""
    members = {process.pid for process in tree}
    for process in tree:
        for number in sorted({process.session, process.group} - members):
            if (proc / str(number)).exists():
                detail = f"{process.name} is in the session or group of process {number}"
                yield Offender(process.pid, PROCESS, "session", detail)


def _find_stdio(root: Held) -> tuple[int, ...]:
    """The pipes of the root's stdout and stderr, each once."""
    links = {item.fd: item.link for item in root.descriptors}
    found = [fds.pipe_inode(links.get(fd, "")) for fd in _STDIO]
    return tuple(dict.fromkeys(inode for inode in found if inode is not None))


def _find_files(held: Iterable[Held]) -> list[OpenFile]:
    """Regular files outside /dev/shm that are open or mapped and still have their name."""
    found: dict[str, int] = {}
    for one in held:
        seen = [(item.link, item.status) for item in one.descriptors]
        seen += [(item.link, item.status) for item in one.mappings]
        for link, status in seen:
            if status is not None and _is_kept(link, status):
                found[link] = status.size_bytes
    return [OpenFile(path, size) for path, size in sorted(found.items())]


def _find_written(held: Iterable[Held]) -> Iterator[str]:
    """Of those, descriptors open for writing of files that have content."""
    for one in held:
        for item in one.descriptors:
            flags = re.search(r"^flags:\s*(\d+)", item.info, re.MULTILINE)
            writes = flags and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
            if (
                writes
                and item.status
                and item.status.size_bytes
                and _is_kept(item.link, item.status)
            ):
                yield f"pid {one.pid} fd {item.fd}: {item.link} is open for writing"


def _is_kept(link: str, status: FileStatus) -> bool:
    named = link.startswith("/") and not link.endswith(fds.DELETED)
    here = not link.startswith((fds.SHM, "/proc/", "/sys/"))
    return named and here and stat.S_ISREG(status.mode)
