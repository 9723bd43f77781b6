# SPDX-License-Identifier: Apache-2.0
"""An engine's end in words, and its log when it is none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from warmhold_entrypoint.running.engine_process import EngineProcess, explain_end
from warmhold_entrypoint.running.loop import Loop

LIMIT_S = 30.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    made = Loop()
    yield made
    made.close()
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_a_line_without_an_end_does_not_grow(
    loop: Loop, capfd: pytest.CaptureFixture[bytes]
) -> None:
    reader, writer = os.pipe()
    script = "import os\nfor _ in range(64): os.write(1, bytes(65536))\nos.write(1, b'end\\nnext')"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=writer)
    os.close(writer)
    lines: list[bytes] = []
    engine = EngineProcess(child, reader, lines.append, loop)
    deadline = time.monotonic() + LIMIT_S
    largest = 0
    while engine.poll() is None and time.monotonic() < deadline:
        loop.wait(time.monotonic() + 0.1)
        largest = max(largest, len(engine._partial))
    while engine._pump_chunk():
        pass
    loop.forget(engine._pidfd)
    loop.forget(reader)
    os.close(engine._pidfd)
    os.close(reader)
    assert largest <= 1 << 16
    assert [line[-3:] for line in lines] == [b"end"] and engine._partial == b"next"
    capfd.readouterr()
