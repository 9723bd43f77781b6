# SPDX-License-Identifier: Apache-2.0
"""The gate in front of an ASGI app, called as a server calls it."""

import asyncio
import json
from typing import Any

import pytest
from control_stand import on_loop
from warmhold_wcache.gate import RETRY_AFTER_S, Gate, GateMiddleware

OK = [{"type": "http.response.start", "status": 200}, {"type": "http.response.body"}]


class App:
    """An app that answers, and one call that is held until it may go on."""

    def __init__(self) -> None:
        self.scopes: list[str] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope["type"])
        await self.go.wait()
        if scope.get("path") == "/raises":
            raise ValueError
        for message in OK:
            await send(message)


async def call(
    middleware: GateMiddleware,
    path: str = "/v1/completions",
    kind: str = "http",
    received: list[dict[str, Any]] | None = None,
    **scope: Any,
) -> list[dict[str, Any]]:
    """One request; return what was sent."""
    messages = received or [{"type": f"{kind}.request", "body": b"{}", "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await middleware({"type": kind, "path": path, **scope}, receive, send)
    return sent


def assert_refused(sent: list[dict[str, Any]], kind: str = "http") -> None:
    start, body = sent
    assert (start["type"], start["status"]) == (f"{kind}.response.start", 503)
    headers = dict(start["headers"])
    assert headers[b"connection"] == b"close"
    assert headers[b"retry-after"] == str(RETRY_AFTER_S).encode()
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert body["type"] == f"{kind}.response.body"
    assert json.loads(body["body"])["error"]["code"] == 503


@on_loop
async def test_open_it_passes_requests_on_and_counts_them() -> None:
    app, gate = App(), Gate()
    middleware = GateMiddleware(app, gate)
    assert await call(middleware) == OK
    assert gate.inside == 0
    app.go.clear()
    tasks = [asyncio.create_task(call(middleware)) for _ in range(2)]
    while gate.inside < 2:
        await asyncio.sleep(0)
    waiting = asyncio.create_task(gate.wait_empty())
    gate.shut()
    assert_refused(await call(middleware))
    assert not waiting.done() and gate.inside == 2
    app.go.set()
    assert [await task for task in tasks] == [OK, OK]
    await waiting


@on_loop
async def test_who_raises_or_is_cancelled_leaves() -> None:
    app, gate = App(), Gate()
    middleware = GateMiddleware(app, gate)
    with pytest.raises(ValueError):
        await call(middleware, "/raises")
    app.go.clear()
    task = asyncio.create_task(call(middleware))
    while not gate.inside:
        await asyncio.sleep(0)
    task.cancel()
    await gate.wait_empty()
    assert gate.inside == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/invocations", "/healthy", "/"])
@on_loop
async def test_shut_it_refuses(path: str) -> None:
    app, gate = App(), Gate()
    gate.shut()
    middleware = GateMiddleware(app, gate)
    assert_refused(await call(middleware, path))
    assert app.scopes == []
    gate.open()
    assert await call(middleware, path) == OK


@pytest.mark.parametrize(
    ("path", "root"),
    [("/health", ""), ("/metrics", ""), ("/metrics/", ""), ("/ping", ""), ("/a/health", "/a")],
)
@on_loop
async def test_health_and_metrics_pass(path: str, root: str) -> None:
    app, gate = App(), Gate()
    gate.shut()
    assert await call(GateMiddleware(app, gate), path, root_path=root) == OK
    assert gate.inside == 0


@on_loop
async def test_a_body_is_read_before_the_refusal() -> None:
    gate = Gate()
    gate.shut()
    part = {"type": "http.request", "body": b"x" * 1000, "more_body": True}
    received = [part, part, {"type": "http.request", "body": b"", "more_body": False}]
    assert_refused(await call(GateMiddleware(App(), gate), received=received))
    assert received == []


@on_loop
async def test_a_body_without_end_is_not_read_to_its_end() -> None:
    gate = Gate()
    gate.shut()
    part = {"type": "http.request", "body": bytes(1 << 20), "more_body": True}
    received = [part] * 100
    assert_refused(await call(GateMiddleware(App(), gate), received=received))
    assert len(received) == 68


@on_loop
async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmhold_wcache.gate._BODY_S", 0.01)
    gate = Gate()
    gate.shut()
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await GateMiddleware(App(), gate)({"type": "http", "path": "/"}, receive, send)
    assert_refused(sent)


@on_loop
async def test_websockets_are_not_accepted() -> None:
    app, gate = App(), Gate()
    gate.shut()
    middleware = GateMiddleware(app, gate)
    connect = {"type": "websocket.connect"}
    sent = await call(middleware, "/v1/realtime", "websocket", [connect])
    assert sent == [{"type": "websocket.close", "code": 1013}]
    extensions = {"websocket.http.response": {}}
    sent = await call(middleware, "/", "websocket", [connect], extensions=extensions)
    assert_refused(sent, "websocket.http")
    assert app.scopes == []


@on_loop
async def test_the_servers_own_messages_pass() -> None:
    app, gate = App(), Gate()
    gate.shut()
    assert await call(GateMiddleware(app, gate), kind="lifespan") == OK
    assert gate.inside == 0
