# SPDX-License-Identifier: Apache-2.0
"""The end of an engine where there is no thread to drain it."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from warmhold_entrypoint.running.ending import Ending


def test_without_a_thread_vllm_drains_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    woken: list[str] = []
    asked: list[str] = []
    settings: Any = SimpleNamespace(env=SimpleNamespace(drain_s=30, run_dir=tmp_path))
    process: Any = SimpleNamespace(pid=1, terminate=lambda: asked.append("TERM"))
    ending = Ending(settings, lambda: woken.append("x"))
    ending.begin()
    assert ending.begun and woken
    assert not ending.is_over(process) and not ending.is_over(process)
    assert asked == ["TERM"]
