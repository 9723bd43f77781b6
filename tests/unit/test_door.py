# SPDX-License-Identifier: Apache-2.0
"""A uvicorn server that accepts no connection for a while, under both event loops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop
from control_stand import PATIENCE_S
from warmhold_wcache.door import Door

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving() -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    socket = uvicorn.Config(app, port=0, log_level="error").bind_socket()
    task = asyncio.create_task(server._serve([socket]))
    while not server.started:
        await asyncio.sleep(0)
    server.port = server.servers[0].sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield server
    finally:
        server.should_exit = True
        await task


async def connect(server: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0)


async def waits_and_is_served(server: Any) -> None:
    door = Door(server)
    for _ in range(2):  # what was opened can be shut again
        door.shut()
        door.shut()
        reader, writer = await connect(server)
        writer.write(REQUEST)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not server.server_state.connections
        assert not reader._buffer  # type: ignore[attr-defined]
        await door.open()
        await door.open()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        await until(lambda: not server.server_state.connections)


async def idle_ones_are_closed(server: Any) -> None:
    reader, writer = await connect(server)
    writer.write(REQUEST)
    await reader.readuntil(b"ok")
    door = Door(server)
    door.shut()
    waiting = asyncio.create_task(door.wait_gone())
    writer.write(REQUEST)  # it is not too late
    await reader.readuntil(b"ok")
    assert await reader.read() == b""
    await waiting
    writer.close()


async def a_server_that_stops_while_shut_ends(server: Any) -> None:
    Door(server).shut()


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize(
    "act", [waits_and_is_served, idle_ones_are_closed, a_server_that_stops_while_shut_ends]
)
def test_door(
    act: Callable[[Any], Awaitable[None]], loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), serving() as server:
            await act(server)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
