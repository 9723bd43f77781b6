# SPDX-License-Identifier: Apache-2.0
"""Files in /dev/shm: whose they are is seen from who holds them, never from a name."""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from warmhold_entrypoint.running import tree
from warmhold_entrypoint.running.shm import LEDGER_FILE, ShmLedger, find_inodes

# Holds the first file open, the second mapped, and the third in both ways but deleted.
HOLDER = """
import mmap, os, sys
opened, mapped, deleted = [open(path, "r+b") for path in sys.argv[1:]]
views = [mmap.mmap(file.fileno(), 0) for file in (mapped, deleted)]
mapped.close()
os.unlink(sys.argv[3])
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def files() -> Iterator[list[Path]]:
    """Four files; the holder gets all but the last."""
    prefix = f"warmhold test {os.getpid()} "
    made = [Path("/dev/shm", prefix + name) for name in ("1 open", "2 mapped", "3 deleted", "4")]
    for path in made:
        path.write_bytes(bytes(4096))
    yield made
    for path in Path("/dev/shm").glob(prefix + "*"):
        path.unlink()


@pytest.fixture
def inodes(files: list[Path]) -> list[int]:
    return [path.stat().st_ino for path in files]


@pytest.fixture
def holder(files: list[Path], inodes: list[int]) -> Iterator[tree.Process]:
    argv = [sys.executable, "-c", HOLDER, *map(str, files[:3])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        found = tree.read_process(process.pid)
        assert found is not None
        yield found


def end(process: tree.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    while tree.read_process(process.pid) is not None:
        time.sleep(0.01)


def test_files_are_found_by_who_holds_them(
    files: list[Path], inodes: list[int], holder: tree.Process
) -> None:
    assert find_inodes([holder]) == set(inodes[:3])


def test_nobody_and_the_dead_hold_nothing(child_gone: tree.Process) -> None:
    assert find_inodes([]) == find_inodes([child_gone]) == set()


@pytest.fixture
def child_gone() -> tree.Process:
    with subprocess.Popen(["sleep", "60"]) as process:
        found = tree.read_process(process.pid)
        process.kill()
    assert found is not None
    return found


def test_what_was_seen_is_removed_and_nothing_else(
    tmp_path: Path, files: list[Path], holder: tree.Process
) -> None:
    opened, mapped, _, other = files
    ledger = ShmLedger(tmp_path)
    ledger.note([holder])
    end(holder)
    assert ledger.remove_files() == sorted([str(opened), str(mapped)])
    assert [path.exists() for path in (opened, mapped, other)] == [False, False, True]
    assert ledger.remove_files() == []


def test_what_somebody_else_still_holds_stays_until_the_next_time(
    tmp_path: Path, files: list[Path], holder: tree.Process
) -> None:
    """As the files of a process whose weights the engine had mapped."""
    opened, mapped, _, _ = files
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        ledger = ShmLedger(tmp_path)
        ledger.note([holder])
        end(holder)
        assert ledger.remove_files() == [str(opened)]
        assert mapped.exists()
    assert ledger.remove_files() == [str(mapped)]


def test_a_later_runner_removes_what_a_killed_one_saw(
    tmp_path: Path, files: list[Path], holder: tree.Process
) -> None:
    ShmLedger(tmp_path).note([holder])
    end(holder)
    assert len(ShmLedger(tmp_path).remove_files()) == 2
    assert json.loads((tmp_path / LEDGER_FILE).read_text()) == {"inodes": []}
    assert [path.exists() for path in files] == [False, False, False, True]


def test_a_full_run_directory_ends_no_engine(
    tmp_path: Path, files: list[Path], holder: tree.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("warmhold_entrypoint.running.shm.write_atomically", fail)
    ledger = ShmLedger(tmp_path)
    ledger.note([holder])
    end(holder)
    assert len(ledger.remove_files()) == 2


def test_a_file_that_was_replaced_under_the_same_name_stays(
    tmp_path: Path, files: list[Path], holder: tree.Process
) -> None:
    opened, mapped, _, other = files
    ledger = ShmLedger(tmp_path)
    ledger.note([holder])
    end(holder)
    other.rename(opened)
    assert ledger.remove_files() == [str(mapped)]
    assert opened.read_bytes() == bytes(4096)


def test_a_semaphore_is_found_although_its_mapping_has_another_name(tmp_path: Path) -> None:
    """glibc maps a temporary name, links it to the final one and removes the temporary."""
    script = (
        "import _multiprocessing as m, sys;"
        "s = m.SemLock(1, 1, 1, sys.argv[1], False); print(flush=True); sys.stdin.read()"
    )
    name = f"/warmhold-test-{os.getpid()}"
    argv = [sys.executable, "-c", script, name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        found = tree.read_process(process.pid)
        assert found is not None
        ledger = ShmLedger(tmp_path)
        ledger.note([found])
    assert ledger.remove_files() == [f"/dev/shm/sem.{name[1:]}"]


def test_a_file_that_is_gone_already_is_no_trouble(
    tmp_path: Path, files: list[Path], holder: tree.Process
) -> None:
    ledger = ShmLedger(tmp_path)
    ledger.note([holder])
    end(holder)
    files[0].unlink()
    assert ledger.remove_files() == [str(files[1])]


def test_files_seen_at_different_times_add_up(
    tmp_path: Path, files: list[Path], holder: tree.Process
) -> None:
    ledger = ShmLedger(tmp_path)
    ledger.note([holder])
    end(holder)
    ledger.note([])
    assert len(ledger.remove_files()) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"inodes": []}'])
def test_a_damaged_ledger_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / LEDGER_FILE).write_text(content)
    assert ShmLedger(tmp_path).remove_files() == []
