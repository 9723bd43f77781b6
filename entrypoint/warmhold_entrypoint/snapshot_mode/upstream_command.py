# SPDX-License-Identifier: Apache-2.0
"""Upstream's `vllm snapshot create` and `restore` as children of the runner, between two engines.

Both have the container's rights, which criu needs, and bear the engine's mark. So does what they
start, also after a restore, and so it is found and ended as any engine's tree is. The runner reaps
for them: it is the subreaper, and gets every orphan. Everything here runs in a thread.
"""

import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from warmhold_snapshot import gone, pids
from warmhold_snapshot.artifact import DRAFT
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.folder import TOGETHER, locked
from warmhold_snapshot.upstream import (
    CHILD_LOG,
    find_artifact,
    find_folder,
    is_upstreams,
    read_manifest,
    sweep_upstream,
)

from ..gpus.gpu_memory import wait_for_memory
from ..log import Log
from ..plan import Plan
from ..running import tree
from ..running.adopted import AdoptedChild
from ..running.loop import Loop
from ..running.sweep import KILL_TIMEOUT_S
from ..settings import Settings
from ..weight_cache.room import give_up
from .restored import Restoration, build_wish, pass_by
from .snapshots import FOLDER
from .snapshotting import raise_high
from .upstream import build_create_argv, build_environment, build_restore_argv

FAILED = "snapshot.upstream"
_REMEDY = "read what upstream says in the container's log"
_TICK_S = 0.1
_CHUNK_BYTES = 1 << 16
_LAST_LINES = 20
_TOLD_LINES = 3

_log = Log("snapshot")


def create(settings: Settings, plan: Plan, name: str, stop: threading.Event) -> dict[str, Any]:
    """Given settings and plan of the engine that has ended, have upstream make the artifact; return
    `image_bytes` and `made_s`. Raise SnapshotError, with nothing left of it."""
    folder = find_folder(settings.env.state_dir / FOLDER)
    artifact, environment = find_artifact(folder, name), build_environment(settings, plan)
    began = time.monotonic()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in sweep_upstream(folder):
            _log.warning("removed what a killed maker left", name=left)
        # Upstream's engine has a copy of its own, and two may not fit the GPU.
        give_up(settings.env.run_dir, lambda _: True, force=True)
        wait_for_memory(plan.memory, settings.env.gpu_wait_s, stop)
        raise_high()
        places = [folder, Path(tempfile.gettempdir()), Path(sys.prefix)]
        program = gone.write_program(places, DRAFT, shutil.which("criu") or "criu")
    except OSError as error:
        raise SnapshotError("snapshot.disk", str(error), "see `snapshot check`") from error
    try:
        environment["PATH"] = f"{program}:{environment['PATH']}"
        argv = build_create_argv(settings, artifact)
        run_command(argv, environment, settings.env.ready_timeout_s, stop.is_set)
        size = read_manifest(folder, name).artifact_bytes
    except BaseException:
        shutil.rmtree(artifact, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(program, ignore_errors=True)
    made = {"image_bytes": size, "made_s": time.monotonic() - began}
    _log.info("snapshot made", name=name, **made)
    return made


class UpstreamRestoration(Restoration):
    """One restore by upstream. Its engine's log stays in the artifact, where upstream has it."""

    def __init__(self, settings: Settings, plan: Plan, name: str, loop: Loop) -> None:
        self._settings = settings
        self._plan = plan
        super().__init__(build_wish(settings, name, plan.memory), loop.wake)

    def _restore(self) -> None:
        settings, name = self._settings, self._wish.name
        folder = find_folder(self._wish.folder)
        artifact, processes = find_artifact(folder, name), read_manifest(folder, name).process_tree
        give_up(settings.env.run_dir, lambda _: True, force=True)
        self._wait_for_memory(self._stop)
        self._close("vault", "image")
        pass_by({*processes})
        argv = build_restore_argv(settings, artifact)
        environment, limit_s = build_environment(settings, self._plan), settings.env.ready_timeout_s
        _log.info("the engine's log goes on in its snapshot", path=artifact / CHILD_LOG)
        try:
            with locked(artifact, TOGETHER, "the snapshot is being removed"):
                run_command(argv, environment, limit_s, self._stop.is_set)
            self.process = _adopt(processes[0])
        except SnapshotError:
            _end_all()  # upstream has, mostly
            raise
        self._close("image", "first_token")


def begin_restore(settings: Settings, plan: Plan, name: str, loop: Loop) -> Restoration:
    """Given settings, plan and an artifact's name, begin its restore, upstream's way where it is
    upstream's; the loop is woken at its end."""
    if is_upstreams(name):
        return UpstreamRestoration(settings, plan, name, loop)
    return Restoration(build_wish(settings, name, plan.memory), loop.wake)


def run_command(
    argv: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    is_stopped: Callable[[], bool],
) -> None:
    """Given a command, a limit in seconds and whether a stop was asked for, run it with its output
    in the container's log. Raise SnapshotError `snapshot.upstream` with its last lines where it
    fails or is not done in time, and `snapshot.stopped`; no process below the runner is left then.
    """
    what = f"`{' '.join(argv[:3])}`"
    deadline = time.monotonic() + limit_s
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            extra_groups=[tree.ENGINE_GROUP],
            start_new_session=True,
        )
    except OSError as error:
        raise SnapshotError(FAILED, f"{what} cannot be started: {error}", _REMEDY) from error
    assert process.stdout is not None
    output = _Output(process.stdout.fileno())
    why: SnapshotError | None = None
    with process.stdout:
        while process.poll() is None and why is None:
            output.pass_on(_TICK_S)
            _reap_others(process.pid)
            if is_stopped():
                why = SnapshotError("snapshot.stopped", "it was interrupted by a stop", "none")
            elif time.monotonic() > deadline:
                detail = f"{what} was not done within {limit_s:.0f} s{output.end()}"
                why = SnapshotError(FAILED, detail, "raise WARMHOLD_READY_TIMEOUT_S")
        while output.pass_on(0.0):
            pass
        if why is None and process.returncode:
            detail = f"{what} ended with {process.returncode}{output.end()}"
            why = SnapshotError(FAILED, detail, _REMEDY)
    if why is not None:
        _end_all()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)
        raise why


class _Output:
    """What a command says, on its way to the container's log; the last lines are kept."""

    def __init__(self, fd: int) -> None:
        self._fds = [fd]
        self._lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._partial = b""

    def pass_on(self, patience_s: float) -> bool:
        """Pass on what there is, or what comes first within `patience_s`; tell whether that was
        something."""
        if not select.select(self._fds, [], [], patience_s)[0]:
            return False
        chunk = os.read(self._fds[0], _CHUNK_BYTES)
        if not chunk:
            self._fds.clear()  # its end
        os.write(sys.stdout.fileno(), chunk)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._lines.extend(line for line in lines if line.strip())
        return bool(chunk)

    def end(self) -> str:
        """The last lines, as the end of a sentence."""
        told = [*self._lines, self._partial.strip()][-_TOLD_LINES:]
        text = " | ".join(line.decode(errors="replace").strip() for line in told if line)
        return f"; its last words: {text}" if text else ""


def _reap_others(pid: int) -> None:
    """Reap every orphan that has come to us: upstream takes a zombie for a process that lives."""
    with suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == pid:
                return
            os.waitpid(found.si_pid, 0)


def _end_all() -> None:
    if left := tree.kill_members(os.getpid(), KILL_TIMEOUT_S):
        _log.error("processes survive SIGKILL", pids=[item.pid for item in left])
    tree.reap_adopted()


def _adopt(pid: int) -> AdoptedChild:
    """The restored tree's first process, which is our child since criu has ended."""
    process = pids.read_process(pid)
    if process is None or process.parent != os.getpid():
        detail = f"process {pid} ended at once, or is not a child of {os.getpid()}"
        raise SnapshotError(FAILED, detail, _REMEDY)
    return AdoptedChild(pid, os.pidfd_open(pid))
