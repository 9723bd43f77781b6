# SPDX-License-Identifier: Apache-2.0
"""Small files that others read at any time: whole or not at all, never through a link."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Given a path and a text, replace the file in one step (temporary file, fsync, rename)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Given a path, return the object in it, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_run_dir() -> Path:
    """Return the run directory of this container, as every command finds it before any settings."""
    return Path(os.environ.get("WARMHOLD_RUN_DIR") or "/run/warmhold")
