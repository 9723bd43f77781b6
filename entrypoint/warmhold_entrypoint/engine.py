# SPDX-License-Identifier: Apache-2.0
"""The runner: the supervised process `warmhold engine`, in every mode.

It sweeps what an earlier engine left, starts the next one by the plan, watches it, answers for its
state, ends its whole tree, and owns the exit code: an engine that ends unasked has failed, whatever
its status says. One loop owns all state; only the prober has a thread.
"""

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from . import tree, weights
from .command import build_fetch_argv, inherit_environment
from .engine_process import EngineProcess, explain_end
from .errors import EntrypointError, Exit, Fault, exit_code_of_status
from .facts import read_oom_kills
from .files import read_run_dir, write_atomically
from .history import LastExit, read_history, write_history
from .log import Log, configure_logging, redact_argv
from .loop import Loop
from .phases import PhaseClock, Phases
from .pid1 import EXIT_FILE
from .plan import Attempt, Plan
from .readiness import Event, Prober, Report, build_target
from .settings import Settings
from .shm import ShmLedger
from .start import PLAN_FILE, log_plan, make_sound_plan, prepare_folders, read_command, write_loader
from .states import EDGES, State
from .status import Status, StatusServer

_KILL_TIMEOUT_S = 10.0
_DRAIN_MARGIN_S = 10.0
_MAX_BACK_OFF_S = 60.0
_STABLE_S = 60.0
_SHM_LOOK_S = 15.0
# A usage error of vLLM's parser, and programs that cannot be run: another try ends the same way.
_HOPELESS = (2, 126, 127)

_log = Log("engine")


def back_off_s(failures: int) -> float:
    """Given the failures in a row, return the wait before the next start: 0, 1, 2, 4, ... s."""
    return 0.0 if failures <= 1 else min(_MAX_BACK_OFF_S, 2.0 ** (failures - 2))


class Runner:
    """Runs engines until it is asked to stop or has to give up. Owns the engine and its story."""

    def __init__(
        self, command: Sequence[str], settings: Settings, plan: Plan, loop: Loop, uid: int
    ) -> None:
        self._command = command
        self._settings = settings
        self._plan = plan
        self._loop = loop
        self._uid = uid
        self._state = State.SWEEP
        self._reason = "the runner started"
        self._ready = False
        self._mode: str | None = None
        self._serving_since: float | None = None
        self._phases: Phases | None = None
        self._weights: dict[str, Any] | None = None
        self._rejections = plan.rejections
        self._clock = PhaseClock()
        self._failed_starts = 0
        self._quick_crashes = 0
        self._process: EngineProcess | None = None
        self._prober: Prober | None = None
        self._shm = ShmLedger(settings.env.run_dir)
        self._history = read_history(settings.env.state_dir)

    def run(self) -> int:
        """Run until the end; return the exit code (0 only when a stop was asked for)."""
        self._sweep()
        try:
            while not self._loop.stop_asked:
                code, reason = self._run_plan()
                if self._loop.stop_asked:
                    break
                if code is not None:
                    fault = Fault("engine.failed", reason, "read the engine's log above")
                    return self._give_up(code, [fault])
                self._back_off(reason)
                self._advance(State.SWEEP, "the next start")
                self._sweep()
                self._settings, self._plan = make_sound_plan(self._command)
        except EntrypointError as error:
            return self._give_up(error.exit_code, error.faults)
        self._advance(State.STOPPED, "stopped on request")
        return Exit.STOPPED

    def status(self) -> Status:
        """Return what the socket answers: what happened and how it is now."""
        now = time.monotonic()
        phases, prober, last = self._phases, self._prober, self._history.last_exit
        serving = self._state is State.SERVING
        last_ok = prober.last_ok if prober else None
        return {
            "state": self._state,
            "ready": serving and self._ready,
            "reason": self._reason,
            "mode": self._mode,
            "phase": self._clock.current if self._state is State.TRYING else None,
            "rejections": [dataclasses.asdict(item) for item in self._rejections],
            "weights": self._weights,
            "model": self._plan.model,
            "url": build_target(self._settings).url,
            "pid": self._process.pid if self._process else None,
            "runner_pid": os.getpid(),
            "uptime_s": now - self._serving_since if serving and self._serving_since else None,
            "starts": self._history.starts,
            "crashes": self._history.crashes,
            "last_exit": dataclasses.asdict(last) if last else None,
            "phases": dict(phases.seconds, unaccounted=phases.unaccounted_s) if phases else {},
            "total_s": phases.total_s if phases else None,
            "probe": {
                "last_ok_s_ago": now - last_ok if last_ok is not None else None,
                "missed": prober.missed if prober else 0,
            },
        }

    def _run_plan(self) -> tuple[int | None, str]:
        """Try the plan's attempts; return a final exit code, or None for another round, and why."""
        prepare_folders(self._settings, self._plan)
        if self._plan.model_directory is None and not self._fetch():
            return self._after_failed_start(1, f"{self._plan.model} could not be downloaded")
        write_atomically(self._settings.env.run_dir / PLAN_FILE, self._plan.to_json())
        code, reason = 0, ""
        for attempt in self._plan.attempts:
            code, reason = self._run_attempt(attempt)
            if self._loop.stop_asked:
                return None, reason
            if self._serving_since is not None:
                return self._after_crash(reason)
            if code in _HOPELESS:
                break
        return self._after_failed_start(code, reason)

    def _run_attempt(self, attempt: Attempt) -> tuple[int, str]:
        """Start one engine, stay with it until it has ended; return exit code and reason."""
        env = self._settings.env
        self._mode, self._serving_since, self._phases = attempt.mode, None, None
        self._weights, self._rejections = None, self._plan.rejections
        self._advance(State.TRYING, f"starting in mode {attempt.mode}")
        _log.info("engine starting", mode=attempt.mode, argv=shlex.join(redact_argv(attempt.argv)))
        oom_kills = read_oom_kills()
        write_loader(self._settings, self._plan)
        self._start_process(attempt.argv)
        self._keep_history(running=True, starts=self._history.starts + 1)
        self._prober = Prober(
            build_target(self._settings),
            env.canary_interval_s,
            env.canary_timeout_s,
            self._loop.wake,
        )
        verdict = self._watch(time.monotonic() + env.ready_timeout_s)
        self._prober.stop()
        self._prober = None
        status = self._end_process()
        crashes = self._history.crashes
        if self._loop.stop_asked:
            code, reason = int(Exit.STOPPED), "stopped on request"
        else:
            code = verdict.exit_code if verdict else exit_code_of_status(status)
            reason = explain_end(status, verdict, read_oom_kills() - oom_kills)
            crashes += 1
            _log.error("engine ended unasked", mode=attempt.mode, code=int(code), reason=reason)
        last = LastExit(int(code), reason, time.time())
        self._keep_history(running=False, crashes=crashes, last_exit=last)
        return int(code), reason

    def _watch(self, ready_deadline: float) -> Fault | None:
        """Follow the engine until its first process ends, or return why it has to be ended."""
        process = self._process
        assert process is not None
        kill_at: float | None = None
        look_at = time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if self._loop.stop_asked and kill_at is None:
                self._advance(State.STOPPING, f"draining up to {self._settings.env.drain_s} s")
                process.terminate()
                kill_at = now + self._settings.env.drain_s + _DRAIN_MARGIN_S
            if kill_at is not None and now > kill_at:
                _log.warning("drain time is over, killing the engine", pid=process.pid)
                return None
            trying = self._state is State.TRYING
            if trying and now > ready_deadline:
                timeout_s = self._settings.env.ready_timeout_s
                remedy = "read its log above, or raise WARMHOLD_READY_TIMEOUT_S"
                return Fault("ready.timeout", f"not ready within {timeout_s:.0f} s", remedy)
            if now >= look_at:
                self._shm.note(self._members())
                look_at = now + _SHM_LOOK_S
            deadlines = [look_at, kill_at, ready_deadline if trying else None]
            self._loop.wait(min(deadline for deadline in deadlines if deadline is not None))
            if fault := self._take_reports():
                return fault
        return None

    def _take_reports(self) -> Fault | None:
        """Act on what the prober found; return a fault when the engine says that it is dead."""
        assert self._prober is not None
        while not self._prober.reports.empty():
            report = self._prober.reports.get()
            if self._state not in (State.TRYING, State.SERVING):
                continue
            if report.event is Event.LISTENING:
                self._clock.see_listening()
            elif report.event is Event.READY:
                self._on_ready(report)
            elif report.event is Event.DEGRADED:
                self._ready, self._reason = False, f"degraded: {report.reason}"
                _log.warning("engine degraded, not ready", reason=report.reason)
            else:
                detail = f"the engine says that it is dead: {report.reason}"
                return Fault("engine.dead", detail, "read its log above")
        return None

    def _on_ready(self, report: Report) -> None:
        self._ready = True
        if self._state is State.SERVING:
            self._reason = report.reason
            _log.info("engine recovered", reason=report.reason)
            return
        self._phases = phases = self._clock.finish()
        self._serving_since = time.monotonic()
        self._failed_starts = 0
        self._take_weights()
        self._advance(State.SERVING, report.reason)
        seconds = {f"{name}_s": value for name, value in phases.seconds.items()}
        unaccounted_s = phases.unaccounted_s
        _log.info("start timing", total_s=phases.total_s, **seconds, unaccounted_s=unaccounted_s)
        url = build_target(self._settings).url
        _log.info("READY", mode=self._mode, model=self._plan.model, url=url)
        self._shm.note(self._members())

    def _take_weights(self) -> None:
        """Tell what happened, whatever the plan expected."""
        self._weights = found = weights.summarise(weights.read_reports(self._settings.env.run_dir))
        if found is None:
            return
        _log.info("weights", **found)
        self._mode = found["mode"]
        self._rejections = weights.correct(self._plan.rejections, found)

    def _fetch(self) -> bool:
        """Download the model; return whether it is there now (the plan is made anew then)."""
        self._advance(State.FETCHING, f"downloading {self._settings.model}")
        self._start_process(build_fetch_argv(self._settings))
        assert self._process is not None
        while self._process.poll() is None and not self._loop.stop_asked:
            self._loop.wait(None)
        if self._end_process() != 0 or self._loop.stop_asked:
            return False
        self._advance(State.SWEEP, "downloaded")
        self._settings, self._plan = make_sound_plan(self._command)
        return self._plan.model_directory is not None

    def _start_process(self, argv: Sequence[str]) -> None:
        self._clock = PhaseClock()
        environment = inherit_environment(self._settings, self._plan.environment)
        self._process = EngineProcess(
            argv, environment, self._uid, self._clock.see_line, self._loop
        )

    def _end_process(self) -> int:
        """End what is left of the engine's tree; return the status of its first process."""
        process = self._process
        assert process is not None
        self._ready = False
        self._shm.note(self._members())
        left = process.end_tree(_KILL_TIMEOUT_S)
        if left:
            _log.error("processes survive SIGKILL", pids=[item.pid for item in left])
        self._process = None
        self._remove_shm()
        status = process.poll()
        assert status is not None
        return status

    def _sweep(self) -> None:
        """End what an earlier runner or container left: processes by mark, files by inode."""
        left = self._members()
        if left:
            names = [f"{process.name}:{process.pid}" for process in left]
            _log.warning("ending the processes of an earlier engine", processes=names)
            self._shm.note(left)
            tree.kill_members(os.getpid(), _KILL_TIMEOUT_S)
            tree.reap_adopted()
        self._remove_shm()

    def _members(self) -> list[tree.Process]:
        return tree.find_members(os.getpid())

    def _remove_shm(self) -> None:
        removed = self._shm.remove_files()
        if removed:
            _log.info("removed shared memory of an ended engine", files=len(removed))

    def _after_crash(self, reason: str) -> tuple[int | None, str]:
        """A serving engine ended: always start again, more slowly when it serves only briefly."""
        assert self._serving_since is not None
        stable = time.monotonic() - self._serving_since > _STABLE_S
        self._quick_crashes = 1 if stable else self._quick_crashes + 1
        return None, reason

    def _after_failed_start(self, code: int, reason: str) -> tuple[int | None, str]:
        self._failed_starts += 1
        final = code in _HOPELESS or self._failed_starts >= self._settings.env.max_failures
        return (code if final else None), reason

    def _back_off(self, reason: str) -> None:
        wait_s = back_off_s(max(self._failed_starts, self._quick_crashes))
        self._advance(State.WAITING, f"{reason}; next start in {wait_s:.0f} s")
        deadline = time.monotonic() + wait_s
        while not self._loop.stop_asked and time.monotonic() < deadline:
            self._loop.wait(deadline)

    def _give_up(self, code: int, faults: Sequence[Fault]) -> int:
        for fault in faults:
            _log.error("giving up", code=fault.code, detail=fault.detail, remedy=fault.remedy)
        self._advance(State.FAILED, faults[0].detail)
        leave_exit_code(self._settings.env.run_dir, code)
        return int(code)

    def _advance(self, new: State, reason: str) -> None:
        """Take an edge of the table, and say so."""
        if new not in EDGES[self._state]:
            raise AssertionError(f"no edge from {self._state} to {new}")
        _log.info("state", old=self._state, new=new, reason=reason)
        self._state, self._reason = new, reason

    def _keep_history(self, **changes: object) -> None:
        self._history = dataclasses.replace(self._history, **changes)  # type: ignore[arg-type]
        write_history(self._settings.env.state_dir, self._history)


def run_engine(command: Sequence[str], run_dir: Path) -> int:
    """Given the container's command, run engines until the end; return the exit code."""
    tree.become_subreaper()
    settings, plan = make_sound_plan(command)
    log_plan(plan)
    uid = os.getuid() if plan.uid is None else plan.uid
    with ExitStack() as stack:
        loop = Loop()
        stack.callback(loop.close)
        runner = Runner(command, settings, plan, loop, uid)
        server = StatusServer(run_dir, loop, runner.status)
        stack.callback(server.close)
        return runner.run()


def leave_exit_code(run_dir: Path, code: int) -> None:
    """Given the run directory, leave there the code with which PID 1 has to end the container."""
    write_atomically(run_dir / EXIT_FILE, json.dumps({"code": int(code)}))


def main() -> NoReturn:
    """Run engines as supervisord's program; tell faults and bugs to PID 1 as exit codes too."""
    configure_logging(os.environ)
    run_dir = read_run_dir()
    try:
        sys.exit(run_engine(read_command(run_dir), run_dir))
    except EntrypointError as error:
        for fault in error.faults:
            sys.stderr.write(fault.lines() + "\n")
        code = error.exit_code
    except Exception as error:  # the last resort: a bug is told as one, and ends the container
        _log.error("bug", exc_info=True, detail=f"{type(error).__name__}: {error}")
        code = Exit.BUG
    leave_exit_code(run_dir, code)
    sys.exit(code)


if __name__ == "__main__":
    main()
