# SPDX-License-Identifier: Apache-2.0
"""An engine as a snapshot's maker speaks to it, over a real control socket."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from control_stand import WORKER, on_loop, serving
from warmhold_entrypoint.snapshot_mode.snapshot_engine import PROMPTS, ControlledEngine
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache.control_engine import Token
from warmhold_wcache.control_protocol import ControlError

T = TypeVar("T")


async def ask(question: Callable[[], T]) -> T:
    return await asyncio.to_thread(question)


@on_loop
async def test_the_order_of_a_snapshot(tmp_path: Path) -> None:
    resumed: list[str] = []
    async with serving(tmp_path) as stand:
        engine = ControlledEngine(stand.path, on_resumed=lambda: resumed.append("x"))
        await ask(engine.hold)
        assert stand.gate.is_shut and stand.engine.is_shut_out
        canary = await ask(engine.canary)
        assert len(canary["nonce"]) == 32 and canary["tokens"] == [7] * len(PROMPTS)
        await ask(engine.quiesce)
        assert stand.control.is_quiesced and resumed == []
        await ask(engine.resume)
        assert not stand.gate.is_shut and resumed == ["x"]
        await ask(lambda: engine.require_canary(canary))


@pytest.mark.parametrize("what", ["tokens", "process"])
@on_loop
async def test_another_engine_is_told(tmp_path: Path, what: str) -> None:
    async with serving(tmp_path) as stand:
        engine = ControlledEngine(stand.path)
        canary = await ask(engine.canary)
        if what == "tokens":
            stand.engine.token = Token(8, "", None)
        else:
            stand.control._nonce = "another"
        with pytest.raises(SnapshotError, match=f"other {what}") as caught:
            await ask(lambda: engine.require_canary(canary))
        assert caught.value.code == "snapshot.canary"


@on_loop
async def test_a_model_that_does_not_generate_has_its_nonce_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.errors = {"generate": ControlError("control.unsupported", "no", "")}
        canary = await ask(ControlledEngine(stand.path).canary)
        assert canary["tokens"] == [] and canary["nonce"]
        stand.engine.errors = {"generate": RuntimeError("broken")}
        with pytest.raises(ControlError, match="broken"):
            await ask(ControlledEngine(stand.path).canary)


@on_loop
async def test_a_busy_engine_has_time_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers do so between two steps: the protocol's own limit is for an idle one."""
    async with serving(tmp_path) as stand:
        limits: list[float] = []
        state = stand.control.state

        async def note(limit_s: float) -> dict[str, Any]:
            limits.append(limit_s)
            return await state(limit_s)

        monkeypatch.setattr(stand.control, "state", note)
        assert await ask(ControlledEngine(stand.path).generations) == {"g": 1}
        assert limits[0] >= 30


@on_loop
async def test_weights_that_were_updated_are_in_no_vault(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        engine = ControlledEngine(stand.path)
        assert await ask(engine.generations) == {"g": 1}
        stand.engine.answers = {"warmhold_state": [{**WORKER, "detached": ["g"]}]}
        with pytest.raises(SnapshotError) as caught:
            await ask(engine.generations)
        assert caught.value.code == "snapshot.detached"
