# SPDX-License-Identifier: Apache-2.0
"""The engine's processes: found by parent or mark, and ended with certainty. All are real ones.

A faulty search could end every process of the machine, so a guard lets no signal pass to any but
the processes that these tests started, and the mark is another one than an engine's.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warmhold_entrypoint
import warmhold_snapshot
from warmhold_entrypoint.running import tree

PACKAGES = os.pathsep.join(
    str(Path(str(package.__file__)).parents[1])
    for package in (warmhold_entrypoint, warmhold_snapshot)
)
MARK = 2_000_003_631
# Starts two generations, the last in a session of its own; says all PIDs, then waits.
ROOT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import subprocess
grandchild = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(grandchild.pid, flush=True)
grandchild.wait()
'''], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""
# Adopts an orphan with a session of its own, and says its PID.
ADOPTING_ROOT = """
import subprocess, sys
from warmhold_entrypoint.running import tree
tree.become_subreaper()
command = ["sh", "-c", "setsid sleep 60 >/dev/null & echo $!"]
print(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout, flush=True, end="")
sys.stdin.read()
tree.reap_adopted()
print("reaped", flush=True)
"""


OURS: set[int] = set()


@pytest.fixture(autouse=True)
def nobody_else_is_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    send = signal.pidfd_send_signal

    def guarded(fd: int, signum: int) -> None:
        pid = re.search(
            r"^Pid:\s+(\S+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE
        )
        assert pid and int(pid[1]) in {*OURS, -1}, f"signal {signum} for a process not ours: {pid}"
        send(fd, signum)

    monkeypatch.setattr(signal, "pidfd_send_signal", guarded)
    monkeypatch.setattr(tree, "ENGINE_GROUP", MARK)


class Root(subprocess.Popen[str]):
    """A process that says its descendants' PIDs on a line, and ends when its stdin does."""

    def __init__(self, script: str) -> None:
        super().__init__(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": PACKAGES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.stdout is not None
        self.below = [int(word) for word in self.stdout.readline().split()]
        OURS.update(self.below)


def start(script: str) -> Iterator[Root]:
    root = Root(script)
    yield root
    tree.kill_members(root.pid, 5)
    root.kill()
    root.communicate(timeout=5)


@pytest.fixture
def root() -> Iterator[Root]:
    yield from start(ROOT)


@pytest.fixture
def adopting_root() -> Iterator[Root]:
    yield from start(ADOPTING_ROOT)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        OURS.add(process.pid)
        yield process
        process.kill()


def read(pid: int) -> tree.Process:
    process = tree.read_process(pid)
    assert process is not None
    return process


def numbers(processes: list[tree.Process]) -> list[int]:
    return [process.pid for process in processes]


# One process


def test_a_process_is_read(child: subprocess.Popen[bytes]) -> None:
    process = read(child.pid)
    assert (process.pid, process.parent) == (child.pid, os.getpid())
    assert process.start_ticks >= read(os.getpid()).start_ticks > 0
    assert process == read(child.pid)


@pytest.mark.parametrize("name", ["a) Z 1 (b", "with space", "(())", "new\nline"])
def test_any_name_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/bin/sleep")
    with subprocess.Popen([tmp_path / name, "60"]) as process:
        found = read(process.pid)
        process.kill()
    assert (found.name, found.parent) == (name, os.getpid())


def test_an_ended_process_is_none_reaped_or_not(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert tree.read_process(child.pid) is None
    child.wait()
    assert tree.read_process(child.pid) is None


def test_a_signal_reaches_its_process(child: subprocess.Popen[bytes]) -> None:
    assert tree.send_signal(read(child.pid), signal.SIGTERM) is True
    assert child.wait(5) == -signal.SIGTERM


def test_another_process_with_the_same_pid_gets_no_signal(child: subprocess.Popen[bytes]) -> None:
    earlier = dataclasses.replace(read(child.pid), start_ticks=read(child.pid).start_ticks - 1)
    assert tree.send_signal(earlier, signal.SIGKILL) is False
    assert tree.read_process(child.pid) is not None


def test_an_ended_process_gets_no_signal(child: subprocess.Popen[bytes]) -> None:
    process = read(child.pid)
    child.kill()
    child.wait()
    assert tree.send_signal(process, signal.SIGTERM) is False


# A tree


def test_descendants_are_found_whatever_their_session(root: Root) -> None:
    assert numbers(tree.find_members(root.pid)) == sorted(root.below)
    assert os.getsid(root.below[1]) == root.below[1] != os.getsid(root.pid)


def test_nobody_is_a_member_without_a_mark_or_a_parent(root: Root) -> None:
    assert tree.find_members() == []
    assert tree.find_members(root.below[-1]) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root may set the mark")
def test_a_marked_process_is_found_below_nobody() -> None:
    with subprocess.Popen(["sleep", "60"], extra_groups=[MARK], start_new_session=True) as process:
        found = tree.find_members()
        process.kill()
    assert numbers(found) == [process.pid]


def test_the_caller_and_its_ancestors_are_never_members() -> None:
    found = numbers(tree.find_members(1))
    assert found
    assert not {1, os.getpid(), os.getppid()} & set(found)


def test_all_members_are_killed_and_the_root_is_not(root: Root) -> None:
    assert tree.kill_members(root.pid, 5) == []
    assert [pid for pid in root.below if tree.read_process(pid)] == []
    assert tree.read_process(root.pid) is not None
    assert root.poll() is None


def test_whatever_is_below_is_killed(root: Root) -> None:
    assert root.below
    tree.kill_below(root.pid, 5)
    assert [pid for pid in root.below if tree.read_process(pid)] == []
    assert root.poll() is None


def test_a_stopped_process_is_killed_too(root: Root) -> None:
    for pid in root.below:
        os.kill(pid, signal.SIGSTOP)
    assert tree.kill_members(root.pid, 5) == []
    assert [pid for pid in root.below if tree.read_process(pid)] == []


def test_a_subreaper_adopts_kills_and_reaps_orphans(adopting_root: Root) -> None:
    (orphan,) = adopting_root.below
    assert read(orphan).parent == adopting_root.pid
    assert numbers(tree.find_members(adopting_root.pid)) == [orphan]
    assert tree.kill_members(adopting_root.pid, 5) == []
    assert Path("/proc", str(orphan)).exists()  # a zombie, which would block a restore
    said, _ = adopting_root.communicate(timeout=5)
    assert said == "reaped\n"
    assert not Path("/proc", str(orphan)).exists()


def test_the_guard_of_these_tests_holds() -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        with pytest.raises(AssertionError, match="not ours"):
            tree.kill_members(os.getpid(), 1)
        assert stranger.poll() is None
        stranger.kill()
