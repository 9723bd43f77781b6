# SPDX-License-Identifier: Apache-2.0
"""Who holds which generation. A lease ends when it is released or its process has ended.

Each lease is a pidfd, so a later process with the same PID is never taken for the holder. The fd
store has duplicates; a lease that it does not keep ends with the vault, and that is all.
"""

import os
import select
from collections.abc import Callable

from .errors import WcacheError
from .log import Log
from .store import FdStoreClient


def has_ended(pidfd: int) -> bool:
    """Given a pidfd, tell whether its process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class Leases:
    """Owns the pidfds, also in the store; tells by callbacks which descriptors to watch, and which
    lease has begun ("leased") or ended ("released")."""

    def __init__(
        self,
        watch: Callable[[int, Callable[[], None]], None],
        forget: Callable[[int], None],
        on_change: Callable[[str, str, int], None],
        store: FdStoreClient | None,
        log: Log,
    ) -> None:
        self._watch = watch
        self._forget = forget
        self._on_change = on_change
        self._store = store
        self._log = log
        self._pidfds: dict[tuple[str, int], int] = {}

    def begin(self, generation_id: str, pid: int, pidfd: int) -> bool:
        """Given a holder and its pidfd (ours from now on), begin a lease; tell if it is new."""
        if not self.add(generation_id, pid, pidfd):
            return False
        if self._store is not None:
            try:
                self._store.put(f"lease.{generation_id}.{pid}", [pidfd])
            except WcacheError as error:
                self._log.warning("lease is not kept by the store", pid=pid, detail=error.detail)
        self._on_change("leased", generation_id, pid)
        return True

    def add(self, generation_id: str, pid: int, pidfd: int) -> bool:
        """Go on with a lease that the store kept, as `begin` would begin it."""
        held = self._pidfds.get((generation_id, pid))
        if held is not None:
            if not has_ended(held):
                os.close(pidfd)
                return False
            self.end(generation_id, pid)
        self._pidfds[generation_id, pid] = pidfd
        self._watch(pidfd, lambda: self._on_readable(generation_id, pid))
        return True

    def end(self, generation_id: str, pid: int) -> bool:
        """End a lease; tell whether there was one."""
        pidfd = self._pidfds.pop((generation_id, pid), None)
        if pidfd is None:
            return False
        self._forget(pidfd)
        os.close(pidfd)
        if self._store is not None:
            try:
                self._store.drop(f"lease.{generation_id}.{pid}")
            except WcacheError as error:
                self._log.warning("lease stays in the store", pid=pid, detail=error.detail)
        self._on_change("released", generation_id, pid)
        return True

    def end_all(self, generation_id: str) -> None:
        """End every lease of a generation."""
        for pid in self.holders(generation_id):
            self.end(generation_id, pid)

    def holders(self, generation_id: str) -> list[int]:
        """Return the PIDs of the living holders of a generation."""
        return sorted(
            pid
            for (held, pid), pidfd in self._pidfds.items()
            if held == generation_id and not has_ended(pidfd)
        )

    def close(self) -> None:
        """Close the pidfds; no lease ends by it."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def __len__(self) -> int:
        return len(self._pidfds)

    def _on_readable(self, generation_id: str, pid: int) -> None:
        """A holder has ended, unless this event is of an earlier process with its PID."""
        pidfd = self._pidfds.get((generation_id, pid))
        if pidfd is not None and has_ended(pidfd):
            self.end(generation_id, pid)
