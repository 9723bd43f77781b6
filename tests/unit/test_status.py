# SPDX-License-Identifier: Apache-2.0
"""The runner's answer: over its socket, as text, and as metrics that Prometheus can read."""

import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from warmhold_entrypoint.reporting.status import (
    SOCKET_NAME,
    Status,
    ask_status,
    build_metrics,
    render_status,
    serve_status,
)
from warmhold_entrypoint.running.loop import Loop
from warmhold_entrypoint.running.runner_socket import RunnerSocket

FULL: Status = {
    "state": "SERVING",
    "ready": True,
    "reason": "the canary got its token",
    "degraded": "",
    "mode": "disk",
    "snapshot": "",
    "saved_as": "",
    "phase": None,
    "rejections": [
        {"mode": "snapshot", "code": "snapshot.absent", "detail": "why", "remedy": "do"},
        {"mode": "ipc_cache", "code": "ipc_cache.unsupported", "detail": "why", "remedy": "do"},
    ],
    "weights": {
        **{"mode": "disk", "bytes": 3 << 20, "seconds": 0.5, "published": ["g1"]},
        **{"loads": 1, "code": "", "reason": "", "fields": [], "not_published": ""},
    },
    "model": "demo",
    "url": "http://127.0.0.1:8000",
    "pid": 30,
    "runner_pid": 20,
    "uptime_s": 61.5,
    "starts": 3,
    "crashes": 1,
    "last_exit": {"code": 137, "reason": "killed for memory", "at": 0.0},
    "phases": {"imports": 9.0, "weights": 1.0, "unaccounted": 0.0},
    "total_s": 10.0,
    "probe": {"last_ok_s_ago": 1.0, "missed": 0},
}
EARLY: Status = {
    **FULL,
    **{"state": "SWEEP", "ready": False, "mode": None, "rejections": [], "uptime_s": None},
    **{"last_exit": None, "phases": {}, "total_s": None, "weights": None},
}
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(\{{{LABEL}(?:,{LABEL})*\}})? (\S+)")


def parse(text: str) -> dict[str, float]:
    """Given Prometheus text, return its samples; fail on any line that is against the grammar."""
    assert text.endswith("\n")
    typed: set[str] = set()
    samples: dict[str, float] = {}
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            assert re.fullmatch(rf"# HELP {NAME} .+", line), line
        elif line.startswith("# TYPE "):
            match = re.fullmatch(rf"# TYPE ({NAME}) (gauge|counter)", line)
            assert match and match[1] not in typed, line
            typed.add(match[1])
            assert match[2] == "gauge" or match[1].endswith("_total")
        else:
            match = SAMPLE.fullmatch(line)
            assert match and match[1] in typed, line
            series = match[1] + (match[2] or "")
            assert series not in samples, line
            samples[series] = float(match[3])
    return samples


def test_metrics_without_a_runner() -> None:
    assert parse(build_metrics(None)) == {"warmhold_up": 0.0}


def test_metrics_of_a_serving_engine() -> None:
    assert parse(build_metrics(FULL)) == {
        "warmhold_up": 1.0,
        "warmhold_engine_ready": 1.0,
        "warmhold_engine_degraded": 0.0,
        'warmhold_engine_state{state="SERVING"}': 1.0,
        "warmhold_engine_starts_total": 3.0,
        "warmhold_engine_crashes_total": 1.0,
        "warmhold_engine_uptime_seconds": 61.5,
        'warmhold_engine_mode{mode="disk"}': 1.0,
        'warmhold_mode_rejected{mode="snapshot",code="snapshot.absent"}': 1.0,
        'warmhold_mode_rejected{mode="ipc_cache",code="ipc_cache.unsupported"}': 1.0,
        'warmhold_start_phase_seconds{phase="imports"}': 9.0,
        'warmhold_start_phase_seconds{phase="weights"}': 1.0,
        'warmhold_start_phase_seconds{phase="unaccounted"}': 0.0,
    }


def test_metrics_before_the_first_start() -> None:
    samples = parse(build_metrics(EARLY))
    assert (samples["warmhold_up"], samples["warmhold_engine_ready"]) == (1.0, 0.0)
    assert samples["warmhold_engine_uptime_seconds"] == 0.0
    assert not any("engine_mode" in name or "phase" in name for name in samples)


def test_metrics_keep_all_digits() -> None:
    samples = parse(build_metrics({**FULL, "starts": 12345678, "uptime_s": 1234567.5}))
    assert samples["warmhold_engine_starts_total"] == 12345678
    assert samples["warmhold_engine_uptime_seconds"] == 1234567.5


def test_label_values_are_escaped() -> None:
    samples = parse(build_metrics({**FULL, "mode": 'a"b\\c\nd'}))
    assert samples[r'warmhold_engine_mode{mode="a\"b\\c\nd"}'] == 1.0


def rows(status: Status) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in render_status(status).splitlines()}


def test_text_of_a_serving_engine() -> None:
    shown = rows(FULL)
    assert shown["state"] == "SERVING"
    assert shown["not snapshot"] == "snapshot.absent: why"
    assert shown["last exit"] == "137: killed for memory"
    assert shown["starts"] == "3 (1 crashes)"
    assert shown["last start"] == "10.00 s: imports 9.00, weights 1.00, unaccounted 0.00"
    assert "saved as" not in shown
    assert rows({**FULL, "saved_as": "one"})["saved as"] == "one, for the next start"


def test_text_before_the_first_start() -> None:
    shown = rows(EARLY)
    assert shown["state"] == "SWEEP (not ready)"
    assert (shown["mode"], shown["uptime"], shown["last exit"]) == ("-", "-", "-")
    assert "last start" not in shown


# The socket


class OneDescriptor:
    """The runner's loop as far as the server uses it: calls the owner of one descriptor."""

    def watch(self, fd: int, owner: Callable[[], None]) -> None:
        self.fd, self.owner = fd, owner

    def forget(self, fd: int) -> None:
        self.fd = -1

    def turn(self) -> None:
        assert select.select([self.fd], [], [], 5)[0]
        self.owner()


@pytest.fixture
def loop() -> OneDescriptor:
    return OneDescriptor()


@pytest.fixture
def answers() -> list[Status]:
    return []


@pytest.fixture
def server(tmp_path: Path, loop: OneDescriptor, answers: list[Status]) -> Iterator[RunnerSocket]:
    server = serve_status(tmp_path, cast(Loop, loop), lambda: answers.pop(0))
    yield server
    server.close()


def ask(run_dir: Path, loop: OneDescriptor) -> Status | None:
    found: list[Status | None] = []
    thread = threading.Thread(target=lambda: found.append(ask_status(run_dir, 5)))
    thread.start()
    loop.turn()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("server")
def test_it_is_asked_anew_each_time(
    tmp_path: Path, loop: OneDescriptor, answers: list[Status]
) -> None:
    answers += [FULL, EARLY]
    assert ask(tmp_path, loop) == FULL
    assert ask(tmp_path, loop) == EARLY


@pytest.mark.usefixtures("server")
def test_a_client_that_left_harms_nobody(
    tmp_path: Path, loop: OneDescriptor, answers: list[Status]
) -> None:
    answers += [FULL, FULL]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / SOCKET_NAME))
    loop.turn()
    assert ask(tmp_path, loop) == FULL


def test_only_the_owner_may_ask_and_a_closed_server_leaves_no_socket(
    tmp_path: Path, server: RunnerSocket
) -> None:
    path = tmp_path / SOCKET_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    server.close()
    assert not path.exists()
    assert ask_status(tmp_path, 5) is None


def test_a_socket_that_a_killed_runner_left_is_replaced(
    tmp_path: Path, loop: OneDescriptor
) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / SOCKET_NAME))
    assert ask_status(tmp_path, 5) is None
    server = serve_status(tmp_path, cast(Loop, loop), lambda: FULL)
    assert ask(tmp_path, loop) == FULL
    server.close()


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b"\xff", None])
def test_no_sound_answer_is_none(tmp_path: Path, answer: bytes | None) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()

        def serve() -> None:
            connection: Any
            connection, _ = listener.accept()
            with connection:
                if answer is None:
                    connection.recv(1)  # silent until the other side gives up
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert ask_status(tmp_path, 0.1 if answer is None else 5) is None
        thread.join(5)
