# SPDX-License-Identifier: Apache-2.0
"""A child that was not started here, and restores that fail before there is one."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from warmhold_entrypoint.restored import CIRCUMSTANTIAL, AdoptedChild, Restoration, Wish, reject
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.mark import read_mark

PATIENCE_S = 60


def adopt(code: str) -> AdoptedChild:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    return AdoptedChild(pid, os.pidfd_open(pid))


def test_a_status_of_its_own() -> None:
    child = adopt("raise SystemExit(7)")
    assert child.wait(PATIENCE_S) == child.poll() == 7
    child.send_signal(signal.SIGKILL)  # it has ended: nobody is hit


def test_a_signal_is_told_as_subprocess_does() -> None:
    child = adopt("import signal; signal.pause()")
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0)
    child.send_signal(signal.SIGKILL)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_one_that_somebody_else_has_reaped() -> None:
    child = adopt("pass")
    os.waitpid(child.pid, 0)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_no_descriptor_is_left() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    adopt("pass").wait(PATIENCE_S)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_artifact_that_is_gone(tmp_path: Path) -> None:
    ended = threading.Event()
    wish = Wish(tmp_path / "snapshots", "one", tmp_path / "c.sock", tmp_path / "v.sock", True)
    restoration = Restoration(wish, ended.set)
    assert ended.wait(PATIENCE_S) and restoration.done
    assert restoration.process is None
    assert restoration.error and restoration.error.code == "snapshot.absent"
    os.close(restoration.reader)


def test_why_it_failed_stays_beside_the_artifact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "snapshots")
    wish = Wish(store.folder, "one", tmp_path, tmp_path, True)
    error = SnapshotError("snapshot.restore", "why", "do", ["Error (a.c:1): no"])
    assert reject(wish, error, {}).code == "snapshot.restore", "there is no such artifact"
    store.path("one").mkdir()
    rejection = reject(wish, error, {"container": "c"})
    assert (rejection.mode, rejection.detail, rejection.remedy) == ("snapshot", "why", "do")
    mark = read_mark(store.path("one"))
    assert mark and (mark.code, mark.circumstances) == ("snapshot.restore", {"container": "c"})


def test_what_is_no_fault_of_an_artifact_leaves_no_mark(tmp_path: Path) -> None:
    store = Store(tmp_path / "snapshots")
    store.path("one").mkdir()
    wish = Wish(store.folder, "one", tmp_path, tmp_path, True)
    for code in CIRCUMSTANTIAL:
        assert reject(wish, SnapshotError(code, "why", "do"), {}).code == code
    assert read_mark(store.path("one")) is None
