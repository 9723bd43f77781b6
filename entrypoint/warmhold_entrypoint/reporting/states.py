# SPDX-License-Identifier: Apache-2.0
"""The runner's states and the edges between them."""

from enum import StrEnum


class State(StrEnum):
    """Where the runner is."""

    SWEEP = "SWEEP"
    FETCHING = "FETCHING"
    TRYING = "TRYING"
    SERVING = "SERVING"
    SNAPSHOTTING = "SNAPSHOTTING"
    WAITING = "WAITING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


EDGES = {
    State.SWEEP: {State.FETCHING, State.TRYING, State.WAITING, State.STOPPED, State.FAILED},
    State.FETCHING: {State.SWEEP, State.WAITING, State.STOPPED, State.FAILED},
    State.TRYING: {
        State.SERVING,
        State.TRYING,
        State.WAITING,
        State.STOPPING,
        State.STOPPED,
        State.FAILED,
    },
    State.SERVING: {State.SNAPSHOTTING, State.WAITING, State.STOPPING, State.STOPPED},
    State.SNAPSHOTTING: {State.SERVING, State.WAITING, State.STOPPING, State.STOPPED},
    State.WAITING: {State.SWEEP, State.STOPPED},
    State.STOPPING: {State.STOPPED},
    State.STOPPED: set(),
    State.FAILED: set(),
}
