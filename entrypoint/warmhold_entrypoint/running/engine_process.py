# SPDX-License-Identifier: Apache-2.0
"""One engine: its process, its log pipe and its end. Nothing here decides what comes next.

An engine is started through the launcher, which takes its rights away, or was restored. Its output
comes back by one pipe, so that the runner can follow it and pass every byte on.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from ..errors import Fault
from ..launcher import PROGRAM
from . import tree
from .loop import Loop

_CHUNK_BYTES = 1 << 16


class Child(Protocol):
    """A child process, as subprocess has it."""

    @property
    def pid(self) -> int:
        """Its PID."""

    def poll(self) -> int | None:
        """Return the status (a signal n as -n), or None while it lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the status once it has ended; raise subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Signal it."""


class EngineProcess:
    """A running engine. Owns the process, the read end of its log pipe, and its whole tree."""

    def __init__(
        self, process: Child, reader: int, on_line: Callable[[bytes], None], loop: Loop
    ) -> None:
        """Given a child and the read end of its log pipe, follow both."""
        self._process = process
        self._reader = reader
        self._pidfd = os.pidfd_open(process.pid)
        self._on_line = on_line
        self._partial = b""
        self._loop = loop
        loop.watch(self._reader, self._pump)
        loop.watch(self._pidfd, self._on_end)

    @property
    def pid(self) -> int:
        """PID of the engine's first process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the status as subprocess reports it (a signal n as -n), or None while alive."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the engine to drain and end."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end_tree(self, timeout_s: float) -> list[tree.Process]:
        """Kill every process of the tree, reap, pass on the rest of the log, give all back.

        Return the processes that outlast `timeout_s`; the first one may be among them.
        """
        left = tree.kill_members(os.getpid(), timeout_s)
        with suppress(subprocess.TimeoutExpired):  # in the kernel, with a driver or disk that hangs
            self._process.wait(timeout_s)
        tree.reap_adopted()
        self._loop.forget(self._pidfd)
        self._loop.forget(self._reader)
        os.set_blocking(self._reader, False)
        # Would block: someone outside the tree still holds the other end.
        with suppress(BlockingIOError):
            while self._pump_chunk():
                pass
        if self._partial:
            self._on_line(self._partial)
        os.close(self._reader)
        os.close(self._pidfd)
        return left

    def _on_end(self) -> None:
        """The first process has ended; one event is enough to say so."""
        self._loop.forget(self._pidfd)

    def _pump(self) -> None:
        if not self._pump_chunk():
            self._loop.forget(self._reader)

    def _pump_chunk(self) -> bool:
        """Pass on what the pipe holds right now to our own stdout; return False at its end."""
        chunk = os.read(self._reader, _CHUNK_BYTES)
        view = memoryview(chunk)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]
        *lines, rest = (self._partial + chunk).split(b"\n")
        self._partial = rest[-_CHUNK_BYTES:]  # a progress bar may go on for hours without a newline
        for line in lines:
            self._on_line(line)
        return bool(chunk)


def launch(
    argv: Sequence[str],
    environment: Mapping[str, str],
    uid: int,
    on_line: Callable[[bytes], None],
    loop: Loop,
) -> EngineProcess:
    """Given what to start and as whom, start it through the launcher."""
    request = [str(uid), str(tree.ENGINE_GROUP)]
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", PROGRAM, *request, *argv],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return EngineProcess(process, reader, on_line, loop)


def explain_end(status: int, verdict: Fault | None, oom_kills: int) -> str:
    """Given status, why it was ended by us, and kills for memory, tell how an engine ended."""
    if oom_kills > 0:
        return f"killed for memory ({oom_kills} process(es), the cgroup's limit was reached)"
    if verdict:
        return verdict.detail
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:  # most real-time signals have none
            name = "real-time"
        return f"ended by signal {-status} ({name})"
    return f"ended by itself with status {status}"
