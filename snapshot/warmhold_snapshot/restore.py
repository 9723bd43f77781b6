# SPDX-License-Identifier: Apache-2.0
"""Brings a snapshot back as a child of the calling process, or leaves nothing of the attempt.

The tree that criu makes is adopted by the caller, which has to be a child subreaper: it can then
wait for the root as for a process of its own. Source: prctl(2), criu(8).
"""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from . import awake, compression, criu, cuda, pids, shm
from .artifact import DRAFT, IMAGES, Store
from .checksum import Progress
from .clock import Clock
from .errors import SnapshotError
from .folder import ALONE, locked
from .frozen import PACK
from .identity import require_equal
from .images import is_memory
from .manifest import Manifest
from .verdict import Verdict, judging

_PR_GET_CHILD_SUBREAPER = 37
_PIDFILE = "restored.pid"
_BUSY = "another restore is at work"
_END_S = 5.0
_POLL_S = 0.01
_ACTION = "post-restore"  # all memory is in its place, and no process runs yet
_SLOW_BYTES_S = 20e6  # of a disk from which two read at once
_LISTED = 20  # of numbers that are taken: an engine may have thousands of threads


@dataclass(frozen=True)
class Limits:
    """Seconds: for criu, and for numbers and ports that somebody short-lived has."""

    criu_s: float = 60.0
    free_s: float = 2.0


@dataclass(frozen=True)
class Restored:
    """A restored tree: its root's PID and a pidfd (the caller's to close), seconds by phase."""

    pid: int
    pidfd: int
    manifest: Manifest
    phases: Mapping[str, float]


def restore(
    store: Store,
    name: str,
    stdout_fd: int,
    *,
    stderr_fd: int | None = None,
    identity: Mapping[str, str] | None = None,
    checksums: bool = True,
    plugins: Path | None = None,
    limits: Limits = Limits(),
    progress: Progress | None = None,
    ready: Callable[[threading.Event], None] | None = None,
) -> Restored:
    """Given a store, a name, and the write end of a pipe that takes the place of the old stdout
    (and stderr, which gets its own where it had one), restore the artifact.

    With `identity` every field must be equal; without it the caller has compared. With `checksums`
    every byte is verified before a process runs, else names and sizes. `plugins` is the folder of
    criu's plug-ins for an engine on a GPU. `ready` is called in another thread, and no process runs
    before it has returned; what it raises ends the restore, and it has to end soon once its event
    is set. Raise SnapshotError; no process, file or socket of the attempt is left then, and with
    the processes their memory on the GPU has gone.
    """
    clock = Clock()
    _require_subreaper()
    with ExitStack() as held:
        folder = held.enter_context(store.using(name))
        locks = [held.enter_context(locked(shm.FOLDER, ALONE, _BUSY))]
        holder = held.enter_context(awake.awake(plugins))  # wakes up meanwhile
        images = folder / IMAGES
        compressed = compression.is_compressed(images)
        beside = checksums and not compressed
        with clock.step("verify"):
            manifest = store.read(name)
            if identity is not None:
                require_equal(manifest.identity, identity)
            among = _is_parsed if beside else None
            store.verify(manifest, checksums, progress, among=among)
        verdict = None
        if beside or ready:

            def judge(over: threading.Event) -> None:
                if ready is not None:
                    ready(over)
                told = _told(over, progress)
                store.verify(manifest, beside, progress=told, among=is_memory)

            verdict = held.enter_context(judging(folder, _ACTION, judge))
        with clock.step("collisions"):
            _require_free(manifest, limits.free_s)
            _require_files(manifest)
        if compressed:
            with clock.step("expand"):
                prefix = f"{DRAFT}{name}-"
                given = compression.expanded(images, store.folder, prefix, progress)
                images, lock_fd = held.enter_context(given)
                locks.append(lock_fd)
        with clock.step("shm"):
            shm.put_back(manifest.shm, folder / PACK)
        try:
            with clock.step("criu"):
                fds = [stdout_fd, stdout_fd if stderr_fd is None else stderr_fd]
                inherit = dict(zip(manifest.stdio, fds, strict=False))
                variables = {**holder, **cuda.name_users(manifest.cuda)}
                pid, pidfd = _restore(
                    manifest, folder, images, inherit, locks, limits, plugins, variables, verdict
                )
        except BaseException:
            shm.remove(manifest.shm)
            raise
        shm.remove(manifest.shm, remaps_only=True)
    return Restored(pid, pidfd, manifest, clock.timings)


def wait_for_others(timeout_s: float) -> bool:
    """Wait until no restore is at work in this container; tell whether that came in time.

    A caller that is killed leaves its criu at work, and that a whole tree a moment later: who
    clears up after it waits here first.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with locked(shm.FOLDER, ALONE, _BUSY):
                return True
        except SnapshotError:
            if time.monotonic() > deadline:
                return False
        time.sleep(_POLL_S)


def _restore(
    manifest: Manifest,
    folder: Path,
    images: Path,
    inherit: Mapping[int, int],
    locks: Sequence[int],
    limits: Limits,
    plugins: Path | None,
    variables: Mapping[str, str],
    verdict: Verdict[None] | None,
) -> tuple[int, int]:
    pidfile = folder / _PIDFILE
    pidfile.unlink(missing_ok=True)
    script = None if verdict is None else verdict.script
    argv = criu.build_restore_argv(images, folder, pidfile, inherit, plugins, script)
    known = {(process.pid, process.start_ticks) for process in pids.read_all()}
    # Where all is sound this is as long as criu alone may take; reading may take its time.
    limit_s = limits.criu_s + (0 if verdict is None else manifest.image_bytes / _SLOW_BYTES_S)
    try:
        # criu holds the locks too: a caller that is killed meanwhile leaves it at work.
        passed = {*inherit.values(), *locks, *(() if verdict is None else verdict.fds)}
        criu.run(argv, limit_s, folder / criu.RESTORE_LOG, sorted(passed), variables)
        if verdict is not None:
            verdict.require()
        pid = int(pidfile.read_text())
        process = pids.read_process(pid)
        if process is None or process.parent != os.getpid():
            detail = f"process {pid} ended at once, or is not a child of {os.getpid()}"
            raise SnapshotError("snapshot.restore", detail, "see the engine's log")
        return pid, os.pidfd_open(pid)
    except BaseException as error:
        _end_tree(manifest, known)
        if verdict is not None and verdict.error is not None:
            raise verdict.error from error
        if isinstance(error, SnapshotError):
            code = error.code if error.code == "snapshot.timeout" else "snapshot.restore"
            remedy = "create a new snapshot where this one never comes back"
            raise SnapshotError(code, error.detail, remedy, error.lines) from error
        raise
    finally:
        pidfile.unlink(missing_ok=True)


def _told(over: threading.Event, progress: Progress | None) -> Progress:
    """Who follows the verifying, where there is somebody, until it is over."""

    def tell(done_bytes: int, total_bytes: int) -> None:
        if over.is_set():
            raise SnapshotError("snapshot.stopped", "nobody waits any more", "none")
        if progress is not None:
            progress(done_bytes, total_bytes)

    return tell


def _is_parsed(name: str) -> bool:
    return not is_memory(name)


def _end_tree(manifest: Manifest, known: set[tuple[int, int]]) -> None:
    """End and reap what criu left of a failed attempt: new processes with the manifest's numbers
    that came to us. criu ends its own; a killed criu cannot."""
    wanted = {process.pid for process in manifest.processes}
    left = {
        process.pid: process
        for process in pids.read_tree(os.getpid())
        if process.pid in wanted and (process.pid, process.start_ticks) not in known
    }
    for process in left.values():
        pids.send_signal(process.pid, process.start_ticks, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while left and time.monotonic() < deadline:
        for pid in list(left):
            try:
                gone = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:  # its parent has not ended yet, or has reaped it
                gone = pids.read_process(pid) is None
            if gone:
                del left[pid]
        time.sleep(_POLL_S)


def _require_free(manifest: Manifest, timeout_s: float) -> None:
    if taken := pids.wait_until_free(manifest.ids(), timeout_s):
        lines = [f"{number} is {who}" for number, who in sorted(taken.items())[:_LISTED]]
        lines += [f"and {len(taken) - _LISTED} more"] if len(taken) > _LISTED else []
        detail = f"{len(taken)} process or thread id(s) are taken: {'; '.join(lines)}"
        raise SnapshotError("snapshot.pids-taken", detail, "end these processes", lines)
    for address, port in manifest.listeners:
        _require_port(address, port)


def _require_port(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            detail = f"{address} port {port}: {error.strerror}"
            remedy = "stop what listens there"
            raise SnapshotError("snapshot.port-taken", detail, remedy) from error


def _require_files(manifest: Manifest) -> None:
    """Files that the engine had open or mapped must be there with the same size, as criu wants."""
    wrong = []
    for file in manifest.open_files:
        try:
            size = Path(file.path).stat().st_size
        except OSError as error:
            wrong.append(f"{file.path}: {error.strerror}")
            continue
        if size != file.size_bytes:
            wrong.append(f"{file.path}: {size} bytes now, {file.size_bytes} then")
    if wrong:
        detail = f"{len(wrong)} file(s) that the engine had open changed: {'; '.join(wrong[:5])}"
        raise SnapshotError("snapshot.file-changed", detail, "create a new snapshot", wrong)


def _require_subreaper() -> None:
    value = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    if not value.value and os.getpid() != 1:
        detail = "the calling process would not get the restored one as a child"
        remedy = "call prctl(PR_SET_CHILD_SUBREAPER) first"
        raise SnapshotError("snapshot.subreaper", detail, remedy)
