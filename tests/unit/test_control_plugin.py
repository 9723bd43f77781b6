# SPDX-License-Identifier: Apache-2.0
"""The endpoint plug-in without vLLM: when it opens a socket, and when it does nothing at all."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_stand import on_loop
from warmhold_wcache.control_client import ControlClient
from warmhold_wcache.gate import GateMiddleware
from warmhold_wcache.vllm_plugin.control import ControlPlugin, VllmEngine


class App:
    """As much of FastAPI as is used."""

    def __init__(self) -> None:
        self.added: list[Any] = []

    def add_middleware(self, middleware: Any, **options: Any) -> None:
        self.added.append(middleware)


def make_client(rank: int = 0, servers: int = 1) -> Any:
    parallel = SimpleNamespace(_api_process_rank=rank, _api_process_count=servers)
    config = SimpleNamespace(parallel_config=parallel)
    return SimpleNamespace(vllm_config=config, get_num_unfinished_requests=lambda: 0)


async def start(client: Any) -> tuple[ControlPlugin, App]:
    """What vLLM does with a plug-in."""
    plugin, app = ControlPlugin(), App()
    plugin.attach_router(app)
    await plugin.init_state(client, None, None)
    return plugin, app


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "control.sock"
    monkeypatch.setenv("WARMHOLD_CONTROL_SOCKET", str(path))
    return path


@on_loop
async def test_it_serves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmEngine, "find_obstacle", lambda engine: "none of ours")
    plugin, app = await start(make_client())
    assert app.added == [GateMiddleware]
    state = await asyncio.to_thread(ControlClient(path, timeout_s=60).state)
    assert (state["phase"], state["unsupported"]) == ("serving", "none of ours")
    assert plugin._task is not None
    plugin._task.cancel()
    await asyncio.wait({plugin._task})


@on_loop
async def test_without_the_variable_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMHOLD_CONTROL_SOCKET", raising=False)
    plugin, app = await start(make_client())
    assert app.added == []
    assert plugin._task is None


@pytest.mark.parametrize(
    "client", [None, make_client(1, 2), make_client(-1, 2)], ids=["render", "second", "none"]
)
@on_loop
async def test_servers_that_open_none(path: Path, client: Any) -> None:
    plugin, _ = await start(client)
    assert plugin._task is None
    assert not path.exists()


@on_loop
async def test_a_path_that_cannot_be_costs_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WARMHOLD_CONTROL_SOCKET", "/nowhere/control.sock")
    plugin, _ = await start(make_client())
    assert plugin._task is None
    assert "no control socket at /nowhere/control.sock" in caplog.text


@on_loop
async def test_clients_are_shut_out_and_let_in() -> None:
    acts: list[str] = []
    app = SimpleNamespace(state=SimpleNamespace())
    engine = VllmEngine(make_client(), app)
    engine.shut_out()
    await engine.let_in()  # nothing serves yet
    listener = SimpleNamespace(sockets=[], close=lambda: acts.append("closed"))
    connections: list[Any] = []
    connection = SimpleNamespace(shutdown=lambda: acts.append("shut down") or connections.clear())
    connections.append(connection)
    app.state.server = SimpleNamespace(
        servers=[listener], server_state=SimpleNamespace(connections=connections)
    )
    engine.shut_out()
    await engine.wait_gone()
    assert acts == ["closed", "shut down"]
