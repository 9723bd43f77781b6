# SPDX-License-Identifier: Apache-2.0
"""Verdicts that criu asks for: good, bad, late, and from a caller that has gone."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from criu_script import call_script
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.verdict import judging


def test_a_good_one(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with judging(tmp_path, "post-restore", lambda over: 7) as verdict:
        script = verdict.script
        assert call_script(script, "post-restore", verdict.fds) == 0
        assert verdict.require() == 7 == verdict.require()
        assert list(tmp_path.iterdir()) == [script]
    assert list(tmp_path.iterdir()) == []
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_other_steps_ask_nobody(tmp_path: Path) -> None:
    ended = threading.Event()
    judge = lambda over: over.wait(60) and ended.set()  # noqa: E731
    with judging(tmp_path, "post-restore", judge) as verdict:
        assert call_script(verdict.script, "pre-resume", verdict.fds) == 0
        assert not ended.is_set()
    assert ended.is_set(), "it was told that nobody waits, and waited for"


def test_a_bad_one(tmp_path: Path) -> None:
    def refuse(over: threading.Event) -> None:
        raise SnapshotError("snapshot.damaged", "no")

    with judging(tmp_path, "post-restore", refuse) as verdict:
        assert call_script(verdict.script, "post-restore", verdict.fds) != 0
        with pytest.raises(SnapshotError, match="damaged"):
            verdict.require()
        assert isinstance(verdict.error, SnapshotError)


def test_nothing_is_done_before_the_question(tmp_path: Path) -> None:
    asked: list[int] = []
    judge = lambda over: asked.append(1)  # noqa: E731
    with judging(tmp_path, "post-dump", judge, when_asked=True) as verdict:
        assert call_script(verdict.script, "pre-dump", verdict.fds) == 0 and asked == []
        assert call_script(verdict.script, "post-dump", verdict.fds) == 0 and asked == [1]
        verdict.require()


def test_a_criu_that_never_asks(tmp_path: Path) -> None:
    asked: list[int] = []
    judge = lambda over: asked.append(1)  # noqa: E731
    with (
        judging(tmp_path, "post-dump", judge, when_asked=True) as verdict,
        pytest.raises(SnapshotError, match="did not ask"),
    ):
        verdict.require()
    assert asked == []
    with judging(tmp_path, "post-dump", judge, when_asked=True):
        pass
    assert asked == []


CALLER = """
import subprocess, sys, threading
from pathlib import Path
from warmhold_snapshot.verdict import judging
folder, when_asked, criu = sys.argv[1:]
judge = lambda over: threading.Event().wait(60)
with judging(Path(folder), "post-dump", judge, when_asked == "True") as verdict:
    subprocess.run([sys.executable, "-c", criu, str(verdict.script)], pass_fds=verdict.fds)
"""
CRIU = """
import os, subprocess, sys
print("ready", flush=True)
sys.stdin.readline()
environment = {**os.environ, "CRTOOLS_SCRIPT_ACTION": "post-dump"}
print(subprocess.run([sys.argv[1]], env=environment).returncode, flush=True)
"""


@pytest.mark.parametrize("when_asked", [False, True])
def test_a_caller_that_was_killed(tmp_path: Path, when_asked: bool) -> None:
    """criu is left alone with its pipes, and has its answer at once."""
    with subprocess.Popen(
        [sys.executable, "-c", CALLER, str(tmp_path), str(when_asked), CRIU],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as caller:
        assert caller.stdin and caller.stdout
        assert caller.stdout.readline() == "ready\n"
        caller.kill()
        caller.wait()
        caller.stdin.write("\n")
        caller.stdin.flush()
        assert int(caller.stdout.readline()) != 0
