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
_LINGER_S = 0.3


class Door:
    """The listeners of a `uvicorn.Server`; belongs to the event loop that serves them."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._parked: list[socket.socket] = []

    def shut(self) -> None:
        """Accept nobody. May be repeated."""
        for listener in self._server.servers:
            self._parked += [item.dup() for item in listener.sockets]
            listener.close()
        self._server.servers.clear()

    async def wait_gone(self) -> None:
        """After `shut`, wait until nobody is connected, and the last bytes of the last answer have
        gone out. A connection on which no request comes for a moment is closed; at once, and who
        was just sending one would get no answer."""
        connections = self._server.server_state.connections
        began = asyncio.get_running_loop().time()
        while connections:
            if asyncio.get_running_loop().time() - began > _LINGER_S:
                for connection in list(connections):
                    connection.shutdown()  # one that answers closes when it has
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
