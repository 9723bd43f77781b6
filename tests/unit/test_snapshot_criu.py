# SPDX-License-Identifier: Apache-2.0
"""How criu is called and what is shown of its log; no criu is needed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from warmhold_snapshot import criu, pids
from warmhold_snapshot.errors import SnapshotError

LOG = """\
(00.000100) Version: 4.2.1
(00.001200) Warn  (criu/kerndat.c:100): Can't setup RLIMIT_NOFILE for self
(00.010000) tun: Unable to create tun: No such file or directory
(00.020000) Error (criu/sk-unix.c:300): unix: External socket is used. Consider using --ext-unix-sk
(00.020100) Error (criu/cr-dump.c:1669): Dump files (pid: 42) failed with -1
(00.030000) Unlock network
"""


def test_dump_leaves_the_tree_running() -> None:
    argv = criu.build_dump_argv(42, Path("/a/images"), Path("/a"), Path("/a/script.sh"), 1 << 20)
    assert argv[:4] == ["criu", "dump", "--tree", "42"]
    assert "--leave-running" in argv and "--skip-in-flight" in argv
    assert argv[argv.index("--action-script") + 1] == "/a/script.sh"
    assert argv[argv.index("--ghost-limit") + 1] == str(1 << 20)
    assert argv[argv.index("--images-dir") + 1] == "/a/images"
    assert argv[argv.index("--work-dir") + 1] == "/a"


def test_restore_names_what_stands_in_for_each_pipe() -> None:
    argv = criu.build_restore_argv(Path("/i"), Path("/w"), Path("/w/pid"), {77: 5, 78: 6})
    pairs = [argv[place + 1] for place, word in enumerate(argv) if word == "--inherit-fd"]
    assert pairs == ["fd[5]:pipe:[77]", "fd[6]:pipe:[78]"]
    assert argv[1] == "restore" and "--restore-detached" in argv
    assert "--leave-running" not in argv


def test_dump_and_restore_agree_on_what_they_carry() -> None:
    dump = criu.build_dump_argv(1, Path("/i"), Path("/w"), Path("/h"), 1)
    restore = criu.build_restore_argv(Path("/i"), Path("/w"), Path("/p"), {})
    for flag in (
        *("--tcp-established", "--link-remap", "--file-locks"),
        *("--network-lock=skip", "--manage-cgroups=ignore"),
    ):
        assert flag in dump and flag in restore


def test_key_lines_have_the_errors_and_the_tail() -> None:
    filler = "".join(f"(01.{number:06d}) nothing of note {number}\n" for number in range(500))
    lines = criu.key_lines(LOG + filler)
    assert [line for line in lines if "Error" in line] == LOG.splitlines()[3:5]
    assert not any("RLIMIT_NOFILE" in line for line in lines)
    assert len(lines) == 42 and lines[-1].endswith("note 499")


def test_key_lines_are_bounded() -> None:
    lines = criu.key_lines("\n".join(f"Error (a.c:1): {number}" for number in range(1000)))
    assert len(lines) == 120 and lines[-1].endswith("999")


def test_the_first_error_is_the_reason() -> None:
    reason = criu.find_reason(criu.key_lines(LOG))
    assert reason == "unix: External socket is used. Consider using --ext-unix-sk"
    assert criu.find_reason(["(00.1)      1: Error (x.c:3): gone"]) == "gone"
    assert criu.find_reason([]) == "it said nothing"


def test_statistics() -> None:
    output = (
        "Displaying dump stats:\nFreezing time: 25 us\nFrozen time: 1500000 us\nMemory pages: 7\n"
    )
    assert criu.parse_statistics(output) == {
        "Freezing time": 25,
        "Frozen time": 1_500_000,
        "Memory pages": 7,
    }


def test_a_failure_shows_the_log(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    log.write_text(LOG)
    argv = [sys.executable, "-c", "import sys; print('last words'); sys.exit(1)"]
    with pytest.raises(SnapshotError) as caught:
        criu.run(argv, 20, log)
    assert caught.value.code == "snapshot.criu"
    assert "External socket" in caught.value.detail
    assert caught.value.lines[-1] == "last words"


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("Error (criu/cr-check.c:160): sys/kernel/ns_last_pid sysctl is inaccessible", True),
        ("Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory", True),
        ("Error (criu/cr-check.c:99): no userfaultfd", False),
    ],
)
def test_check_in_a_container(
    said: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, criu ends with 1 even where all is well."""
    program = tmp_path / "criu"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\necho 'Warn  Does not look good.'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(criu, "PROGRAM", str(program))
    if passes:
        criu.run_check()
    else:
        with pytest.raises(SnapshotError) as caught:
            criu.run_check()
        assert "no userfaultfd" in caught.value.detail


def test_what_hangs_is_ended() -> None:
    argv = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]
    with pytest.raises(SnapshotError) as caught:
        criu.run(argv, 0.5)
    assert caught.value.code == "snapshot.timeout"


def test_who_is_interrupted_waits_for_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine would be told to go on while criu still holds it."""
    real, calls = subprocess.Popen.communicate, []

    def interrupted(process: Any, *given: Any, **options: Any) -> Any:
        calls.append(options)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(process, *given, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    body = (
        f"import os, pathlib; pathlib.Path({str(tmp_path / 'sid')!r}).write_text(str(os.getsid(0)))"
    )
    with pytest.raises(KeyboardInterrupt):
        criu.run([sys.executable, "-c", body], 20)
    assert int((tmp_path / "sid").read_text()) != os.getsid(0), "Ctrl-C does not reach it"


def test_what_criu_waits_for_is_killed_too(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait"
    with pytest.raises(SnapshotError):
        criu.run(["/bin/sh", "-c", script], 0.5)
    pid = int((tmp_path / "pid").read_text())
    assert pids.wait_until_free([pid], 10) == {} or not Path(f"/proc/{pid}/exe").exists()


def test_no_criu(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        criu.run([str(tmp_path / "criu"), "check"], 5)
    assert caught.value.code == "snapshot.criu-absent"


def test_who_has_a_killed_crius_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a half restored tree has, which is in sessions of its own."""
    monkeypatch.setattr(criu, "_KILLED_S", 0.2)
    left = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {left}; exec sleep 60' & exec sleep 60"
    began = time.monotonic()
    with pytest.raises(SnapshotError) as caught:
        criu.run(["/bin/sh", "-c", script], 1.0)
    assert caught.value.code == "snapshot.timeout" and time.monotonic() - began < 10
    os.kill(int(left.read_text()), signal.SIGKILL)
