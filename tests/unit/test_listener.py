# SPDX-License-Identifier: Apache-2.0
"""The event listener: supervisord's protocol word by word, and which events end the container."""

import io
import signal
import subprocess
from collections.abc import Iterator

import pytest
from warmhold_entrypoint.container.listener import ends_container, read_pairs, run_listener

FATAL = "PROCESS_STATE_FATAL"
EXITED = "PROCESS_STATE_EXITED"


def message(event: str, payload: str) -> str:
    return (
        f"ver:3.0 server:supervisor serial:21 pool:end poolserial:10 eventname:{event}"
        f" len:{len(payload)}\n{payload}"
    )


@pytest.fixture
def supervisord() -> Iterator[subprocess.Popen[bytes]]:
    """Some process that SIGTERM ends."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("event", "payload", "ends"),
    [
        (FATAL, "processname:engine groupname:engine from_state:BACKOFF", True),
        (EXITED, "processname:engine groupname:engine from_state:RUNNING expected:1 pid:7", True),
        (EXITED, "processname:engine groupname:engine from_state:RUNNING expected:0 pid:7", False),
        (EXITED, "processname:metrics groupname:metrics from_state:RUNNING expected:1", False),
        (FATAL, "processname:metrics groupname:metrics from_state:BACKOFF", False),
        (EXITED, "processname:end groupname:end from_state:RUNNING expected:1 pid:7", False),
        ("PROCESS_STATE_STOPPED", "processname:engine groupname:engine from_state:STOPPING", False),
        (FATAL, "", False),
    ],
)  # fmt: skip
def test_which_events_end_the_container(event: str, payload: str, ends: bool) -> None:
    assert ends_container(event, read_pairs(payload)) is ends


def test_pairs() -> None:
    assert read_pairs("a:1 b:x:y word\nc:") == {"a": "1", "b": "x:y", "c": ""}


def test_every_event_is_acknowledged(supervisord: subprocess.Popen[bytes]) -> None:
    harmless = message(EXITED, "processname:metrics expected:1") + message(
        EXITED, "processname:engine expected:0"
    )
    answers = io.StringIO()
    run_listener(io.StringIO(harmless), answers, supervisord.pid)
    assert answers.getvalue() == "READY\nRESULT 2\nOKREADY\nRESULT 2\nOKREADY\n"
    assert supervisord.poll() is None


@pytest.mark.parametrize("state", ["FATAL", "EXITED"])
def test_the_end_of_the_engine_is_passed_on(
    supervisord: subprocess.Popen[bytes], state: str
) -> None:
    requests = io.StringIO(message(f"PROCESS_STATE_{state}", "processname:engine expected:1"))
    answers = io.StringIO()
    run_listener(requests, answers, supervisord.pid)
    assert supervisord.wait(5) == -signal.SIGTERM
    assert answers.getvalue() == "READY\nRESULT 2\nOKREADY\n"


def test_a_closed_stream_ends_it(supervisord: subprocess.Popen[bytes]) -> None:
    answers = io.StringIO()
    run_listener(io.StringIO(), answers, supervisord.pid)
    assert answers.getvalue() == "READY\n"
