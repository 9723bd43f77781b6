# SPDX-License-Identifier: Apache-2.0
"""What a container must have: each right missing by itself, all at once, and the remedies."""

import json
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from warmhold_snapshot import check, cli
from warmhold_snapshot.check import Found
from warmhold_snapshot.errors import SnapshotError

NET_ADMIN, SYS_PTRACE, SYS_ADMIN, SYS_RESOURCE, SYS_TIME = (
    1 << bit for bit in (12, 19, 21, 24, 25)
)
FOUR = NET_ADMIN | SYS_PTRACE | SYS_ADMIN | SYS_TIME
GOOD = Found(
    capabilities=FOUR,
    seccomp=0,
    criu_version="4.2.1",
    criu_error="",
    free_bytes=10 << 30,
    folder="/state",
    pid_max=32768,
)


def missing(found: Found, **given: object) -> list[str]:
    return [point.name for point in check.conclude(found, **given) if not point.ok]


def test_nothing_missing() -> None:
    assert missing(GOOD, estimate_bytes=1 << 30, above_pid=3000) == []
    check.require(check.conclude(GOOD))


@pytest.mark.parametrize(
    ("found", "name", "remedy"),
    [
        (replace(GOOD, capabilities=FOUR & ~SYS_ADMIN), "CAP_SYS_ADMIN", "cap_add: [SYS_ADMIN]"),
        (replace(GOOD, capabilities=FOUR & ~SYS_PTRACE), "CAP_SYS_PTRACE", "cap_add: [SYS_PTRACE]"),
        (replace(GOOD, capabilities=FOUR & ~NET_ADMIN), "CAP_NET_ADMIN", "cap_add: [NET_ADMIN]"),
        (replace(GOOD, capabilities=FOUR & ~SYS_TIME), "CAP_SYS_TIME", "cap_add: [SYS_TIME]"),
        (replace(GOOD, seccomp=2), "seccomp", "security_opt: [seccomp=unconfined]"),
        (replace(GOOD, criu_version="", criu_error="not there"), "criu", "warmhold image"),
        (replace(GOOD, criu_version="3.17.1"), "criu", "warmhold image"),
        (replace(GOOD, criu_error="no userfaultfd"), "criu check", "kernel"),
        (replace(GOOD, free_bytes=1 << 20), "disk", "prune"),
        (replace(GOOD, pid_max=4096), "pid range", "kernel.pid_max"),
    ],
)
def test_each_missing(found: Found, name: str, remedy: str) -> None:
    assert missing(found, estimate_bytes=1 << 30, above_pid=3000) == [name]
    points = check.conclude(found, 1 << 30, False, 3000)
    (point,) = (point for point in points if not point.ok)
    assert remedy in point.remedy
    with pytest.raises(SnapshotError) as caught:
        check.require(points)
    assert caught.value.code == ("snapshot.disk" if name == "disk" else "snapshot.rights")
    assert remedy in caught.value.remedy


def test_another_uid_needs_one_more() -> None:
    assert missing(GOOD) == [] and missing(GOOD, other_uid=True) == ["CAP_SYS_RESOURCE"]
    assert missing(replace(GOOD, capabilities=FOUR | SYS_RESOURCE), other_uid=True) == []


def test_all_missing_are_named_at_once() -> None:
    nothing = replace(GOOD, capabilities=0, seccomp=2, criu_version="", criu_error="gone")
    assert len(missing(nothing)) == 6
    with pytest.raises(SnapshotError) as caught:
        check.require(check.conclude(nothing))
    assert len(caught.value.lines) == 6
    text = check.render(check.conclude(nothing))
    assert text.count("MISSING") == 6 and text.count("fix:") == 6


def test_what_is_read_here_is_concluded_from(tmp_path: Path) -> None:
    found = check.read_found(tmp_path / "not" / "there")
    assert found.free_bytes > 0 and found.pid_max > 1000
    names = [point.name for point in check.conclude(found)]
    assert {"CAP_SYS_ADMIN", "seccomp", "criu", "disk"} <= set(names)


def test_the_estimate_counts_private_memory_and_no_weights() -> None:
    size = 64 << 20
    before = check.estimate_bytes(os.getpid())
    with mmap.mmap(-1, size, mmap.MAP_SHARED) as shared:
        shared[:] = b"w" * size
        assert check.estimate_bytes(os.getpid()) < before + size // 2
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE) as private:
        private[:] = b"p" * size
        assert check.estimate_bytes(os.getpid()) > before + size // 2


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "read_found", lambda folder: replace(GOOD, seccomp=2))
    result = CliRunner().invoke(cli.cli, ["--folder", str(tmp_path), "check", "--json"])
    answer = json.loads(result.output)
    assert result.exit_code == 77 and answer["ok"] is False
    assert [point["name"] for point in answer["points"] if not point["ok"]] == ["seccomp"]
    monkeypatch.setattr(check, "read_found", lambda folder: GOOD)
    result = CliRunner().invoke(cli.cli, ["--folder", str(tmp_path), "check"])
    assert result.exit_code == 0 and "MISSING" not in result.output
    result = CliRunner().invoke(cli.cli, ["check", "--plugins", str(tmp_path)])
    assert result.exit_code == 77 and "MISSING criu for CUDA" in result.output
