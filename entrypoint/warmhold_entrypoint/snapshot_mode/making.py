# SPDX-License-Identifier: Apache-2.0
"""A snapshot in the making, as the runner sees it: a child process, what it has said, its end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..running import tree
from ..running.loop import Loop

_CHUNK_BYTES = 1 << 16
_END_S = 10.0


class Making:
    """One maker. Owns the process and the pipe that its lines come by."""

    def __init__(self, request: Mapping[str, Any], loop: Loop) -> None:
        self.request = dict(request)
        self.resumed = False
        self.ended = False
        self._loop = loop
        self._partial = b""
        self._result: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "warmhold_entrypoint.snapshot_mode.maker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(self.request).encode())
        self._reader = self._process.stdout.fileno()
        loop.watch(self._reader, self._read)

    def interrupt(self) -> None:
        """Ask it to give up; it resumes the engine first."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it at once, and its criu, which has a session of its own; `ended` follows."""
        tree.kill_below(self._process.pid, _END_S)
        self._process.kill()

    def finish(self) -> dict[str, Any]:
        """End and reap it; return its result, or that it was killed before it had one."""
        self._loop.forget(self._reader)
        if not self.ended:
            self.kill()
        with suppress(subprocess.TimeoutExpired):  # in the kernel, with gigabytes to write
            self._process.wait(_END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._result is not None:
            return self._result
        detail = "the process that makes the snapshot was killed"
        return {
            "ok": False,
            "code": "snapshot.killed",
            "detail": detail,
            "remedy": "try again; see the container's log",
        }

    def _read(self) -> None:
        chunk = os.read(self._reader, _CHUNK_BYTES)
        if not chunk:
            self.ended = True
            self._loop.forget(self._reader)
            return
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "event" in said:
                self.resumed = True
            else:
                self._result = said
