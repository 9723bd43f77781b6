# SPDX-License-Identifier: Apache-2.0
"""Why an artifact is not tried again: a small file beside its manifest, outside the seal."""

import os
import secrets
import time
from pathlib import Path

import msgspec

from .errors import SnapshotError

MARK = "failed.json"


class Mark(msgspec.Struct, frozen=True):
    """Why an artifact is not tried again: an error, when (UTC), and in what circumstances."""

    code: str
    detail: str
    at: str
    circumstances: dict[str, str] = {}


def write_mark(folder: Path, error: SnapshotError, circumstances: dict[str, str]) -> None:
    """Given an artifact's folder, why its restore failed, and what that depended on, keep it."""
    mark = Mark(error.code, error.detail, utc_now(), circumstances)
    temporary = folder / f".{MARK}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(mark))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / MARK)
    except BaseException:  # a full disk leaves nothing half written
        temporary.unlink(missing_ok=True)
        raise


def clear_mark(folder: Path) -> None:
    """Given an artifact's folder, forget that a restore of it failed."""
    (folder / MARK).unlink(missing_ok=True)


def read_mark(folder: Path) -> Mark | None:
    """Given an artifact's folder, return why it is not tried again, or None."""
    try:
        return msgspec.json.decode((folder / MARK).read_bytes(), type=Mark)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        return Mark("snapshot.damaged", f"the mark cannot be read: {error}", "")


def utc_now() -> str:
    """Return the time in UTC; later ones sort after earlier ones."""
    seconds, fraction = divmod(time.time_ns(), 1_000_000_000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{stamp}.{fraction // 1000:06d}Z"
