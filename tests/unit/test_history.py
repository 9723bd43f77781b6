# SPDX-License-Identifier: Apache-2.0
"""What is remembered of earlier engines, and what a file says that no runner finished."""

import time
from pathlib import Path

import pytest
from warmhold_entrypoint.reporting.history import (
    FILE_NAME,
    History,
    LastExit,
    read_history,
    write_history,
)

SOUND = '{"starts": 2, "crashes": 1, "running": false, "last_exit": null}'


@pytest.mark.parametrize("last", [None, LastExit(137, "killed", 1.5)])
def test_it_is_read_as_it_was_written(tmp_path: Path, last: LastExit | None) -> None:
    history = History(starts=3, crashes=1, running=False, last_exit=last)
    write_history(tmp_path, history)
    assert read_history(tmp_path) == history


def test_no_file_is_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path) == History(0, 0, False, None)


def test_an_engine_left_running_was_killed(tmp_path: Path) -> None:
    before = time.time()
    write_history(tmp_path, History(starts=3, crashes=1, running=True))
    history = read_history(tmp_path)
    assert (history.starts, history.crashes, history.running) == (3, 2, False)
    assert history.last_exit is not None
    assert history.last_exit.code == 137
    assert "killed" in history.last_exit.reason
    assert before <= history.last_exit.at <= time.time()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0" * 80,
        SOUND[:-5],
        "[]",
        "{}",
        SOUND.replace("2", "null"),
        SOUND.replace("2", '"two"'),
        SOUND.replace("null", '{"code": 1}'),
        SOUND.replace("null", '{"code": 1, "reason": "", "at": 0, "more": 1}'),
        SOUND.replace("null", '"text"'),
    ],
)
def test_a_damaged_file_is_no_history(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(SOUND)
    assert read_history(tmp_path) == History(starts=2, crashes=1)
    (tmp_path / FILE_NAME).write_text(content)
    assert read_history(tmp_path) == History()
