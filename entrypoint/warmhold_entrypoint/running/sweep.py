# SPDX-License-Identifier: Apache-2.0
"""What engines leave behind, and its removal: processes by mark, files in /dev/shm by inode.

A runner that was killed while it restored leaves a criu at work too, and that a whole tree.
"""

import os
from pathlib import Path

from warmhold_snapshot.restore import wait_for_others

from ..log import Log
from . import tree
from .shm import ShmLedger

KILL_TIMEOUT_S = 10.0
_OTHERS_S = 60.0

_log = Log("engine")


class Leftovers:
    """Knows what the engines of this run directory hold. Owns the ledger of their files."""

    def __init__(self, run_dir: Path) -> None:
        self._shm = ShmLedger(run_dir)

    def note(self) -> None:
        """Remember the files that the engine's processes hold now."""
        self._shm.note(tree.find_members(os.getpid()))

    def sweep(self) -> None:
        """End what an earlier runner or container left, and remove its files."""
        self._end_members()  # first: an engine could hold what is waited for then
        if not wait_for_others(_OTHERS_S):
            _log.warning("an earlier restore does not end")
        self._end_members()
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the files of engines that have ended."""
        removed = self._shm.remove_files()
        if removed:
            _log.info("removed shared memory of an ended engine", files=len(removed))

    def _end_members(self) -> None:
        left = tree.find_members(os.getpid())
        if left:
            names = [f"{process.name}:{process.pid}" for process in left]
            _log.warning("ending the processes of an earlier engine", processes=names)
            self._shm.note(left)
            tree.kill_members(os.getpid(), KILL_TIMEOUT_S)
            tree.reap_adopted()
