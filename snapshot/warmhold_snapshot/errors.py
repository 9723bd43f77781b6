# SPDX-License-Identifier: Apache-2.0
"""Why a snapshot is not made, not used or not believed; every error has a dotted code.

Anywhere: snapshot.criu-absent, snapshot.criu (it failed), snapshot.timeout (it outlasted its
limit), snapshot.sockets (the kernel does not tell peers), snapshot.no-process, snapshot.disk,
snapshot.busy (a lock is held), snapshot.key (the key file), snapshot.name, snapshot.absent,
snapshot.damaged; snapshot.weights-absent, snapshot.weights-damaged (a flat file);
snapshot.no-runner (the command line).
Create: snapshot.rights (check found something missing), snapshot.fds (what CRIU cannot take along),
snapshot.engine (it could not be held, asked or quiesced), snapshot.dump, snapshot.resume (the
engine has to be started anew).
Restore: snapshot.identity-mismatch, snapshot.pids-taken, snapshot.port-taken,
snapshot.file-changed, snapshot.shm, snapshot.subreaper, snapshot.restore; snapshot.pid-range.
"""

from collections.abc import Sequence
from typing import Any


class SnapshotError(Exception):
    """A dotted code, what was found, and what to do about it; `lines` hold a log's key lines."""

    def __init__(self, code: str, detail: str, remedy: str = "", lines: Sequence[str] = ()) -> None:
        self.code = code
        self.detail = detail
        self.remedy = remedy
        self.lines = tuple(lines)
        super().__init__(f"{code}: {detail}")

    def to_json(self) -> dict[str, Any]:
        """Return the error as plain values."""
        lines = list(self.lines)
        return {"code": self.code, "detail": self.detail, "remedy": self.remedy, "lines": lines}
