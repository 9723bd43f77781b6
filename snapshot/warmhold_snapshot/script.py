# SPDX-License-Identifier: Apache-2.0
"""A script that criu calls at its steps, as a file for as long as it is needed.

criu starts it without arguments, names the step in CRTOOLS_SCRIPT_ACTION and leaves it no
descriptors but the first three. Sources: criu/action-scripts.c and criu/util.c of CRIU 4.2.1.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import SnapshotError


@contextmanager
def program(folder: Path, action: str, command: str) -> Iterator[Path]:
    """Given the artifact's folder, a step of criu's and a shell command, make the script that does
    it at that step alone; what it ends with is criu's answer.

    Raise SnapshotError `snapshot.criu` where no folder at hand may hold a program (noexec).
    """
    text = f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = {action} ] || exit 0\n{command}\n'
    path = None
    try:
        for place in (folder, Path(tempfile.gettempdir()), Path(sys.prefix)):
            path = _write(place, action, text)
            if path is not None:
                yield path
                return
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    detail = f"neither {folder.parent} nor {tempfile.gettempdir()} may hold a program"
    raise SnapshotError("snapshot.criu", detail, "mount one of them without noexec")


def _write(folder: Path, action: str, text: str) -> Path | None:
    """A program with that text in that folder, or None where it cannot be or must not run there."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{action}-", suffix=".sh", dir=folder)
    except OSError:
        return None
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, 0o700)
        file.write(text)
    if os.access(name, os.X_OK):
        return Path(name)
    Path(name).unlink()
    return None
