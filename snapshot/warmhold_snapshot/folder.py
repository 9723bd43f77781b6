# SPDX-License-Identifier: Apache-2.0
"""Folders that several programs use at once: a lock on one, and changes in one step."""

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import SnapshotError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
ALONE, TOGETHER = fcntl.LOCK_EX, fcntl.LOCK_SH


@contextmanager
def locked(folder: Path, kind: int, busy: str) -> Iterator[int]:
    """Given a folder, hold it `ALONE` or `TOGETHER` with others that do; yield the lock as a
    descriptor. Raise SnapshotError `snapshot.busy`, with the given words, where somebody is in the
    way, and `snapshot.absent` where the folder has gone meanwhile.

    A program that inherits the descriptor holds the lock too, also when its starter was killed.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SnapshotError("snapshot.absent", f"{folder} has gone", "try again") from error
    try:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "try again when that has ended"
            raise SnapshotError("snapshot.busy", f"{busy} ({folder})", remedy) from error
        yield handle
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Given a file or folder, bring it to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exchange(one: Path, other: Path) -> None:
    """Let two paths change places in one step. Source: renameat2(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (os.fsencode(one), os.fsencode(other))
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
