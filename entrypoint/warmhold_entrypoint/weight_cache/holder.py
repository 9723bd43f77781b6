# SPDX-License-Identifier: Apache-2.0
"""Upstream's holder, `vllm preload`, from one engine to the next.

The engine may die, the holder may not: it is a program of supervisord's that this module starts and
ends, and nobody else. While an engine serves it is only watched. A holder that dies then is started
again with the next engine, never under the one that serves: the driver keeps that one's mapped
weights, and a new holder's would be a second copy on the GPU.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from warmhold_wcache.key import compare

from ..container import supervision
from ..container.conf import HOLDER_PROGRAM
from ..container.supervision import SupervisionError
from ..errors import Rejection
from ..files import read_json, write_atomically
from ..log import Log, redact_argv
from ..plan import Plan
from ..running import tree
from ..running.engine_http import ProbeError, Target
from ..running.readiness import probe_health
from ..settings import Settings
from .backend import build_holder_argv, count_local_ranks, health_address, socket_dir
from .ranks import Held, RankError, ask_ranks

# What the program becomes, once; it takes the order away, so that nobody starts it unasked.
ORDER_FILE = "holder-order.json"
TAKEN_FILE = "holder.json"
_FILES = "vllm_weight_cache_*"
_ASK_S = 10.0
_KILL_S = 10.0
_START_POLL_S = 0.3
_POLL_S = 3.0
_MISSES_TO_TROUBLE = 2

_log = Log("holder")


class HolderError(Exception):
    """Why there is no holder."""

    @property
    def rejection(self) -> Rejection:
        """The reason against ipc_cache."""
        remedy = "read the log of `vllm preload` above; another mode loads the weights meanwhile"
        return Rejection("ipc_cache", "ipc_cache.holder", str(self), remedy)


class Holder:
    """The holder as the runner has it. Owns a thread while an engine serves; `trouble` says then
    why the weights are not held any more, and `wake` is called when that changes."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.trouble = ""
        self._wake = wake
        self._stop: threading.Event | None = None

    def look(self, settings: Settings, plan: Plan) -> Held | None:
        """Given settings and plan, return what is held where every process of the holder that the
        plan wants answers; None where it has to be started anew."""
        told = read_json(settings.env.run_dir / TAKEN_FILE)
        if told is None or compare(told["key"], plan.launch_key):
            return None
        if tuple(told["argv"]) != _build_argv(settings, plan, told["port"]):
            return None
        try:
            return _ask(settings, _ASK_S)
        except RankError as error:
            _log.warning("the holder is not as it should be", detail=str(error))
            return None

    def start(self, settings: Settings, plan: Plan, stop: threading.Event) -> Held:
        """Given settings and plan, have the holder started and wait until every process of it has
        its weights; raise HolderError where that fails. Nothing is left of it then, but for a stop.
        """
        env, port = settings.env, _find_free_port()
        argv = _build_argv(settings, plan, port)
        uid = os.getuid() if plan.uid is None else plan.uid
        order = {"argv": argv, "environment": dict(plan.environment), "uid": uid, "port": port}
        began = time.monotonic()
        try:
            _prepare_folder(Path(socket_dir(settings)), uid)
            text = json.dumps({**order, "key": dict(plan.launch_key)})
            write_atomically(env.run_dir / ORDER_FILE, text)
            _log.info("holder starting", argv=" ".join(redact_argv(argv)))
            supervision.start_program(env.run_dir, HOLDER_PROGRAM)
            held = _wait_ready(settings, port, began + env.ready_timeout_s, stop)
        except (OSError, SupervisionError, HolderError) as error:
            if not stop.is_set():  # then supervisord may be ending it already
                self.end(settings)
            raise HolderError(str(error)) from error
        taken_s = time.monotonic() - began
        _log.info("weights held", processes=len(held.by_socket), bytes=held.bytes, seconds=taken_s)
        return held

    def end(self, settings: Settings) -> None:
        """End what there is of a holder; a process that lost its parent is found by its mark."""
        run_dir = settings.env.run_dir
        try:
            supervision.stop_program(run_dir, HOLDER_PROGRAM)
        except SupervisionError as error:
            _log.warning("the holder cannot be stopped in order", detail=str(error))
        for name in (ORDER_FILE, TAKEN_FILE):
            (run_dir / name).unlink(missing_ok=True)
        if left := tree.kill_members(None, _KILL_S, tree.HOLDER_GROUP):
            _log.error("holder processes survive SIGKILL", pids=[item.pid for item in left])

    def watch(self, settings: Settings) -> None:
        """Ask every process regularly, until `rest`."""
        self._stop = threading.Event()
        arguments = (settings, self._stop)
        threading.Thread(target=self._run, args=arguments, name="holder", daemon=True).start()

    def rest(self) -> None:
        """The engine has ended: watch no more."""
        if self._stop:
            self._stop.set()
        self._stop, self.trouble = None, ""

    def _run(self, settings: Settings, stop: threading.Event) -> None:
        env, missed = settings.env, 0
        while not stop.wait(min(_POLL_S, env.canary_interval_s)):
            trouble = ""
            try:
                _ask(settings, env.canary_timeout_s)
                missed = 0
            except RankError as error:
                missed += 1
                trouble = self.trouble
                if error.gone or missed >= _MISSES_TO_TROUBLE:
                    trouble = str(error)
            if trouble != self.trouble and not stop.is_set():
                self.trouble = trouble
                self._wake()


def _build_argv(settings: Settings, plan: Plan, port: int) -> tuple[str, ...]:
    return build_holder_argv(settings, plan.model_directory or plan.model, port)


def _ask(settings: Settings, timeout_s: float) -> Held:
    count = count_local_ranks(settings.arguments)
    return ask_ranks(Path(socket_dir(settings)), count, timeout_s)


def _wait_ready(settings: Settings, port: int, deadline: float, stop: threading.Event) -> Held:
    """Wait until upstream counts every process as ready once, a draft's too, and each one answers
    for itself."""
    host, port = health_address(settings, port)
    target = Target(host, port, None, False, "", "", None)
    while True:
        program = supervision.read_program(settings.env.run_dir, HOLDER_PROGRAM)
        try:
            probe_health(target, _ASK_S)
            return _ask(settings, _ASK_S)
        except (ProbeError, RankError) as error:
            reason = str(error)
        if not program.up:
            raise HolderError(f"`vllm preload` ended with {program.status} before it was ready")
        if time.monotonic() > deadline:
            limit_s = settings.env.ready_timeout_s
            raise HolderError(f"`vllm preload` was not ready within {limit_s:.0f} s: {reason}")
        if stop.wait(_START_POLL_S):
            raise HolderError("stopped on request")


def _prepare_folder(folder: Path, uid: int) -> None:
    """The engine's user's alone, as upstream wants it, without the files of an earlier holder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != uid:
        os.chown(folder, uid, uid)
    for path in folder.glob(_FILES):
        with suppress(FileNotFoundError):
            path.unlink()


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
