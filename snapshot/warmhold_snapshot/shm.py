# SPDX-License-Identifier: Apache-2.0
"""What a tree has in /dev/shm: saved into one file while it is frozen, put back before a restore.

CRIU takes files in /dev/shm for part of the machine and dumps none. With --leave-running it also
deletes its link-remap files (further names of files whose own name is gone) right after the
post-dump script, so they are saved by then. Holes stay holes; names of one file stay names of one
file; links are never followed, and nothing is put back that is not listed.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import SnapshotError

FOLDER = Path("/dev/shm")
# Rings of multiprocessing.shared_memory, POSIX semaphores, and CRIU's names for nameless files.
_PATTERN = re.compile(r"(psm_|sem\.|link_remap\.)[^/]+")
_REMAP = "link_remap."
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ShmFile:
    """One name in /dev/shm. `extents` are (offset in the file, bytes), and their bytes lie one
    after the other in the pack from `pack_offset` on. `same_as` names the earlier entry of which
    this is a further name; it then has no bytes of its own."""

    name: str
    size_bytes: int
    mode: int
    uid: int
    gid: int
    pack_offset: int = 0
    extents: tuple[tuple[int, int], ...] = ()
    same_as: str = ""

    @property
    def stored_bytes(self) -> int:
        """How many bytes it has in the pack."""
        return sum(length for _, length in self.extents)


def save(inodes: Collection[int], pack: Path, folder: Path = FOLDER) -> tuple[ShmFile, ...]:
    """Given the inodes that a tree has open or mapped, write their content, and that of all names
    engines use, to a new file; return the entries. Raise OSError where it cannot be written."""
    entries: list[ShmFile] = []
    first_names: dict[int, str] = {}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(pack, flags, 0o600)
    shm = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        position = 0
        for name in sorted(path.name for path in folder.iterdir()):
            try:
                status = os.stat(name, dir_fd=shm, follow_symlinks=False)
            except FileNotFoundError:  # another program's: the tree's own stands still
                continue
            wanted = status.st_ino in inodes or _PATTERN.fullmatch(name)
            if not wanted or not stat.S_ISREG(status.st_mode):
                continue
            entry = ShmFile(
                name, status.st_size, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
            )
            if status.st_ino in first_names:
                entries.append(_replace(entry, same_as=first_names[status.st_ino]))
                continue
            try:
                source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=shm)
            except FileNotFoundError:
                continue
            first_names[status.st_ino] = name
            try:
                extents = tuple(_find_extents(source, status.st_size))
                for offset, length in extents:
                    _copy(source, offset, out, position, length)
                    position += length
            finally:
                os.close(source)
            start = position - sum(length for _, length in extents)
            entries.append(_replace(entry, extents=extents, pack_offset=start))
    finally:
        os.close(shm)
        os.close(out)
    return tuple(entries)


def put_back(files: Sequence[ShmFile], pack: Path, folder: Path = FOLDER) -> None:
    """Given entries and their bytes, put every file back, in place of what has its name.

    Raise SnapshotError `snapshot.shm` where that fails; nothing of it is left then. The caller
    holds the lock, and no process of the tree lives.
    """
    for entry in files:
        for name in (entry.name, entry.same_as or entry.name):
            if not name or "/" in name or name in (".", ".."):
                raise SnapshotError("snapshot.shm", f"{name!r} is no name in {folder}", "recreate")
    shm = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    done: list[ShmFile] = []
    try:
        source = os.open(pack, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for entry in files:
                done.append(entry)
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=shm)
                if entry.same_as:
                    names = {"src_dir_fd": shm, "dst_dir_fd": shm, "follow_symlinks": False}
                    os.link(entry.same_as, entry.name, **names)  # type: ignore[arg-type]
                else:
                    _write(entry, source, shm)
        finally:
            os.close(source)
    except OSError as error:
        remove(done, folder)
        detail = f"{folder} cannot be filled again: {done[-1].name if done else pack}: {error}"
        raise SnapshotError(
            "snapshot.shm", detail, "give the container a larger shm_size"
        ) from error
    finally:
        os.close(shm)


def remove(files: Sequence[ShmFile], folder: Path = FOLDER, remaps_only: bool = False) -> None:
    """Given entries, remove their names; with `remaps_only` those that only CRIU needed."""
    for entry in files:
        if entry.name.startswith(_REMAP) or not remaps_only:
            with suppress(OSError):
                (folder / entry.name).unlink()


def _replace(entry: ShmFile, **changes: object) -> ShmFile:
    import dataclasses

    return dataclasses.replace(entry, **changes)  # type: ignore[arg-type]


def _find_extents(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are no holes. Source: lseek(2)."""
    end = 0
    while end < size_bytes:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole to the end
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size_bytes)
        if end > start:
            yield start, end - start


def _write(entry: ShmFile, source: int, shm: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(entry.name, flags, 0o600, dir_fd=shm)
    try:
        os.ftruncate(out, entry.size_bytes)
        position = entry.pack_offset
        for offset, length in entry.extents:
            _copy(source, position, out, offset, length)
            position += length
        if (entry.uid, entry.gid) != (os.geteuid(), os.getegid()):
            os.fchown(out, entry.uid, entry.gid)
        os.fchmod(out, entry.mode)
    finally:
        os.close(out)


def _copy(source: int, from_offset: int, out: int, to_offset: int, length: int) -> None:
    while length > 0:
        block = os.pread(source, min(length, _CHUNK_BYTES), from_offset)
        if not block:
            raise OSError(f"{length} bytes are missing")
        view = memoryview(block)
        while view:
            written = os.pwrite(out, view, to_offset)
            view, to_offset = view[written:], to_offset + written
        from_offset += len(block)
        length -= len(block)
