# SPDX-License-Identifier: Apache-2.0
"""The runner: one engine after the other, in every mode.

It sweeps what an earlier engine left, starts or restores the next one by the plan, watches it,
answers for its state, ends its whole tree, and owns the exit code: an engine that ends unasked has
failed, whatever its status says. One loop owns all state; the prober and a restore have threads.
"""

import shlex
import signal
import time
from collections.abc import Sequence

from warmhold_snapshot.errors import SnapshotError

from ..command import build_fetch_argv, inherit_environment
from ..container.pid1 import leave_exit_code
from ..errors import EntrypointError, Exit, Fault, exit_code_of_status
from ..facts import read_oom_kills
from ..files import write_atomically
from ..log import Log, redact_argv
from ..plan import Attempt, Plan
from ..reporting.history import LastExit, read_history
from ..reporting.states import State
from ..reporting.status import Status
from ..reporting.story import Story
from ..settings import Settings
from ..snapshot_mode.auto import AutoSnapshots
from ..snapshot_mode.restored import Restoration, build_wish, reject
from ..snapshot_mode.snapshotting import Snapshotting, raise_pids, remove_revoked
from ..snapshot_mode.upstream import find_against_ours
from ..snapshot_mode.upstream_command import begin_restore
from ..start import PLAN_FILE, make_sound_plan, prepare_folders, write_loader
from ..weight_cache import weights
from .ending import Ending
from .engine_process import EngineProcess, explain_end, launch
from .groundwork import Groundwork
from .loop import Loop
from .orders import Order
from .phases import Gap, PhaseClock, own_age_s
from .readiness import Event, Prober, Report, build_target
from .retries import Retries, is_hopeless
from .sweep import KILL_TIMEOUT_S, Leftovers
from .wanted import Wanted

_SHM_LOOK_S = 15.0
# A restored engine has nothing left to load or to compile.
_RESTORED_READY_S = 60.0
_RECREATE = "create a new snapshot"

_log = Log("engine")


class Runner:
    """Runs engines until it is asked to stop or has to give up. Owns the engine and its story."""

    def __init__(
        self,
        command: Sequence[str],
        settings: Settings,
        plan: Plan,
        loop: Loop,
        uid: int,
        leftovers: Leftovers,
    ) -> None:
        self._command = command
        self._settings = settings
        self._plan = plan
        self._loop = loop
        self._uid = uid
        self._story = Story(read_history(settings.env.state_dir), plan.rejections)
        self._clock: PhaseClock | Restoration = PhaseClock()
        self._snapshotting: Snapshotting | None = None
        self._gap = Gap(time.monotonic() - own_age_s())
        self._wanted = Wanted(loop, self._story, self._gap)
        self._leaving = ""  # why the running engine is asked to end, where the runner stays
        self._retries = Retries(settings.env.max_failures)
        self._process: EngineProcess | None = None
        self._prober: Prober | None = None
        self._leftovers = leftovers
        self._auto = AutoSnapshots(settings.env.run_dir)
        self._ground = Groundwork(loop)

    def run(self) -> int:
        """Run until the end; return the exit code (0 only when a stop was asked for)."""
        try:
            while not self._loop.stop_asked:
                code, reason = self._run_plan()
                if self._loop.stop_asked:
                    break
                if code is not None:
                    fault = Fault("engine.failed", reason, "read the engine's log above")
                    return self._give_up(code, [fault])
                self._back_off(reason)
                self._story.advance(State.SWEEP, "the next start")
                self._leftovers.sweep()
                self._wanted.make(self._settings, self._plan)
                self._settings, self._plan = self._wanted.make_plan(self._command)
        except EntrypointError as error:
            return self._give_up(error.exit_code, error.faults)
        self._story.advance(State.STOPPED, "stopped on request")
        return Exit.STOPPED

    def status(self) -> Status:
        """Return what the socket answers: what happened and how it is now."""
        pid = self._process.pid if self._process else None
        target = build_target(self._settings)
        return self._story.status(self._plan.model, target, pid, self._clock.current, self._prober)

    def _run_plan(self) -> tuple[int | None, str]:
        """Try the plan's attempts; return a final exit code, or None for another round, and why."""
        prepare_folders(self._settings, self._plan)
        if self._plan.model_directory is None and not self._fetch():
            return self._after_failed_start(1, f"{self._plan.model} could not be downloaded")
        write_atomically(self._settings.env.run_dir / PLAN_FILE, self._plan.to_json())
        remove_revoked(self._settings, self._plan)
        code, reason = 0, ""
        self._wanted.check(self._plan)
        for attempt in self._plan.attempts:
            code, reason = self._run_attempt(attempt)
            if self._loop.stop_asked:
                return None, reason
            if self._story.serving_since is not None:
                return self._after_crash(code, reason)
            self._gap.close("failed_attempt")
            if is_hopeless(code):
                break
        return self._after_failed_start(code, reason)

    def _run_attempt(self, attempt: Attempt) -> tuple[int, str]:
        """Bring one engine up, stay with it until it has ended; return exit code and reason."""
        env, story = self._settings.env, self._story
        self._leaving = ""
        story.begin_attempt(attempt.mode, attempt.snapshot, self._plan.rejections)
        oom_kills = read_oom_kills()
        write_loader(self._settings, self._plan)
        if against := self._ground.prepare(self._settings, self._plan, attempt):
            self._plan = self._plan.reject(against)
            return int(Exit.MODE_UNAVAILABLE), f"{against.code}: {against.detail}"
        if self._loop.stop_asked:
            return int(Exit.STOPPED), "stopped on request"
        if attempt.snapshot:
            if error := self._restore(attempt.snapshot):
                return self._after_failed_restore(error)
        else:
            argv = shlex.join(redact_argv(attempt.argv))
            _log.info("engine starting", mode=attempt.mode, argv=argv)
            raise_pids(self._plan)
            self._start_process(attempt.argv)
        story.keep(env.state_dir, running=True, starts=story.history.starts + 1)
        self._start_prober()
        verdict = self._watch(_RESTORED_READY_S if attempt.snapshot else env.ready_timeout_s)
        self._stop_prober()
        self._ground.rest()
        if self._snapshotting:
            self._snapshotting.abandon()
            self._snapshotting = None
        self._gap.begin(time.monotonic())
        status = self._end_process()
        if story.serving_since is not None:
            self._gap.close("stop")
        crashes = story.history.crashes
        if self._loop.stop_asked or self._leaving:
            code, reason = int(Exit.STOPPED), self._leaving or "stopped on request"
        else:
            code = verdict.exit_code if verdict else exit_code_of_status(status)
            oom_kills = read_oom_kills() - oom_kills
            reason = self._ground.explain(explain_end(status, verdict, oom_kills))
            crashes += 1
            _log.error("engine ended unasked", mode=attempt.mode, code=int(code), reason=reason)
        last = LastExit(int(code), reason, time.time())
        story.keep(env.state_dir, running=False, crashes=crashes, last_exit=last)
        if attempt.snapshot and story.serving_since is None and not self._loop.stop_asked:
            return self._after_failed_restore(SnapshotError("snapshot.restore", reason, _RECREATE))
        if attempt.mode == "ipc_cache" and story.serving_since is None:
            self._plan = self._plan.reject(weights.did_not_serve(reason))
        return int(code), reason

    def _restore(self, name: str) -> SnapshotError | None:
        """Bring an engine back from a snapshot; return why that failed, with nothing left of it."""
        _log.info("engine restoring", snapshot=name)
        self._gap.close("plan")
        self._clock = restoration = begin_restore(self._settings, self._plan, name, self._loop)
        self._process = restoration.wait(self._loop)
        if self._process:
            self._leftovers.note()
            if restoration.error:
                self._end_process()
        return restoration.error

    def _after_failed_restore(self, error: SnapshotError) -> tuple[int, str]:
        """The next rung follows, except where a stop is what ended the restore."""
        if not self._loop.stop_asked:
            self._reject_snapshot(error)
        return int(Exit.RESTORE), f"{error.code}: {error.detail}"

    def _reject_snapshot(self, error: SnapshotError) -> None:
        """Keep what is against this attempt's artifact, beside it and in the status."""
        wish = build_wish(self._settings, self._story.snapshot)
        rejection = reject(wish, error)
        self._plan = self._plan.reject(rejection)
        self._wanted.refuse(rejection)

    def _watch(self, limit_s: float) -> Fault | None:
        """Follow the engine until its first process ends, or return why it has to be ended."""
        process = self._process
        assert process is not None
        ready_deadline = time.monotonic() + limit_s
        ending: Ending | None = None
        look_at = time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if self._loop.stop_asked or self._leaving:
                ending = ending or Ending(self._settings, self._loop.wake)
                if not ending.begun and (not self._snapshotting or self._snapshotting.let_end()):
                    self._begin_end(ending)
                if ending.is_over(process):
                    return None
            trying = self._story.state is State.TRYING
            if trying and now > ready_deadline:
                remedy = "read its log above, or raise WARMHOLD_READY_TIMEOUT_S"
                return Fault("ready.timeout", f"not ready within {limit_s:.0f} s", remedy)
            if now >= look_at:
                self._leftovers.note()
                look_at = now + _SHM_LOOK_S
            auto_at = self._auto.due(self._settings, self._plan, self._story, self._prober)
            if auto_at is not None and now >= auto_at and not self._leaving:
                self._begin_snapshot(None)
            deadlines = [look_at, auto_at, ready_deadline if trying else None]
            deadlines += [item.deadline for item in (ending, self._snapshotting) if item]
            self._loop.wait(min(deadline for deadline in deadlines if deadline is not None))
            self._story.see_trouble(self._ground.trouble)
            if fault := self._take_reports() or self._follow_snapshot():
                return fault
        return None

    def _begin_end(self, ending: Ending) -> None:
        if self._loop.stop_asked:
            self._story.advance(State.STOPPING, f"draining up to {self._settings.env.drain_s} s")
        self._stop_prober()
        ending.begin()

    def take_order(self, order: Order) -> None:
        """Act on an order, or refuse it."""
        if self._story.state is not State.SERVING or not self._story.ready or self._snapshotting:
            detail = (self._snapshotting or self._story).detail
            order.refuse("snapshot.not-serving", detail, "try again later; see `warmhold status`")
        elif order.ends_engine:
            self._begin_restart(order)
        elif against := find_against_ours(self._plan.snapshots, self._story.snapshot, order.name):
            order.refuse(*against)
        else:
            self._begin_snapshot(order)

    def _begin_snapshot(self, order: Order | None) -> None:
        assert self._process is not None
        try:
            making = Snapshotting(order, self._settings, self._plan, self._process.pid, self._loop)
        except OSError as error:  # of memory, processes or descriptors there are too few
            _log.warning("no snapshot", code="snapshot.failed", detail=str(error))
            self._auto.note(self._plan, "snapshot.failed")
            if order:
                order.refuse("snapshot.failed", str(error), "see `docker stats`; try again")
            return
        self._snapshotting = making
        self._stop_prober()
        self._story.ready = False
        self._story.advance(State.SNAPSHOTTING, f"making the snapshot {making.name}")

    def _follow_snapshot(self) -> Fault | None:
        """Serve again as soon as the engine does; return a fault where it does not."""
        making = self._snapshotting
        if making is None:
            return None
        fault = making.follow()
        if fault is None and self._story.state is State.SNAPSHOTTING and not making.holds:
            self._story.advance(State.SERVING, "resumed after a snapshot; the canary is asked next")
            self._start_prober()
        if making.over:
            self._auto.note(self._plan, making.code)
            self._story.see_snapshot(making.name, making.code)
            self._snapshotting = None
        return fault

    def _begin_restart(self, order: Order) -> None:
        """Let the engine drain and end, where the plan says that it could start that way then."""
        asked = time.monotonic()
        if reason := self._wanted.take(order, self._command):
            self._gap.begin(asked)
            self._gap.close("plan")
            self._leaving = self._story.reason = reason
            self._story.ready = False

    def _take_reports(self) -> Fault | None:
        """Act on what the prober found; return a fault when the engine says that it is dead."""
        while self._prober and not self._prober.reports.empty():
            report = self._prober.reports.get()
            if self._story.state not in (State.TRYING, State.SERVING):
                continue
            if report.event is Event.LISTENING:
                self._clock.see_listening()
            elif report.event is Event.READY:
                self._on_ready(report)
            elif report.event is Event.DEGRADED:
                self._story.ready, self._story.reason = False, f"degraded: {report.reason}"
                _log.warning("engine degraded, not ready", reason=report.reason)
            else:
                detail = f"the engine says that it is dead: {report.reason}"
                return Fault("engine.dead", detail, "read its log above")
        return None

    def _on_ready(self, report: Report) -> None:
        self._story.ready = True
        if self._story.state is State.SERVING:
            self._story.reason = report.reason
            _log.info("engine recovered", reason=report.reason)
            return
        phases = self._gap.end(self._clock.finish())
        self._retries.see_serving()
        found = self._ground.summarise(phases) or weights.read_summary(self._settings.env.run_dir)
        if isinstance(self._clock, Restoration):
            found = self._clock.weights
        self._story.see_weights(found)
        self._story.see_serving(phases, report.reason)
        url = build_target(self._settings).url
        _log.info("READY", mode=self._story.mode, model=self._plan.model, url=url)
        self._leftovers.note()
        seconds, mode = phases.seconds, self._story.mode
        self._wanted.answer({"mode": mode, "total_s": phases.total_s, "seconds": seconds})

    def _fetch(self) -> bool:
        """Download the model; return whether it is there now (the plan is made anew then)."""
        self._story.advance(State.FETCHING, f"downloading {self._settings.model}")
        self._start_process(build_fetch_argv(self._settings))
        assert self._process is not None
        while self._process.poll() is None and not self._loop.stop_asked:
            self._loop.wait(None)
        if self._end_process() != 0 or self._loop.stop_asked:
            return False
        self._story.advance(State.SWEEP, "downloaded")
        self._gap.close("download")
        self._settings, self._plan = make_sound_plan(self._command)
        return self._plan.model_directory is not None

    def _start_process(self, argv: Sequence[str]) -> None:
        self._gap.close("plan")
        self._clock = PhaseClock()
        environment = inherit_environment(self._settings, self._plan.environment)
        self._process = launch(argv, environment, self._uid, self._clock.see_line, self._loop)

    def _start_prober(self) -> None:
        env, target = self._settings.env, build_target(self._settings)
        self._prober = Prober(target, env.canary_interval_s, env.canary_timeout_s, self._loop.wake)

    def _stop_prober(self) -> None:
        if self._prober:
            self._prober.stop()
        self._prober = None

    def _end_process(self) -> int:
        """End what is left of the engine's tree; return the status of its first process."""
        assert self._process is not None
        process, self._story.ready = self._process, False
        self._leftovers.note()
        left = process.end_tree(KILL_TIMEOUT_S)
        if left:
            _log.error("processes survive SIGKILL", pids=[item.pid for item in left])
        self._process = None
        self._leftovers.remove_files()
        status = process.poll()
        return -signal.SIGKILL if status is None else status

    def _after_crash(self, code: int, reason: str) -> tuple[int | None, str]:
        """A serving engine ended: always start again, more slowly when it serves only briefly."""
        assert self._story.serving_since is not None
        served_s = time.monotonic() - self._story.serving_since
        if not self._leaving and self._retries.see_crash(code, served_s) and self._story.snapshot:
            self._reject_snapshot(SnapshotError("snapshot.unstable", reason, _RECREATE))
        return None, reason

    def _after_failed_start(self, code: int, reason: str) -> tuple[int | None, str]:
        named = bool(self._plan.attempts and self._plan.attempts[-1].snapshot)
        final = self._retries.see_failed_start(code) or named
        self._wanted.refuse(Fault("engine.failed", reason, "read the engine's log above"))
        return (code if final else None), reason

    def _back_off(self, reason: str) -> None:
        wait_s = 0.0 if self._leaving else self._retries.wait_s
        self._story.advance(State.WAITING, f"{reason}; next start in {wait_s:.0f} s")
        deadline = time.monotonic() + wait_s
        while not self._loop.stop_asked and time.monotonic() < deadline:
            self._loop.wait(deadline)
        self._gap.close("wait")

    def _give_up(self, code: int, faults: Sequence[Fault]) -> int:
        for fault in faults:
            _log.error("giving up", code=fault.code, detail=fault.detail, remedy=fault.remedy)
        self._story.advance(State.FAILED, faults[0].detail)
        leave_exit_code(self._settings.env.run_dir, code)
        return int(code)
