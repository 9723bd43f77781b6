# SPDX-License-Identifier: Apache-2.0
"""criu as upstream's `vllm snapshot create` needs it: back only when the dumped tree has gone.

criu kills a dumped tree and ends; gigabytes of memory take their time to be given back. Upstream
looks once, right then, for processes that are left, and gives the whole artifact up where it finds
one ("process survived CRIU dump"). So that program first finds, on its PATH, one that waits.
Source: vLLM 0.33's snapshot/runtime.py, dump and verify_dead. Standard library only.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import pids
from .errors import SnapshotError

_LIMIT_S = 60.0


def write_program(folders: Sequence[Path], prefix: str, criu: str) -> Path:
    """Given folders that may hold a program, the prefix of a new folder's name, and criu's path,
    make a program `criu` in such a new folder in the first of them that does; return that, the
    caller's to remove. Raise SnapshotError `snapshot.disk` where none does."""
    package = str(Path(__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {package!r}); from {__package__}.gone import main; main()"
    )
    words = shlex.join([sys.executable, "-I", "-S", "-c", code, criu])
    for folder in folders:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder)) / "criu"
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        path.chmod(0o700)
        if os.access(path, os.X_OK):  # not where it is mounted noexec
            return path.parent
        path.unlink()
        path.parent.rmdir()
    detail = f"none of {', '.join(map(str, folders))} may hold a program"
    raise SnapshotError("snapshot.disk", detail, "mount one of them without noexec")


def run(criu: str, arguments: Sequence[str]) -> int:
    """Given criu's path and arguments, run it; after a dump that kills the tree wait until no
    process of it is left but its root, which upstream waits for. Return criu's status."""
    dumped: set[int] = set()
    if "dump" in arguments and "--tree" in arguments and "--leave-running" not in arguments:
        root = int(arguments[arguments.index("--tree") + 1])
        dumped = {process.pid for process in pids.read_tree(root)} - {root}
    status = subprocess.run([criu, *arguments], check=False).returncode
    if status == 0 and dumped:
        pids.wait_until_free(dumped, _LIMIT_S)
    return status if status >= 0 else 128 - status


def main() -> None:
    """Run what the command line says; end with its status."""
    sys.exit(run(sys.argv[1], sys.argv[2:]))
