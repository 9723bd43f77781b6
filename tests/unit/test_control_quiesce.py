# SPDX-License-Identifier: Apache-2.0
"""Holding an engine and letting it go: the order of things, the drain's bound, what is undone."""

import asyncio
from pathlib import Path

import pytest
from control_stand import WORKER, on_loop, serving

HELD_CALLS = ["pause", "warmhold_quiesce"]
GONE = {"code": "wcache.absent", "detail": "no such generation", "remedy": "preload it"}


@on_loop
async def test_quiesce_and_resume(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        answer = await stand.ask(verb="quiesce")
        assert set(answer.pop("seconds")) == {"drain", "unmap"}
        assert answer == {"ok": True, "quiesced": True, "workers": [WORKER]}
        assert stand.engine.calls == HELD_CALLS
        assert stand.gate.is_shut
        assert (await stand.ask(verb="canary"))["code"] == "control.quiesced"
        answer = await stand.ask(verb="resume")
        assert set(answer.pop("seconds")) == {"map"}
        assert answer == {"ok": True, "quiesced": False, "workers": [WORKER]}
        assert stand.engine.calls == [*HELD_CALLS, "warmhold_resume", "unpause"]
        assert not stand.gate.is_shut


@on_loop
async def test_both_may_be_repeated(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        assert (await stand.ask(verb="resume"))["quiesced"] is False
        assert stand.engine.calls == []
        assert (await stand.ask(verb="quiesce"))["quiesced"] is True
        assert (await stand.ask(verb="quiesce"))["quiesced"] is True
        assert stand.control.is_quiesced
        assert (await stand.ask(verb="resume"))["ok"]
        assert (await stand.ask(verb="resume"))["ok"]
        assert not stand.gate.is_shut


@on_loop
async def test_quiesce_waits_for_requests_before_it_pauses(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.gate.enter()
        asking = stand.ask_soon(verb="quiesce")
        while not stand.gate.is_shut:
            await asyncio.sleep(0)
        state = await stand.ask(verb="state")
        assert (state["phase"], state["quiesced"], state["requests"]) == ("quiescing", False, 1)
        assert stand.engine.calls == ["warmhold_state"]
        stand.gate.leave()
        assert (await asking)["quiesced"] is True


@on_loop
async def test_quiesce_waits_for_a_canary(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"generate"}
        canary = stand.ask_soon(verb="canary")
        await stand.engine.held.wait()
        asking = stand.ask_soon(verb="quiesce")
        while not stand.gate.is_shut:
            await asyncio.sleep(0)
        stand.engine.release.set()
        assert (await canary)["ok"] and (await asking)["ok"]
        assert stand.engine.calls == ["generate", *HELD_CALLS]


@on_loop
async def test_requests_that_outlast_the_drain(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.gate.enter()
        answer = await stand.ask(verb="quiesce", timeout_s=0.01)
        assert (answer["code"], answer["ok"]) == ("control.busy", False)
        assert answer["detail"] == "1 requests still run after 0.01 s"
        assert stand.engine.calls == []
        assert not stand.gate.is_shut
        assert (await stand.ask(verb="state"))["phase"] == "serving"


@on_loop
async def test_a_pause_that_outlasts_the_drain(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"pause"}
        assert (await stand.ask(verb="quiesce", timeout_s=0.01))["code"] == "control.busy"
        assert stand.engine.calls == ["pause", "unpause"]
        assert not stand.gate.is_shut


@pytest.mark.parametrize("name", HELD_CALLS)
@pytest.mark.parametrize("end", ["error", "leaves"])
@on_loop
async def test_a_quiesce_that_fails_is_undone(tmp_path: Path, name: str, end: str) -> None:
    async with serving(tmp_path) as stand:
        if end == "error":
            stand.engine.errors = {name: RuntimeError("no")}
            answer = await stand.ask(verb="quiesce")
            assert (answer["code"], answer["detail"]) == ("control.failed", "RuntimeError: no")
        else:
            stand.engine.holds = {name}
            asking = stand.ask_soon(verb="quiesce")
            await stand.engine.held.wait()
            asking.cancel()
            await stand.calm()
        assert not stand.engine.is_shut_out
        undone = ["warmhold_resume", "unpause"] if name == "warmhold_quiesce" else ["unpause"]
        assert stand.engine.calls == [*HELD_CALLS[: HELD_CALLS.index(name) + 1], *undone]
        assert not stand.gate.is_shut
        assert (await stand.ask(verb="state"))["phase"] == "serving"


@on_loop
async def test_a_worker_that_cannot_unmap(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.answers = {"warmhold_quiesce": [WORKER, {**WORKER, "error": GONE}]}
        answer = await stand.ask(verb="quiesce")
        assert answer["code"] == "control.failed"
        assert answer["detail"] == "worker 1: wcache.absent: no such generation"
        assert answer["remedy"] == "preload it"
        assert not stand.gate.is_shut


@on_loop
async def test_what_cannot_be_undone_stays_held_and_can_be_resumed(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.errors = {"warmhold_quiesce": RuntimeError("first")}
        stand.engine.answers = {"warmhold_resume": [{**WORKER, "error": GONE}]}
        answer = await stand.ask(verb="quiesce")
        assert answer["code"] == "control.failed"
        assert "first" in answer["detail"] and "no such generation" in answer["detail"]
        assert stand.gate.is_shut
        assert (await stand.ask(verb="state"))["quiesced"] is True
        assert (await stand.ask(verb="resume"))["code"] == "control.failed"
        assert stand.gate.is_shut
        stand.engine.answers.clear()
        assert (await stand.ask(verb="resume"))["quiesced"] is False
        assert not stand.gate.is_shut


@on_loop
async def test_a_resume_goes_on_without_its_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        await stand.ask(verb="quiesce")
        stand.engine.holds = {"warmhold_resume"}
        asking = stand.ask_soon(verb="resume")
        await stand.engine.held.wait()
        asking.cancel()
        await stand.calm()
        assert stand.gate.is_shut
        stand.engine.release.set()
        assert (await stand.ask(verb="resume"))["quiesced"] is False
        assert stand.engine.calls.count("warmhold_resume") == 1
        assert not stand.gate.is_shut


@on_loop
async def test_one_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"pause"}
        first = stand.ask_soon(verb="quiesce")
        await stand.engine.held.wait()
        for verb in ("quiesce", "resume"):
            assert (await stand.ask(verb=verb, timeout_s=0.01))["code"] == "control.busy"
        stand.engine.release.set()
        assert (await first)["ok"]


@on_loop
async def test_a_held_engine_answers_canaries_and_nobody_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.gate.enter()
        asking = stand.ask_soon(verb="hold")
        while not stand.gate.is_shut:
            await asyncio.sleep(0)
        assert not stand.engine.is_shut_out
        stand.gate.leave()
        assert (await asking)["quiesced"] is False
        assert stand.engine.is_shut_out and stand.engine.calls == []
        assert (await stand.ask(verb="state"))["phase"] == "held"
        assert (await stand.ask(verb="canary"))["token"] == 7
        assert stand.gate.is_shut
        assert (await stand.ask(verb="quiesce"))["quiesced"] is True
        assert stand.engine.is_shut_out
        assert (await stand.ask(verb="resume"))["ok"] and not stand.gate.is_shut
        assert not stand.engine.is_shut_out


@on_loop
async def test_weights_may_be_mapped_before_anybody_is_let_in(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        assert (await stand.ask(verb="quiesce"))["quiesced"] is True
        answer = await stand.ask(verb="resume", serve=False)
        assert (answer["quiesced"], answer["workers"]) == (False, [WORKER])
        assert (await stand.ask(verb="state"))["phase"] == "held"
        assert stand.gate.is_shut and stand.engine.is_shut_out
        assert (await stand.ask(verb="canary"))["token"] == 7
        assert (await stand.ask(verb="resume"))["ok"]
        assert not stand.gate.is_shut and not stand.engine.is_shut_out
        assert stand.engine.calls.count("warmhold_resume") == 1
        assert (await stand.ask(verb="resume", serve=False))["ok"]
        assert not stand.gate.is_shut, "one that serves goes on"


@on_loop
async def test_a_held_engine_is_let_go(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        assert (await stand.ask(verb="hold"))["ok"]
        assert (await stand.ask(verb="hold"))["ok"]
        assert (await stand.ask(verb="resume"))["quiesced"] is False
        assert stand.engine.calls == [] and not stand.gate.is_shut
        assert not stand.engine.is_shut_out


@pytest.mark.parametrize("end", ["late", "leaves"])
@on_loop
async def test_a_hold_that_fails_is_undone(tmp_path: Path, end: str) -> None:
    async with serving(tmp_path) as stand:
        stand.gate.enter()
        if end == "late":
            assert (await stand.ask(verb="hold", timeout_s=0.01))["code"] == "control.busy"
        else:
            asking = stand.ask_soon(verb="hold")
            while not stand.gate.is_shut:
                await asyncio.sleep(0)
            asking.cancel()
            await stand.calm()
        assert not stand.gate.is_shut and not stand.engine.is_shut_out
        assert (await stand.ask(verb="state"))["phase"] == "serving"


@on_loop
async def test_an_engine_without_our_loader_is_not_held(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.obstacle = "another loader"
        assert (await stand.ask(verb="hold"))["code"] == "control.unsupported"
        assert not stand.gate.is_shut


@on_loop
async def test_the_nonce_is_the_processes_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        first, again = await stand.ask(verb="state"), await stand.ask(verb="state")
        assert first["nonce"] == again["nonce"] and len(first["nonce"]) == 32
    async with serving(tmp_path) as stand:
        assert (await stand.ask(verb="state"))["nonce"] != first["nonce"]


@on_loop
async def test_a_client_that_takes_no_answer_ends_a_hold(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"wait_gone"}
        answer = await stand.ask(verb="hold", timeout_s=0.05)
        assert answer["code"] == "control.busy"
        assert not stand.gate.is_shut and not stand.engine.is_shut_out
