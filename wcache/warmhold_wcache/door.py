# SPDX-License-Identifier: Apache-2.0
"""Lets a uvicorn server accept no connection for a while; who comes meanwhile waits.

The event loop gives its listeners up, and duplicates keep them open: the kernel goes on queueing
connections, as many as the server's backlog, and they are served once the door is open again. A
snapshot takes the duplicates along.
"""

import asyncio
import socket
from functools import partial
from typing import Any

_POLL_S = 0.01


class Door:
    """The listeners of a `uvicorn.Server`; belongs to the event loop that serves them."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._parked: list[socket.socket] = []

    def shut(self) -> None:
        """Accept nobody, and close the connections on which no request runs; one that answers
        closes when it has. May be repeated."""
        for listener in self._server.servers:
            self._parked += [item.dup() for item in listener.sockets]
            listener.close()
        self._server.servers.clear()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def wait_gone(self) -> None:
        """After `shut`, wait until the last bytes of the last answer have gone out."""
        while self._server.server_state.connections:
            await asyncio.sleep(_POLL_S)

    async def open(self) -> None:
        """Accept again, those first who waited; nothing where the door is not shut."""
        server, config = self._server, self._server.config
        protocol = partial(
            config.http_protocol_class,
            config=config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        while self._parked:
            listener = await loop.create_server(
                protocol, sock=self._parked[-1], ssl=config.ssl, backlog=config.backlog
            )
            self._parked.pop()  # the loop's own from here on
            server.servers.append(listener)
