# SPDX-License-Identifier: Apache-2.0
"""When a snapshot is made without being asked for."""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from warmhold_entrypoint.gpus.gpu_memory import Need
from warmhold_entrypoint.reporting.history import History
from warmhold_entrypoint.reporting.states import State
from warmhold_entrypoint.reporting.story import Story
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode.auto import AutoSnapshots
from warmhold_entrypoint.snapshot_mode.snapshots import Snapshots


def settings(**variables: str) -> Settings:
    environ = {f"WARMHOLD_{name}": value for name, value in variables.items()}
    made, faults, _ = read_settings(environ, ())
    assert faults == []
    return made


WANTED = settings(SNAPSHOT="auto", SNAPSHOT_IDLE_S="20")
ABSENT = Snapshots(identity={"kernel": "k"})
PROBER: Any = SimpleNamespace(last_moved=150.0)


def plan(found: Snapshots = ABSENT, gpus: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(snapshots=found, memory=Need(dict.fromkeys(gpus, 1)))


def story(**changes: Any) -> Story:
    serving = Story(History(), (), State.SERVING, ready=True, serving_since=100.0)
    return dataclasses.replace(serving, **changes)


@pytest.fixture
def auto(tmp_path: Path) -> AutoSnapshots:
    return AutoSnapshots(tmp_path)


def test_it_waits_until_nobody_asks(auto: AutoSnapshots) -> None:
    assert auto.due(WANTED, plan(), story(), PROBER) == 170
    assert auto.due(WANTED, plan(), story(serving_since=160.0), PROBER) == 180


@pytest.mark.parametrize(
    "code", ["snapshot.identity-mismatch", "snapshot.marked-failed", "snapshot.damaged"]
)
def test_what_a_new_one_is_the_answer_to(auto: AutoSnapshots, code: str) -> None:
    found = dataclasses.replace(ABSENT, code=code)
    assert auto.due(WANTED, plan(found), story(), PROBER) == 170


@pytest.mark.parametrize(
    "changes",
    [
        {"code": "snapshot.weights-absent"},
        {"code": "snapshot.rights", "identity": {}},
        {"code": "", "name": "one"},
        {"identity": {}},
    ],
)
def test_what_it_is_no_answer_to(auto: AutoSnapshots, changes: dict[str, Any]) -> None:
    found = dataclasses.replace(ABSENT, **changes)
    assert auto.due(WANTED, plan(found), story(), PROBER) is None


@pytest.mark.parametrize(
    ("weights", "at"),
    [
        (None, None),
        ({"mode": "disk", "published": []}, None),
        ({"mode": "disk", "published": ["g"]}, 170),
        ({"mode": "ipc_cache", "published": []}, 170),
        ({"mode": "flat", "published": ["g"]}, 170),
    ],
)
def test_none_of_weights_that_a_gpu_alone_has(
    auto: AutoSnapshots, weights: dict[str, Any] | None, at: float | None
) -> None:
    assert auto.due(WANTED, plan(gpus=("u0",)), story(weights=weights), PROBER) == at
    assert auto.due(WANTED, plan(), story(weights=weights), PROBER) == 170


def test_only_a_serving_engine(auto: AutoSnapshots) -> None:
    assert auto.due(WANTED, plan(), story(ready=False), PROBER) is None
    assert auto.due(WANTED, plan(), story(state=State.SNAPSHOTTING), PROBER) is None
    assert auto.due(WANTED, plan(), story(), None) is None
    assert auto.due(settings(SNAPSHOT="manual"), plan(), story(), PROBER) is None


@pytest.mark.parametrize("code", ["", "snapshot.dump"])
def test_once_for_each_identity_in_a_container(
    auto: AutoSnapshots, tmp_path: Path, code: str
) -> None:
    auto.note(plan(), code)
    for again in (auto, AutoSnapshots(tmp_path)):
        assert again.due(WANTED, plan(), story(), PROBER) is None
        other = dataclasses.replace(ABSENT, identity={"kernel": "other"})
        assert again.due(WANTED, plan(other), story(), PROBER) is not None
        again_failed = dataclasses.replace(ABSENT, code="snapshot.marked-failed")
        assert again.due(WANTED, plan(again_failed), story(), PROBER) is not None


def test_a_busy_engine_is_tried_a_few_times_and_never_at_once(auto: AutoSnapshots) -> None:
    for _ in range(4):
        auto.note(plan(), "snapshot.busy")
        due = auto.due(WANTED, plan(), story(), PROBER)
        assert due is not None and due > time.monotonic() + 10
    auto.note(plan(), "snapshot.busy")
    assert auto.due(WANTED, plan(), story(), PROBER) is None


def test_what_cannot_be_kept_is_remembered(
    auto: AutoSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("warmhold_entrypoint.snapshot_mode.auto.write_atomically", fail)
    auto.note(plan(), "")
    assert auto.due(WANTED, plan(), story(), PROBER) is None
