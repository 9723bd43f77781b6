# SPDX-License-Identifier: Apache-2.0
"""PID 1 of the container: starts supervisord, reaps every orphan, owns the container's exit code.

A stop on request ends with 0. When supervisord ends unasked, the engine was given up, and its exit
code, which the runner left in the run directory, becomes the container's.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import tree
from .errors import Exit
from .files import read_json
from .log import Log
from .supervision import is_alive

EXIT_FILE = "exit.json"
_KILL_TIMEOUT_S = 10.0
_HURRY_S = 5.0
_HURRY_POLL_S = 0.01

_log = Log("pid1")


def run_pid1(conf: Path, run_dir: Path) -> int:
    """Given supervisord's configuration and the run directory, supervise; return the exit code."""
    (run_dir / EXIT_FILE).unlink(missing_ok=True)
    stop = _Stop()
    # Handlers come first: PID 1 has no default action, so an early signal would be lost.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, stop.on_signal)
    supervisord = subprocess.Popen(
        [sys.executable, "-m", "supervisor.supervisord", "-c", str(conf)], start_new_session=True
    )
    stop.forward_to(supervisord.pid)
    hurry_supervisord(run_dir, lambda: stop.asked or supervisord.poll() is not None)
    status = _wait_for(supervisord.pid)
    left = tree.kill_members(None, _KILL_TIMEOUT_S)
    if left:
        _log.warning("processes outlast the stop", pids=[process.pid for process in left])
    if stop.asked:
        return Exit.STOPPED
    given_up = read_json(run_dir / EXIT_FILE)
    if given_up is not None:
        return int(given_up["code"])
    _log.error("supervisord ended unasked", status=status)
    return Exit.BUG


def hurry_supervisord(run_dir: Path, ended: Callable[[], bool]) -> None:
    """Ask supervisord a question as soon as it listens, until it answers or `ended` says so.

    It starts its programs after its first wait for events, which lasts a second when none comes.
    """
    deadline = time.monotonic() + _HURRY_S
    while not ended() and time.monotonic() < deadline:
        if is_alive(run_dir):
            return
        time.sleep(_HURRY_POLL_S)


class _Stop:
    """Whether a stop was asked for, and whom to tell; set before there is anyone."""

    def __init__(self) -> None:
        self.asked = False
        self._target: int | None = None

    def on_signal(self, signum: int, frame: object) -> None:
        """Remember the wish and pass it on as SIGTERM, which supervisord understands."""
        self.asked = True
        if self._target is not None:
            os.kill(self._target, signal.SIGTERM)

    def forward_to(self, pid: int) -> None:
        """Given supervisord's PID, pass on a signal that came before it was known."""
        self._target = pid
        if self.asked:
            os.kill(pid, signal.SIGTERM)


def _wait_for(pid: int) -> int:
    """Reap every child until the given one ends; return its status."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
