# SPDX-License-Identifier: Apache-2.0
"""What happened to a runner's engines and how the present one is: the one place that status reads.

Every change of state takes an edge of the table, and is logged.
"""

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Rejection
from ..log import Log
from ..running.engine_http import Target
from ..running.phases import Phases
from ..running.readiness import Prober
from ..weight_cache import weights
from .history import History, write_history
from .states import EDGES, State
from .status import Status

_log = Log("engine")


@dataclass
class Story:
    """State and reason, the attempt's mode and what came of it, and the history before it."""

    history: History
    rejections: Sequence[Rejection]
    state: State = State.SWEEP
    reason: str = "the runner started"
    ready: bool = False
    mode: str | None = None
    snapshot: str = ""
    serving_since: float | None = None
    phases: Phases | None = None
    weights: dict[str, Any] | None = field(default=None)
    degraded: str = ""  # what is wrong although it serves
    saved_as: str = ""  # the last snapshot of this engine, made since it started

    @property
    def detail(self) -> str:
        """State and reason in a line."""
        return f"{self.state}: {self.reason}"

    def begin_attempt(self, mode: str, snapshot: str, rejections: Sequence[Rejection]) -> None:
        """Forget the attempt before, and say which one begins."""
        self.mode, self.snapshot, self.rejections = mode, snapshot, rejections
        self.serving_since = self.phases = self.weights = None
        self.degraded = self.saved_as = ""
        self.advance(State.TRYING, f"starting in mode {mode}")

    def advance(self, new: State, reason: str) -> None:
        """Take an edge of the table, and say so."""
        if new not in EDGES[self.state]:
            raise AssertionError(f"no edge from {self.state} to {new}")
        _log.info("state", old=self.state, new=new, reason=reason)
        self.state, self.reason = new, reason

    def see_serving(self, phases: Phases, reason: str) -> None:
        """The first token has come."""
        self.phases, self.serving_since = phases, time.monotonic()
        self.advance(State.SERVING, reason)
        seconds = {f"{name}_s": value for name, value in phases.seconds.items()}
        unaccounted_s = phases.unaccounted_s
        _log.info("start timing", total_s=phases.total_s, **seconds, unaccounted_s=unaccounted_s)

    def see_weights(self, found: dict[str, Any] | None) -> None:
        """Given a summary of the loads, tell what happened, whatever the plan expected."""
        self.weights = found
        if found is None:
            return
        _log.info("weights", **found)
        if not self.snapshot:
            self.mode = found["mode"]
            self.rejections = weights.correct(self.rejections, found)

    def see_snapshot(self, name: str, code: str) -> None:
        """Given the name of a snapshot in the making, and why there is none ("": it is there), keep
        that."""
        self.saved_as = self.saved_as if code else name

    def see_trouble(self, trouble: str) -> None:
        """Given what is wrong with what holds the engine's weights ("" for nothing), say so where
        that is new: it serves on, and its next start is a slow one."""
        if trouble == self.degraded:
            return
        self.degraded = trouble
        if trouble:
            remedy = "none: the holder is started again with the next engine"
            _log.warning("degraded: weights are not held", reason=trouble, remedy=remedy)
        else:
            _log.info("weights are held again")

    def keep(self, state_dir: Path, **changes: object) -> None:
        """Given the state directory, change the history and keep it there."""
        self.history = dataclasses.replace(self.history, **changes)  # type: ignore[arg-type]
        try:
            write_history(state_dir, self.history)
        except OSError as error:  # a full volume ends no engine
            _log.warning("cannot keep the history", detail=str(error))

    def status(
        self, model: str, target: Target, pid: int | None, phase: str, prober: Prober | None
    ) -> Status:
        """Given what is known elsewhere, return what the runner's socket answers."""
        now = time.monotonic()
        phases, last = self.phases, self.history.last_exit
        since = self.serving_since if self.state is State.SERVING else None
        last_ok = prober.last_ok if prober else None
        return {
            "state": self.state,
            "ready": self.state is State.SERVING and self.ready,
            "reason": self.reason,
            "degraded": self.degraded,
            "mode": self.mode,
            "snapshot": self.snapshot,
            "saved_as": self.saved_as,
            "phase": phase if self.state is State.TRYING else None,
            "rejections": [dataclasses.asdict(item) for item in self.rejections],
            "weights": self.weights,
            "model": model,
            "url": target.url,
            "pid": pid,
            "runner_pid": os.getpid(),
            "uptime_s": now - since if since is not None else None,
            "starts": self.history.starts,
            "crashes": self.history.crashes,
            "last_exit": dataclasses.asdict(last) if last else None,
            "phases": dict(phases.seconds, unaccounted=phases.unaccounted_s) if phases else {},
            "total_s": phases.total_s if phases else None,
            "probe": {
                "last_ok_s_ago": now - last_ok if last_ok is not None else None,
                "missed": prober.missed if prober else 0,
            },
        }
