# SPDX-License-Identifier: Apache-2.0
"""What has been revoked goes before an engine starts, and nothing else does."""

import fcntl
import os
from pathlib import Path
from typing import cast

import pytest
from warmhold_entrypoint.plan import Plan
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode.snapshots import FOLDER, Snapshots
from warmhold_entrypoint.snapshot_mode.snapshotting import remove_revoked
from warmhold_snapshot.artifact import Store

Capture = pytest.LogCaptureFixture


class Planned:
    """As much of a plan as is looked at."""

    def __init__(self, *revoked: str) -> None:
        self.snapshots = Snapshots("snapshot.off", revoked=revoked)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two artifacts under no key: what goes is not read before."""
    folder = Store(tmp_path / FOLDER).folder
    for name in ("one", "two"):
        (folder / name / "images").mkdir(parents=True)
        (folder / name / "images" / "pages-1.img").write_bytes(b"sk-1")
    return folder


def act(folder: Path, *revoked: str) -> set[str]:
    settings: Settings
    settings, _, _ = read_settings({"WARMHOLD_STATE_DIR": str(folder.parent)}, ())
    remove_revoked(settings, cast(Plan, Planned(*revoked)))
    return {path.name for path in folder.iterdir()} - {".key"} if folder.exists() else set()


def test_only_the_revoked_go(folder: Path) -> None:
    assert act(folder) == {"one", "two"}
    assert act(folder, "one") == {"two"}
    assert list((folder / "two").rglob("*.img"))


def test_a_key_that_cannot_be_used_keeps_nothing(folder: Path) -> None:
    (folder / ".key").write_bytes(b"short")
    assert act(folder, "one", "two") == set()


def test_the_weights_of_the_revoked_go_too(folder: Path) -> None:
    (folder / ".weights").mkdir(mode=0o700)
    (folder / ".weights" / "0123456789abcdef").write_bytes(b"w")
    act(folder)
    assert list((folder / ".weights").iterdir())
    act(folder, "one")
    assert list((folder / ".weights").iterdir()) == []


def test_what_a_killed_maker_left_goes_too(folder: Path) -> None:
    (folder / ".tmp-three-0123" / "images").mkdir(parents=True)
    (folder / ".tmp-three-0123" / "images" / "pages-1.img").write_bytes(b"sk-1")
    assert act(folder) == {"one", "two"}


def test_what_is_being_made_or_restored_stays(folder: Path, caplog: Capture) -> None:
    (folder / ".tmp-three-0123").mkdir()
    locks = [os.open(folder / name, os.O_RDONLY) for name in (".tmp-three-0123", "one")]
    try:
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert act(folder, "one", "two") == {".tmp-three-0123", "one"}
    finally:
        for lock in locks:
            os.close(lock)
    levels = [record.levelname for record in caplog.records if record.levelname != "INFO"]
    assert levels == ["ERROR"], "and it is said"
    assert act(folder, "one") == set()


def test_there_may_be_no_folder(tmp_path: Path, caplog: Capture) -> None:
    assert act(tmp_path / FOLDER) == set()
    assert caplog.records == []
