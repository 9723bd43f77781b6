# SPDX-License-Identifier: Apache-2.0
"""The runner's event loop: descriptors with their owners, a wake-up pipe, and the wish to stop.

Owns the selector, the pipe and the handlers of SIGTERM and SIGINT. Knows nothing of engines.
"""

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress


class Loop:
    """Waits for descriptors; `wake` may be called from any thread, signals set `stop_asked`."""

    def __init__(self) -> None:
        self.stop_asked = False
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.watch(self._reader, self._drain)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def close(self) -> None:
        """Give the descriptors back; signals have no more effect than to be remembered."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def watch(self, fd: int, owner: Callable[[], None]) -> None:
        """Given a descriptor, call its owner whenever it can be read."""
        self._selector.register(fd, selectors.EVENT_READ, owner)

    def forget(self, fd: int) -> None:
        """Given a descriptor, watch it no more; one that is not watched is fine."""
        with suppress(KeyError):
            self._selector.unregister(fd)

    def wake(self) -> None:
        """End the wait that is under way."""
        with suppress(OSError):
            os.write(self._writer, b"\0")

    def wait(self, deadline: float | None) -> None:
        """Wait for the next event, at most until the deadline (monotonic), and call its owner."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            owner: Callable[[], None] = key.data
            owner()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def _on_signal(self, signum: int, frame: object) -> None:
        self.stop_asked = True
