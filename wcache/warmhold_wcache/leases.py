# SPDX-License-Identifier: Apache-2.0
"""Who holds which generation. A lease ends when it is released or its process has ended.

Each lease is a pidfd, so a later process with the same PID is never taken for the holder.
"""

import os
import select
from collections.abc import Callable


def has_ended(pidfd: int) -> bool:
    """Given a pidfd, tell whether its process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class Leases:
    """Owns the pidfds; tells by callbacks which descriptors to watch and which leases end."""

    def __init__(
        self,
        watch: Callable[[int, Callable[[], None]], None],
        forget: Callable[[int], None],
        on_end: Callable[[str, int], None],
    ) -> None:
        self._watch = watch
        self._forget = forget
        self._on_end = on_end
        self._pidfds: dict[tuple[str, int], int] = {}

    def add(self, generation_id: str, pid: int, pidfd: int) -> bool:
        """Given a holder and its pidfd (ours from now on), begin a lease; tell if it is new."""
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
        self._on_end(generation_id, pid)
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
