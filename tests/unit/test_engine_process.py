# SPDX-License-Identifier: Apache-2.0
"""An engine's process as the runner has it: its log, and its end, in words or not to be had."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from warmhold_entrypoint.running import tree
from warmhold_entrypoint.running.engine_process import EngineProcess, explain_end
from warmhold_entrypoint.running.loop import Loop


@pytest.fixture(autouse=True)
def nobody_else_is_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "kill_members", lambda *given: [])
    monkeypatch.setattr(tree, "reap_adopted", lambda: None)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr("signal.signal", lambda *given: None)
    made = Loop()
    yield made
    made.close()


class Stuck:
    """A process that a kill does not end."""

    pid = os.getpid()

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("stuck", timeout or 0.0)

    def send_signal(self, sig: int) -> None:
        pass


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_process_that_does_not_end_is_left_and_nothing_is_kept(loop: Loop) -> None:
    before = count_descriptors()
    reader, writer = os.pipe()
    lines: list[bytes] = []
    process = EngineProcess(Stuck(), reader, lines.append, loop)
    os.write(writer, b"its last words")
    process.end_tree(0.1)
    os.close(writer)
    assert process.poll() is None and lines == [b"its last words"]
    assert count_descriptors() == before


def test_a_line_without_an_end_is_not_kept_whole(
    loop: Loop, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys\nfor _ in range(400): sys.stdout.write(40_000 * '.')\nprint('the end')"
    reader, writer = os.pipe()
    lines: list[bytes] = []
    with subprocess.Popen([sys.executable, "-c", script], stdout=writer) as child:
        os.close(writer)
        process = EngineProcess(child, reader, lines.append, loop)
        while process.poll() is None:
            loop.wait(time.monotonic() + 0.1)
        process.end_tree(10)
    assert len(lines) == 1 and lines[0].endswith(b"...the end") and len(lines[0]) < 200_000
    assert len(capfd.readouterr().out) == 400 * 40_000 + len("the end\n")


@pytest.mark.parametrize(
    ("status", "kills", "text"),
    [
        (3, 0, "ended by itself with status 3"),
        (-9, 0, "ended by signal 9 (SIGKILL)"),
        (-40, 0, "ended by signal 40 (real-time)"),
        (-9, 2, "killed for memory (2 process(es), the cgroup's limit was reached)"),
    ],
)
def test_how_it_ended(status: int, kills: int, text: str) -> None:
    assert explain_end(status, None, kills) == text
