# SPDX-License-Identifier: Apache-2.0
"""Which files in /dev/shm are an engine's, and their removal once it has ended.

A name proves nothing, since others may share the folder; that a process of the engine held the file
does. What was seen is kept by path and inode in the run directory, which lives as long as /dev/shm
does, so that a later runner can remove what a killed one could not.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .files import read_json, write_atomically
from .tree import Process

LEDGER_FILE = "shm.json"
_FOLDER = "/dev/shm/"
_MAPPING = re.compile(r"^[0-9a-f]+-\S+ \S+ \S+ \S+ (\d+) +(/dev/shm/.+?)( \(deleted\))?$")


@dataclass(frozen=True, order=True)
class ShmFile:
    """A file in /dev/shm that a process had open or mapped."""

    path: str
    inode: int


def find_shm_files(processes: Iterable[Process]) -> set[ShmFile]:
    """Given processes, return the files below /dev/shm that they hold open or mapped now."""
    found: set[ShmFile] = set()
    for process in processes:
        folder = Path("/proc", str(process.pid))
        with suppress(OSError):
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                match = _MAPPING.match(line)
                if match and not match[3]:
                    found.add(ShmFile(match[2], int(match[1])))
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    target = str(link.readlink())
                    if target.startswith(_FOLDER) and not target.endswith(" (deleted)"):
                        found.add(ShmFile(target, link.stat().st_ino))
    return found


class ShmLedger:
    """The files that engines of this run directory were seen to hold."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LEDGER_FILE
        entries = (read_json(self._path) or {}).get("files", [])
        self._files = {ShmFile(path, inode) for path, inode in entries}

    def note(self, processes: Iterable[Process]) -> None:
        """Given the engine's processes, remember the files that they hold now."""
        files = self._files | find_shm_files(processes)
        if files != self._files:
            self._files = files
            self._write()

    def remove_files(self) -> list[str]:
        """Remove the remembered files that are still the same; call it when the engine has ended.

        Return the paths that were removed.
        """
        removed = []
        for file in sorted(self._files):
            path = Path(file.path)
            with suppress(OSError):
                if path.lstat().st_ino == file.inode:
                    path.unlink()
                    removed.append(file.path)
        if self._files:
            self._files = set()
            self._write()
        return removed

    def _write(self) -> None:
        entries = [[file.path, file.inode] for file in sorted(self._files)]
        write_atomically(self._path, json.dumps({"files": entries}))
