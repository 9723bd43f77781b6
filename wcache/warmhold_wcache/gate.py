# SPDX-License-Identifier: Apache-2.0
"""Keeps new requests out of an ASGI app while it is shut, and counts those that are inside.

Pure ASGI, and nothing but the standard library. While it is open a request costs a comparison, an
addition and a subtraction. Health and metrics are let through at all times.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

EXEMPT = frozenset({"/health", "/ping", "/metrics", "/metrics/"})
RETRY_AFTER_S = 5
_BODY_BYTES = 32 << 20
_BODY_S = 2.0
_TRY_AGAIN_LATER = 1013  # the WebSocket registry's code
_REFUSAL = {
    "message": "the engine is held for a moment; try again",
    "type": "ServiceUnavailableError",
    "param": None,
    "code": 503,
}


class Gate:
    """Whether requests may enter, and how many have entered and not left. For one event loop."""

    def __init__(self) -> None:
        self.is_shut = False
        self.inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def shut(self) -> None:
        """Let nobody in from now on; who is inside stays."""
        self.is_shut = True

    def open(self) -> None:
        """Let everybody in again."""
        self.is_shut = False

    def enter(self) -> None:
        """Count one more; each is followed by one `leave`."""
        self.inside += 1
        if self.inside == 1:
            self._empty.clear()

    def leave(self) -> None:
        """Count one less."""
        self.inside -= 1
        if self.inside == 0:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until nobody is inside. There is no limit but the caller's."""
        await self._empty.wait()


class GateMiddleware:
    """The gate in front of an app: HTTP requests get a 503, WebSockets are not accepted."""

    def __init__(self, app: App, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif self._gate.is_shut:
            if scope["path"].removeprefix(scope.get("root_path", "")) in EXEMPT:
                await self._app(scope, receive, send)
            else:
                await _refuse(scope, receive, send)
        else:
            self._gate.enter()
            try:
                await self._app(scope, receive, send)
            finally:
                self._gate.leave()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    body = json.dumps({"error": _REFUSAL}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        (b"connection", b"close"),
    ]
    kind = "http"
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER})
            return
        kind = "websocket.http"
    else:
        await _discard_body(receive)
    await send({"type": f"{kind}.response.start", "status": 503, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})


async def _discard_body(receive: Receive) -> None:
    """Take the request's body in, within bounds: a connection that closes on unread bytes is reset,
    and the client would not see the answer."""
    left = _BODY_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_BODY_S):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))
