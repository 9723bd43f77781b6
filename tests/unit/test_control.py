# SPDX-License-Identifier: Apache-2.0
"""The control socket's canary, state, requests and client."""

import asyncio
import math
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from control_stand import WORKER, on_loop, serving
from warmhold_wcache.control_client import ControlClient, ControlError
from warmhold_wcache.control_engine import Token
from warmhold_wcache.control_verbs import Control, Phase
from warmhold_wcache.errors import WcacheError


@on_loop
async def test_canary_answers_its_token(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        answer = await stand.ask(verb="canary")
        assert answer.pop("seconds") >= 0
        assert answer == {"ok": True, "token": 7, "text": " x", "logprob": -0.5}
        assert stand.engine.calls == ["generate"]
        assert stand.engine.prompt is None
        await stand.ask(verb="canary", prompt=[1, 2])
        assert stand.engine.prompt == [1, 2]
        assert (await stand.ask(verb="canary", logprob=False))["logprob"] is None


@on_loop
async def test_canary_over_its_limit_is_aborted(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"generate"}
        answer = await stand.ask(verb="canary", timeout_s=0.01)
        assert answer["code"] == "control.timeout"
        assert stand.engine.cancelled == ["generate"]
        assert stand.engine.calls == ["generate", "abort"]
        assert stand.gate.inside == 0


@on_loop
async def test_canary_of_a_client_that_leaves_is_aborted(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"generate"}
        asking = stand.ask_soon(verb="canary")
        await stand.engine.held.wait()
        asking.cancel()
        await stand.calm()
        assert stand.engine.cancelled == ["generate"]
        assert stand.engine.calls == ["generate", "abort"]
        stand.engine.holds.clear()
        assert (await stand.ask(verb="canary"))["ok"]


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
@on_loop
async def test_canary_of_damaged_weights_fails(tmp_path: Path, logprob: float) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.token = Token(0, "", logprob)
        assert (await stand.ask(verb="canary"))["code"] == "control.failed"


@pytest.mark.parametrize(("dead", "code"), [(False, "control.failed"), (True, "control.dead")])
@on_loop
async def test_an_engines_error_is_told(tmp_path: Path, dead: bool, code: str) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.errors = {"generate": ValueError("why"), "abort": ValueError("again")}
        stand.engine.dead = dead
        answer = await stand.ask(verb="canary")
        assert (answer["code"], answer["detail"]) == (code, "ValueError: why")


@on_loop
async def test_without_our_loader(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.obstacle = "another loader"
        answer = await stand.ask(verb="quiesce")
        assert (answer["code"], answer["detail"]) == ("control.unsupported", "another loader")
        state = await stand.ask(verb="state")
        assert (state["unsupported"], state["workers"]) == ("another loader", [])
        assert stand.engine.calls == []
        assert not stand.gate.is_shut


@on_loop
async def test_state_has_a_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"warmhold_state"}
        assert (await stand.ask(verb="state", timeout_s=0.01))["code"] == "control.timeout"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"verb": None},
        {"verb": []},
        {"verb": "stop"},
        *({"verb": "canary", "timeout_s": value} for value in (0, -1, 1e9, True, "1", None)),
        *(
            {"verb": "canary", "prompt": value}
            for value in ([], "x", [1.5], [True], [-1], [1 << 40])
        ),
        {"verb": "canary", "prompt": [1] * 257},
        {"verb": "canary", "logprob": 1},
    ],
    ids=repr,
)
@on_loop
async def test_malformed_requests(tmp_path: Path, body: dict[str, Any]) -> None:
    async with serving(tmp_path) as stand:
        assert (await stand.ask(body))["code"] == "control.malformed"
        assert stand.engine.calls == []


@on_loop
async def test_a_bug_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(control: Control, limit_s: float) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(Control, "state", fail)
    async with serving(tmp_path) as stand:
        answer = await stand.ask(verb="state")
        assert (answer["code"], answer["detail"]) == ("control.failed", "KeyError('bug')")


@on_loop
async def test_the_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        client = ControlClient(stand.path, timeout_s=60)
        assert (await asyncio.to_thread(client.canary, 60, [3]))["token"] == 7
        assert (await asyncio.to_thread(client.quiesce))["quiesced"] is True
        state = await asyncio.to_thread(client.state)
        assert (state["phase"], state["workers"]) == (Phase.QUIESCED, [WORKER])
        assert (await asyncio.to_thread(client.resume))["quiesced"] is False
        stand.engine.obstacle = "another loader"
        with pytest.raises(ControlError) as caught:
            await asyncio.to_thread(client.quiesce)
        assert caught.value.code == "control.unsupported"
        assert caught.value.remedy


def test_the_client_of_no_engine(tmp_path: Path) -> None:
    with pytest.raises(WcacheError) as caught:
        ControlClient(tmp_path / "none").canary()
    assert caught.value.code == "control.absent"


@on_loop
async def test_the_client_of_an_engine_that_ended(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        path = stand.path
    with pytest.raises(ControlError) as caught:
        ControlClient(path).state()
    assert caught.value.code == "control.dead-socket"


def test_the_client_of_an_engine_that_ends_while_it_is_asked(tmp_path: Path) -> None:
    """It does not come back, so that nobody waits for it."""
    path, asked = tmp_path / "control.sock", []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def end() -> None:
            with suppress(OSError):  # the test is over
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        asked.append(connection.recv(1))

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(ControlError) as caught:
            ControlClient(path).resume(limit_s=0.5)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert caught.value.code == "control.dead-socket"
    assert len(asked) == 1
