# SPDX-License-Identifier: Apache-2.0
"""Which files in /dev/shm are an engine's, and their removal once it has ended.

A name proves nothing, since others may share the folder; that a process of the engine held the file
does. Files are told by inode: glibc maps a semaphore under a name that it then links to another.
What was seen is kept in the run directory, which lives as long as /dev/shm does, so that a later
runner can remove what a killed one could not.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..files import read_json, write_atomically
from ..log import Log
from .tree import Process, read_all

LEDGER_FILE = "shm.json"
_FOLDER = Path("/dev/shm")
_MAPPING = re.compile(r"^[0-9a-f]+-\S+ \S+ \S+ \S+ (\d+) +/dev/shm/", re.MULTILINE)

_log = Log("engine")


def find_inodes(processes: Iterable[Process]) -> set[int]:
    """Given processes, return the inodes of /dev/shm that they hold open or mapped now."""
    found: set[int] = set()
    for process in processes:
        folder = Path("/proc", str(process.pid))
        with suppress(OSError):
            maps = (folder / "maps").read_text(errors="replace")
            found.update(int(inode) for inode in _MAPPING.findall(maps))
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    if link.readlink().parts[:3] == _FOLDER.parts:
                        found.add(link.stat().st_ino)
    return found


class ShmLedger:
    """The files that engines of this run directory were seen to hold."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LEDGER_FILE
        self._inodes = set((read_json(self._path) or {}).get("inodes", []))

    def note(self, processes: Iterable[Process]) -> None:
        """Given the engine's processes, remember the files that they hold now."""
        inodes = self._inodes | find_inodes(processes)
        if inodes != self._inodes:
            self._inodes = inodes
            self._write()

    def remove_files(self) -> list[str]:
        """Remove the remembered files; call it when the engine has ended. Return their paths.

        What a living process still holds stays, and is looked at again the next time: an engine
        maps files of processes whose weights it maps too, and without those no other engine can
        (CUDA IPC).
        """
        removed = []
        if self._inodes:
            held = self._inodes & find_inodes(read_all().values())
            for path in sorted(_FOLDER.iterdir()):
                with suppress(OSError):
                    if path.lstat().st_ino in self._inodes - held:
                        path.unlink()
                        removed.append(str(path))
            self._inodes = held
            self._write()
        return removed

    def _write(self) -> None:
        try:
            write_atomically(self._path, json.dumps({"inodes": sorted(self._inodes)}))
        except OSError as error:  # a full run directory ends no engine
            _log.warning("cannot keep whose shared memory is whose", detail=str(error))
