# SPDX-License-Identifier: Apache-2.0
"""When a snapshot is made without being asked for: once there is none that fits, and nobody asks.

At most one attempt for each identity in a container, whatever came of it, so that an engine that
cannot be snapshotted is left alone. What was tried is kept in the run directory, which lives as
long as the container.
"""

import hashlib
import json
from pathlib import Path

from .files import read_json, write_atomically
from .plan import Plan
from .readiness import Prober
from .settings import Settings
from .states import State
from .story import Story

FILE_NAME = "auto-snapshot.json"
# What a new artifact is the answer to.
_ANSWERED = (
    *("snapshot.absent", "snapshot.identity-mismatch"),
    *("snapshot.marked-failed", "snapshot.damaged", "snapshot.weights-damaged"),
)


class AutoSnapshots:
    """What was tried already. Owns the file that says so."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._tried = set((read_json(self._path) or {}).get("tried", []))

    def due(
        self, settings: Settings, plan: Plan, story: Story, prober: Prober | None
    ) -> float | None:
        """Return when one is to be made if no request comes until then (monotonic), or None."""
        serving = story.state is State.SERVING and story.ready and prober is not None
        if settings.env.snapshot != "auto" or not serving:
            return None
        found = plan.snapshots
        if not found.identity or found.code not in _ANSWERED or _digest(plan) in self._tried:
            return None
        assert prober is not None and story.serving_since is not None
        return max(prober.last_moved, story.serving_since) + settings.env.snapshot_idle_s

    def note(self, plan: Plan) -> None:
        """Given the plan whose engine is being snapshotted, remember that."""
        self._tried.add(_digest(plan))
        write_atomically(self._path, json.dumps({"tried": sorted(self._tried)}))


def _digest(plan: Plan) -> str:
    text = json.dumps(dict(plan.snapshots.identity), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
