# SPDX-License-Identifier: Apache-2.0
"""When a snapshot is made without being asked for: once there is none that fits, and nobody asks.

At most one attempt for each identity and each reason in a container, whatever came of it, so that
an engine that cannot be snapshotted is left alone; one that was busy is tried a few times. What was
tried is kept in the run directory, which lives as long as the container.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import read_json, write_atomically
from ..log import Log
from ..plan import Plan
from ..reporting.states import State
from ..reporting.story import Story
from ..running.readiness import Prober
from ..settings import Settings
from .restored import CIRCUMSTANTIAL
from .upstream import find_against_ours

FILE_NAME = "auto-snapshot.json"
_TRIES = 5
_BUSY = ("snapshot.busy", "snapshot.stopped")
_log = Log("snapshot")


class AutoSnapshots:
    """What was tried already. Owns the file that says so."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._last = 0.0
        self._tried: dict[str, int] = (read_json(self._path) or {}).get("tried", {})

    def due(
        self, settings: Settings, plan: Plan, story: Story, prober: Prober | None
    ) -> float | None:
        """Return when one is to be made if no request comes until then (monotonic), or None."""
        serving = story.state is State.SERVING and story.ready and prober is not None
        if settings.env.snapshot != "auto" or not serving:
            return None
        found = plan.snapshots
        against = find_against_ours(found, story.snapshot)
        if against or found.code in ("", *CIRCUMSTANTIAL):
            return None  # a new artifact is no answer
        if plan.memory.by_uuid and not _are_shared(story.weights):
            return None  # the maker refuses; the next engine may share them
        if self._tried.get(_digest(plan), 0) >= _TRIES:
            return None
        assert prober is not None and story.serving_since is not None
        since = max(prober.last_moved, story.serving_since, self._last)
        return since + settings.env.snapshot_idle_s

    def note(self, plan: Plan, code: str) -> None:
        """Given the plan whose engine was snapshotted, and what came of it ("" for an artifact),
        remember that."""
        self._last = time.monotonic()
        digest = _digest(plan)
        self._tried[digest] = self._tried.get(digest, 0) + 1 if code in _BUSY else _TRIES
        try:
            write_atomically(self._path, json.dumps({"tried": self._tried}))
        except OSError as error:
            _log.warning("cannot keep what was tried", detail=str(error))


def _are_shared(weights: Mapping[str, Any] | None) -> bool:
    return bool(weights and (weights["mode"] != "disk" or weights["published"]))


def _digest(plan: Plan) -> str:
    text = json.dumps([dict(plan.snapshots.identity), plan.snapshots.code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
