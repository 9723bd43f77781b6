# SPDX-License-Identifier: Apache-2.0
"""Process and thread ids of real processes, and of canned /proc texts."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from warmhold_snapshot import pids
from warmhold_snapshot.errors import SnapshotError

# A process with a thread, and a child with a session of its own.
BODY = """
import os, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    os.write(writer, b"r")
    os.read(0, 1)
    os._exit(0)
os.read(reader, 1)
print(pid, flush=True)
os.read(0, 1)
"""


@pytest.fixture
def child() -> Iterator[tuple[int, int]]:
    with subprocess.Popen(
        [sys.executable, "-c", BODY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def test_a_tree(child: tuple[int, int]) -> None:
    root, below = pids.read_tree(child[0])
    assert (root.pid, below.pid, below.parent) == (*child, child[0])
    assert below.session == below.pid and root.session != root.pid
    assert len(root.threads) == 2 and len(below.threads) == 1
    ids = pids.collect_ids([root, below])
    assert ids >= {root.pid, *root.threads, below.pid}


def test_taken(child: tuple[int, int]) -> None:
    root = pids.read_tree(child[0])[0]
    (thread,) = set(root.threads) - {root.pid}
    taken = pids.find_taken([*child, thread, 2**22 + 5])
    assert set(taken) == {*child, thread}
    assert taken[thread].startswith("thread of")


def test_a_session_without_its_leader_is_taken(tmp_path: Path) -> None:
    (tmp_path / "50" / "task" / "50").mkdir(parents=True)
    stat = "50 (a (b) c) S 1 40 41 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0"
    (tmp_path / "50" / "stat").write_text(stat)
    assert pids.read_process(50, tmp_path) == pids.Process(50, 1, 40, 41, "a (b) c", 777, (50,))
    assert set(pids.find_taken([39, 40, 41, 50], tmp_path)) == {40, 41, 50}


def test_waiting_ends(child: tuple[int, int]) -> None:
    assert set(pids.wait_until_free([child[0]], 0.05)) == {child[0]}
    assert pids.wait_until_free([2**22 + 5], 0.05) == {}


def test_no_tree() -> None:
    with pytest.raises(SnapshotError) as caught:
        pids.read_tree(2**22 + 5)
    assert caught.value.code == "snapshot.no-process"


def test_the_cursor_moves() -> None:
    before = pids.read_cursor()
    after = pids.raise_cursor(before + 200)
    assert after >= before + 200 and pids.read_cursor() >= before + 200
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process.pid > before + 200
    assert pids.raise_cursor(before) >= before + 200, "nothing to do"
    assert threading.active_count() == 1


def test_the_cursor_is_bounded() -> None:
    with pytest.raises(SnapshotError) as caught:
        pids.raise_cursor(pids.read_cursor() + 1000, most=10)
    assert caught.value.code == "snapshot.pid-range"
    with pytest.raises(SnapshotError):
        pids.raise_cursor(pids.read_pid_max())


def test_a_signal_is_for_the_same_process_only(child: tuple[int, int]) -> None:
    stat = pids.read_stat(child[1])
    assert stat is not None
    assert not pids.send_signal(child[1], stat.start_ticks + 1, signal.SIGKILL)
    assert Path(f"/proc/{child[1]}/exe").exists()
    assert pids.send_signal(child[1], stat.start_ticks, signal.SIGKILL)


def test_descendants_where_parents_form_a_ring() -> None:
    parents = {2: 1, 3: 2, 1: 3, 5: 2, 7: 7, 8: 7}
    assert pids.find_below(1, parents) == [2, 3, 5]
    assert pids.find_below(9, parents) == []
