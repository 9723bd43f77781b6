# SPDX-License-Identifier: Apache-2.0
"""PID 1 of the container: lets supervisord go, reaps every orphan, keeps the vault's descriptors.

It owns the container's exit code. A stop on request ends with 0. When supervisord ends unasked, the
engine was given up, and its exit code, which the runner left in the run directory, becomes the
container's.
"""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Exit
from ..files import read_json, write_atomically
from ..log import Log
from ..running import tree
from .conf import STORE_SOCKET
from .supervision import go_on, is_alive

if TYPE_CHECKING:
    from .fdstore import FdStore

EXIT_FILE = "exit.json"
_KILL_TIMEOUT_S = 10.0
_HURRY_S = 5.0
_HURRY_POLL_S = 0.01

_log = Log("pid1")


def leave_exit_code(run_dir: Path, code: int) -> None:
    """Given the run directory, leave there the code with which PID 1 has to end the container."""
    write_atomically(run_dir / EXIT_FILE, json.dumps({"code": int(code)}))


def run_pid1(
    supervisord: "subprocess.Popen[bytes]", conf: Path, run_dir: Path, store_uid: int | None
) -> int:
    """Given supervisord, begun, its configuration and the run directory, return the exit code.

    With a `store_uid`, the vault's user, keep an fd store for it.
    """
    (run_dir / EXIT_FILE).unlink(missing_ok=True)
    stop = _Stop()
    # Handlers come first: PID 1 has no default action, so an early signal would be lost.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, stop.on_signal)
    go_on(supervisord, conf)
    stop.forward_to(supervisord.pid)
    store = None if store_uid is None else _make_store(run_dir, store_uid)
    hurry_supervisord(run_dir, lambda: stop.asked or supervisord.poll() is not None)
    status = _wait_for(supervisord, store)
    if store is not None:
        store.close()
    left = tree.kill_members(None, _KILL_TIMEOUT_S)
    left += tree.kill_members(None, _KILL_TIMEOUT_S, tree.HOLDER_GROUP)
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


def _make_store(run_dir: Path, uid: int) -> "FdStore":
    """Make the store while supervisord imports its own modules; it starts the vault after that."""
    from .fdstore import FdStore

    store = FdStore(run_dir / STORE_SOCKET, uid)
    _watch_children(store)
    _raise_fd_limit()
    return store


def _watch_children(store: "FdStore") -> None:
    """Let the end of any child end a wait in the store's loop."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def drain() -> None:
        with suppress(BlockingIOError):
            os.read(reader, 4096)

    # A wake-up descriptor is written to only for signals that have a handler.
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    store.watch(reader, drain)


def _raise_fd_limit() -> None:
    """Let PID 1 keep as many descriptors as it may; supervisord has its own limit by now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _wait_for(child: subprocess.Popen[bytes], store: "FdStore | None") -> int:
    """Reap every child and serve a store until the given child ends; return its status."""
    while child.returncode is None:
        ended, status = os.waitpid(-1, os.WNOHANG if store else 0)
        if ended == child.pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0 and store is not None:
            store.step()
    return child.returncode
