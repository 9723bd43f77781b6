# SPDX-License-Identifier: Apache-2.0
"""Serves the control socket within an engine's event loop, and waits for no client.

A connection carries one request and its answer: an open one would be in a snapshot's way. Reading
and writing have a time limit each; a request whose client goes away is cancelled, and so is, once
the engine is quiesced, every connection on which nothing was asked yet.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from .control_protocol import ControlError, to_control
from .errors import WcacheError
from .protocol import MAX_REQUEST_BYTES, ClosedError, FrameReader, encode, read_peer

_PAUSE_S = 0.2
_log = logging.getLogger("vllm.warmhold")  # below vLLM's own, or its handlers would not see it


class Service(Protocol):
    """What a control server serves."""

    @property
    def is_quiesced(self) -> bool:
        """Whether the engine is held, and no connection should be open for longer than needed."""

    def handle(self, body: dict[str, Any]) -> Awaitable[dict[str, Any]]:
        """Given a request, return the answer; raise WcacheError. May be cancelled."""


class ControlServer:
    """Owns the listening socket and a task for each client; all belong to one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        service: Service,
        limit_s: float = 5.0,
        max_clients: int = 64,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._service = service
        self._limit_s = limit_s
        self._max_clients = max_clients
        self._silent: dict[asyncio.Task[None], None] = {}  # the oldest comes first
        self._clients: set[asyncio.Task[None]] = set()

    @property
    def clients(self) -> int:
        """How many connections are open."""
        return len(self._clients)

    async def serve(self) -> None:
        """Serve until cancelled; then end every conversation and close the sockets."""
        try:
            while True:
                await self._accept()
        finally:
            self._listener.close()
            await _end(self._clients)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = await loop.sock_accept(self._listener)
        except OSError as error:
            # Out of descriptors, mostly: silent clients give theirs.
            _log.warning("the control socket cannot accept a client: %s", error)
            await self._drop_silent()
            await asyncio.sleep(_PAUSE_S)
            return
        if len(self._clients) >= self._max_clients and self._silent:
            await _end({next(iter(self._silent))})
        task = loop.create_task(self._converse(sock, len(self._clients) >= self._max_clients))
        self._clients.add(task)
        self._silent[task] = None
        task.add_done_callback(partial(self._forget, sock))

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()  # here, because a task that is cancelled at once never runs
        self._clients.discard(task)
        self._silent.pop(task, None)

    async def _drop_silent(self) -> None:
        await _end(set(self._silent))

    async def _converse(self, sock: socket.socket, is_full: bool) -> None:
        sock.setblocking(False)
        with suppress(OSError, ClosedError):  # the client's end; its slowness is a TimeoutError
            answer = await self._answer(sock, is_full)
            if answer is not None:
                async with asyncio.timeout(self._limit_s):
                    await asyncio.get_running_loop().sock_sendall(sock, encode(answer))

    async def _answer(self, sock: socket.socket, is_full: bool) -> dict[str, Any] | None:
        """The answer to what the client asks; None where it went away."""
        try:
            uid = read_peer(sock).uid
            if uid not in (0, os.getuid()):
                raise ControlError(
                    "control.other-uid",
                    f"uid {uid} is not served",
                    "run it as the engine's user or as root",
                )
            if is_full:
                raise ControlError("control.busy", f"{self.clients} clients", "try again later")
            async with asyncio.timeout(self._limit_s):
                body = await _receive(sock)
            answer = await self._work(sock, body)
        except WcacheError as error:
            return to_control(error).to_json()
        if self._service.is_quiesced:
            await self._drop_silent()
        return answer

    async def _work(self, sock: socket.socket, body: dict[str, Any]) -> dict[str, Any] | None:
        """Let the service handle a request, as long as its client is there."""
        task = asyncio.current_task()
        assert task is not None
        self._silent.pop(task, None)
        work = asyncio.ensure_future(self._service.handle(body))
        # While it waits for its answer a client sends nothing: readable means that it has closed.
        gone = asyncio.ensure_future(_readable(sock))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None
            return work.result()
        except WcacheError:
            raise
        except Exception as error:  # an engine must outlive our bugs
            _log.exception("a request on the control socket met a bug")
            raise ControlError("control.failed", repr(error), "see the engine's log") from error
        finally:
            await _end({work, gone})


async def _receive(sock: socket.socket) -> dict[str, Any]:
    reader = FrameReader(MAX_REQUEST_BYTES)
    while True:
        with suppress(BlockingIOError):
            frame = reader.read(sock)
            if frame is not None:
                return frame.body
        await _readable(sock)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _end(futures: set[Any]) -> None:
    """Cancel what is not done, and wait until all is; what they raised is not ours to tell."""
    pending = {future for future in futures if not future.done()}
    for future in pending:
        future.cancel()
    if pending:
        await asyncio.wait(pending)
    for future in futures:
        if not future.cancelled():
            future.exception()
