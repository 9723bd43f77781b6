# SPDX-License-Identifier: Apache-2.0
"""What is ended before a start, and in which order."""

from pathlib import Path

import pytest
from warmhold_entrypoint.running import sweep, tree
from warmhold_entrypoint.running.sweep import Leftovers


def test_an_engine_is_ended_before_a_restore_is_waited_for_and_what_that_makes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may lock what criu locks: waiting for that would take all of the limit."""
    alive = [tree.Process(4_000_001, 1, 1, "vllm")]
    events: list[str] = []

    def wait(timeout_s: float) -> bool:
        events.append(f"waited with {len(alive)} alive")
        alive.append(tree.Process(4_000_002, 2, 1, "restored"))
        return True

    def kill(*_: object) -> list[tree.Process]:
        events.append(f"killed {[process.name for process in alive]}")
        alive.clear()
        return []

    monkeypatch.setattr(tree, "find_members", lambda *_: list(alive))
    monkeypatch.setattr(tree, "kill_members", kill)
    monkeypatch.setattr(tree, "reap_adopted", lambda: None)
    monkeypatch.setattr(sweep, "wait_for_others", wait)
    Leftovers(tmp_path).sweep()
    assert events == ["killed ['vllm']", "waited with 0 alive", "killed ['restored']"]
