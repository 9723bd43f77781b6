# SPDX-License-Identifier: Apache-2.0
"""A control socket in the test's own event loop, around an engine that does what the test says."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

from warmhold_wcache.control_engine import Token
from warmhold_wcache.control_server import ControlServer
from warmhold_wcache.control_verbs import Control
from warmhold_wcache.gate import Gate
from warmhold_wcache.protocol import decode, encode
from warmhold_wcache.server import listen

PATIENCE_S = 60.0
WORKER = {"generations": [{"id": "g", "bytes": 1, "segments": 1, "mapped": True}], "detached": []}


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own; what never comes fails it."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), PATIENCE_S))

    return run


class FakeEngine:
    """Notes every call; a call named in `holds` does not end before `release`, one in `errors`
    raises, and one in `answers` answers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.holds: set[str] = set()
        self.errors: dict[str, BaseException] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.cancelled: list[str] = []
        self.obstacle = ""
        self.dead = False
        self.is_shut_out = False
        self.token = Token(7, " x", -0.5)
        self.held = asyncio.Event()
        self.release = asyncio.Event()

    async def _act(self, name: str) -> None:
        self.calls.append(name)
        if name in self.holds:
            self.held.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
        if name in self.errors:
            raise self.errors[name]

    def find_obstacle(self) -> str:
        return self.obstacle

    def is_dead(self) -> bool:
        return self.dead

    def count_requests(self) -> int:
        return 0

    async def generate(
        self, prompt: Sequence[int] | None, with_logprob: bool, request_id: str
    ) -> Token:
        self.prompt, self.request_id = prompt, request_id
        await self._act("generate")
        return self.token if with_logprob else replace(self.token, logprob=None)

    async def abort(self, request_id: str) -> None:
        assert request_id == self.request_id
        await self._act("abort")

    def shut_out(self) -> None:
        self.is_shut_out = True

    async def wait_gone(self) -> None:
        if "wait_gone" in self.holds:
            await self._act("wait_gone")

    async def let_in(self) -> None:
        self.is_shut_out = False

    async def pause(self) -> None:
        await self._act("pause")

    async def unpause(self) -> None:
        await self._act("unpause")

    async def call_workers(self, method: str) -> list[dict[str, Any]]:
        await self._act(method)
        return self.answers.get(method, [WORKER])


@dataclass
class Stand:
    """A served control socket."""

    path: Path
    engine: FakeEngine
    gate: Gate
    control: Control
    server: ControlServer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self.path))

    async def ask(self, body: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Send a request, and return its answer when the server has closed the connection."""
        reader, writer = await self.connect()
        try:
            writer.write(encode({**(body or {}), **more}))
            answer = await read_answer(reader)
        finally:
            await close(writer)
        assert answer is not None
        return answer

    def ask_soon(self, **body: Any) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.ask(body))

    async def calm(self) -> None:
        """Wait until no connection is open."""
        while self.server.clients:
            await asyncio.sleep(0)


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and return when it is."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The answer, after which the stream has to end; None where it ends at once. A server that did
    not read all of a request ends it with a reset."""
    try:
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        answer = decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    with suppress(ConnectionError):
        assert await reader.read(1) == b""
    return answer


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[Stand]:
    """A control socket in a folder; at its end nothing of it is left in the loop."""
    engine, gate = FakeEngine(), Gate()
    control = Control(engine, gate)
    path = folder / "control.sock"
    server = ControlServer(listen(path), control, **options)
    task = asyncio.create_task(server.serve())
    await asyncio.sleep(0)  # a task that never began closes nothing
    try:
        yield Stand(path, engine, gate, control, server)
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert not server.clients
