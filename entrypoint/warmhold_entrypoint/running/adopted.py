# SPDX-License-Identifier: Apache-2.0
"""A process that this one has not started but is the parent of, with subprocess's ways."""

import os
import select
import signal
import subprocess
from contextlib import suppress


class AdoptedChild:
    """A restored tree's first process: a child of this one that it has not started."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the status (a signal n as -n), or None while it lives."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has reaped it
                pid, status = self.pid, signal.SIGKILL
            if pid == self.pid:
                self._status = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the status once it has ended; raise subprocess.TimeoutExpired."""
        if self._status is None:
            # A pidfd becomes readable when its process has ended, reaped or not.
            select.select([self._pidfd], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Signal it if it lives."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)
