# SPDX-License-Identifier: Apache-2.0
"""What happened to engines before: starts, restarts and the last exit, across every restart.

One small file in the state volume, written by the runner alone. `running` stays set when the whole
container was killed, and that is how the next start knows.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

from ..files import read_json, write_atomically

FILE_NAME = "history.json"


@dataclass(frozen=True)
class LastExit:
    """How an engine ended: exit code as a shell has it, reason, and when (Unix time, s)."""

    code: int
    reason: str
    at: float


@dataclass(frozen=True)
class History:
    """Counts of this state volume. `crashes` are ends that nobody asked for."""

    starts: int = 0
    crashes: int = 0
    running: bool = False
    last_exit: LastExit | None = None


def read_history(state_dir: Path) -> History:
    """Given the state directory, return the history; an engine left as running was killed."""
    value = read_json(state_dir / FILE_NAME)
    if value is None:
        return History()
    try:
        last = value["last_exit"]
        history = History(
            starts=int(value["starts"]),
            crashes=int(value["crashes"]),
            running=bool(value["running"]),
            last_exit=LastExit(**last) if last else None,
        )
    except (KeyError, TypeError, ValueError):
        return History()
    if history.running:
        reason = "its container or runner was killed (137: out of memory, or docker kill)"
        return dataclasses.replace(
            history,
            running=False,
            crashes=history.crashes + 1,
            last_exit=LastExit(137, reason, time.time()),
        )
    return history


def write_history(state_dir: Path, history: History) -> None:
    """Given the state directory, keep the history there."""
    write_atomically(state_dir / FILE_NAME, json.dumps(dataclasses.asdict(history)))
