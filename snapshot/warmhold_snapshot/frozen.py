# SPDX-License-Identifier: Apache-2.0
"""What is looked at between the dump and the engine's going on, while the tree is frozen.

Once more at what it holds (a connection may have come after the scan before the dump), and at its
processes and files; what lies in /dev/shm is saved. Where something is in the way the dump is not
kept; criu then lets the tree go on all the same.
"""

from dataclasses import dataclass
from pathlib import Path

from . import shm
from .errors import SnapshotError
from .pids import Process, read_tree
from .scan import OpenFile, scan

PACK, ACTION = "shm.img", "post-dump"


@dataclass(frozen=True)
class Findings:
    """What the manifest takes from there."""

    shm: tuple[shm.ShmFile, ...]
    processes: tuple[Process, ...]
    files: tuple[OpenFile, ...]


def look(
    root_pid: int,
    pack: Path,
    ghost_limit_bytes: int,
    on_gpu: bool = False,
    shm_folder: Path = shm.FOLDER,
) -> Findings:
    """Given the tree's root, the file for what lies in /dev/shm, and whether criu takes CUDA along,
    return what is found; raise SnapshotError."""
    found = scan(root_pid, ghost_limit_bytes, on_gpu)
    found.require_clean("of the frozen engine")
    try:
        files = shm.save(found.shm_inodes, pack, shm_folder)
    except OSError as error:
        detail = f"what lies in {shm_folder} cannot be saved: {error}"
        remedy = "see `snapshot check` for the free space"
        raise SnapshotError("snapshot.disk", detail, remedy) from error
    return Findings(files, read_tree(root_pid), found.files)
