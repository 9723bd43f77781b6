# SPDX-License-Identifier: Apache-2.0
"""What the processes of a tree hold open or mapped, as /proc shows it. Nothing is judged here.

Quick: the same reading is done once more while the tree is frozen.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHM = "/dev/shm/"
DELETED = " (deleted)"
_PIPE = re.compile(r"pipe:\[(\d+)\]")


@dataclass(frozen=True)
class FileStatus:
    """What stat(2) tells of the file behind a descriptor or mapping."""

    size_bytes: int
    links: int
    mode: int
    device: int
    inode: int


@dataclass(frozen=True)
class Descriptor:
    """An open descriptor: what its link in /proc reads, its fdinfo, and the file behind it."""

    fd: int
    link: str
    info: str = ""
    status: FileStatus | None = None


@dataclass(frozen=True)
class Mapping:
    """A mapped file, once per process however many pieces it has; `address` is the first one's."""

    address: str
    link: str
    inode: int
    status: FileStatus | None = None


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    pid: int
    descriptors: tuple[Descriptor, ...]
    mappings: tuple[Mapping, ...]


def read_held(pid: int, proc: Path = PROC) -> Held:
    """Given a PID, return what it holds; nothing where it has ended."""
    return Held(pid, tuple(_read_descriptors(pid, proc)), tuple(_read_mappings(pid, proc)))


def find_pipe_holders(
    inodes: Iterable[int], besides: Sequence[int], proc: Path = PROC
) -> dict[int, int]:
    """Given pipes by inode, return a PID that holds each one too and is none of `besides`."""
    wanted, known = set(inodes), set(besides)
    holders: dict[int, int] = {}
    if not wanted:
        return holders
    for entry in proc.iterdir():
        if entry.name.isdigit() and int(entry.name) not in known:
            for _, link in _read_links(int(entry.name), proc):
                match = _PIPE.fullmatch(link)
                if match and int(match[1]) in wanted:
                    holders[int(match[1])] = int(entry.name)
    return holders


def pipe_inode(link: str) -> int | None:
    """Given a link, return the pipe's inode, or None for what is no pipe."""
    match = _PIPE.fullmatch(link)
    return int(match[1]) if match else None


def shm_inodes(held: Iterable[Held]) -> set[int]:
    """Return the inodes of files in /dev/shm that are open or mapped."""
    inodes = {item.inode for one in held for item in one.mappings if item.link.startswith(SHM)}
    inodes |= {
        item.status.inode
        for one in held
        for item in one.descriptors
        if item.link.startswith(SHM) and item.status is not None
    }
    return inodes


def _read_links(pid: int, proc: Path) -> list[tuple[int, str]]:
    found = []
    try:
        names = sorted(int(entry.name) for entry in (proc / str(pid) / "fd").iterdir())
    except OSError:
        return []
    for fd in names:
        try:
            found.append((fd, os.readlink(proc / str(pid) / "fd" / str(fd))))  # noqa: PTH115 - kept as text
        except OSError:  # closed meanwhile
            continue
    return found


def _read_descriptors(pid: int, proc: Path) -> list[Descriptor]:
    folder = proc / str(pid)
    found = []
    for fd, link in _read_links(pid, proc):
        try:
            info = (folder / "fdinfo" / str(fd)).read_text(errors="replace")
        except OSError:
            info = ""
        status = _status(folder / "fd" / str(fd)) if link.startswith("/") else None
        found.append(Descriptor(fd, link, info, status))
    return found


def _read_mappings(pid: int, proc: Path) -> list[Mapping]:
    folder = proc / str(pid)
    try:
        text = (folder / "maps").read_text(errors="replace")
    except OSError:
        return []
    found: dict[tuple[str, int], Mapping] = {}
    for line in text.splitlines():
        words = line.split(maxsplit=5)
        if len(words) < 6 or words[5].startswith("["):
            continue
        address, link, inode = words[0], words[5], int(words[4])
        if (link, inode) not in found:
            # Goes to the file itself, also a deleted one; a name could be another file's by now.
            status = _status(folder / "map_files" / address)
            found[link, inode] = Mapping(address, link, inode, status)
    return list(found.values())


def _status(path: Path) -> FileStatus | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return FileStatus(status.st_size, status.st_nlink, status.st_mode, status.st_dev, status.st_ino)
