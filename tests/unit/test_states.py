# SPDX-License-Identifier: Apache-2.0
"""The runner's table of states, and its patience between starts."""

import pytest
from warmhold_entrypoint.reporting.states import EDGES, State
from warmhold_entrypoint.running.retries import Retries, back_off_s

FINAL = {State.STOPPED, State.FAILED}


def test_the_table_is_total() -> None:
    assert set(EDGES) == set(State)


def reachable(start: State) -> set[State]:
    seen, queue = {start}, [start]
    while queue:
        new = EDGES[queue.pop()] - seen
        seen |= new
        queue += new
    return seen


def test_every_state_is_reachable() -> None:
    assert reachable(State.SWEEP) == set(State)


@pytest.mark.parametrize("state", sorted(set(State) - FINAL))
def test_no_state_is_a_trap(state: State) -> None:
    assert reachable(state) & FINAL


def test_the_last_states_are_final() -> None:
    assert {state for state, edges in EDGES.items() if not edges} == FINAL


def test_serving_is_reached_by_trying_and_after_a_snapshot() -> None:
    before = {state for state, edges in EDGES.items() if State.SERVING in edges}
    assert before == {State.TRYING, State.SNAPSHOTTING}


def test_a_snapshot_is_made_of_a_serving_engine_only() -> None:
    before = {state for state, edges in EDGES.items() if State.SNAPSHOTTING in edges}
    assert before == {State.SERVING}


@pytest.mark.parametrize("state", sorted(set(State) - FINAL))
def test_a_stop_is_possible_from_every_state(state: State) -> None:
    """It may come while what an ended engine left is being killed: no draining is left to do."""
    assert State.STOPPED in EDGES[state]


def test_states_are_written_as_their_names() -> None:
    assert [str(state) for state in State] == [state.name for state in State]


@pytest.mark.parametrize(
    ("failures", "wait_s"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (1000, 60)]
)
def test_back_off_grows_up_to_a_minute(failures: int, wait_s: float) -> None:
    assert back_off_s(failures) == wait_s


def test_engines_that_end_by_themselves_again_and_again() -> None:
    retries = Retries(max_failures=3)
    assert [retries.see_crash(1, 5.0) for _ in range(3)] == [False, False, True]
    assert retries.wait_s == 2.0
    assert not retries.see_crash(1, 100.0), "it served for long"
    assert retries.wait_s == 0.0


def test_killed_engines_only_slow_the_next_start() -> None:
    retries = Retries(max_failures=3)
    assert not any(retries.see_crash(137, 5.0) for _ in range(9))
    assert retries.wait_s == 60.0


def test_starts_that_fail() -> None:
    retries = Retries(max_failures=2)
    assert not retries.see_failed_start(1)
    retries.see_serving()
    assert [retries.see_failed_start(1) for _ in range(2)] == [False, True]
    assert Retries(max_failures=9).see_failed_start(127)
