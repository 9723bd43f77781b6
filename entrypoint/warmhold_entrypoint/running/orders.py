# SPDX-License-Identifier: Apache-2.0
"""Orders to the runner over a socket of its own: make a snapshot, restart the engine.

A connection carries one order, a line of JSON, and its answer, which may take minutes. An order is
the runner's own business once it has been taken: whoever gave it may go away.
"""

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from warmhold_snapshot.upstream import is_upstreams

from .loop import Loop
from .runner_socket import RunnerSocket, ask

SOCKET_NAME = "orders.sock"
CREATE, RESTART = "create", "restart"
_MAX_ORDER_BYTES = 4096


class Order:
    """One order: make the snapshot `name`, or restart the engine in that `mode`, and out of the
    snapshot `name`; "" stands for the usual one, and the label `vllm:` for upstream's."""

    def __init__(self, connection: socket.socket, act: str, name: str, mode: str = "") -> None:
        self.act = act
        self.name = name
        self.mode = mode
        self._connection = connection

    @property
    def ends_engine(self) -> bool:
        """Whether the running engine has to end for it: upstream makes snapshots of its own."""
        return self.act == RESTART or is_upstreams(self.name)

    def answer(self, result: Mapping[str, Any]) -> None:
        """Say what came of it, once; nobody has to be listening."""
        # Far smaller than a socket's buffer, so that nobody can make the loop wait.
        with self._connection, suppress(OSError):
            self._connection.sendall(json.dumps(dict(result)).encode() + b"\n")

    def refuse(self, code: str, detail: str, remedy: str) -> None:
        """Say why nothing came of it."""
        self.answer({"ok": False, "code": code, "detail": detail, "remedy": remedy})


def serve_orders(run_dir: Path, loop: Loop, take: Callable[[Order], None]) -> RunnerSocket:
    """Given the run directory, hand on every order from the loop until the socket is closed."""

    def read(connection: socket.socket) -> None:
        """An order is one small message, which comes whole or not at all."""
        loop.forget(connection.fileno())
        try:
            order = json.loads(connection.recv(_MAX_ORDER_BYTES))
            act, name, mode = (str(order[field]) for field in ("act", "name", "mode"))
            if act not in (CREATE, RESTART):
                raise ValueError(act)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            connection.close()
            return
        take(Order(connection, act, name, mode))

    def wait_for_order(connection: socket.socket) -> None:
        loop.watch(connection.fileno(), lambda: read(connection))

    return RunnerSocket(run_dir / SOCKET_NAME, loop, wait_for_order)


def give_order(
    run_dir: Path, act: str, name: str, timeout_s: float, mode: str = ""
) -> dict[str, Any]:
    """Given the run directory, an order and a limit in seconds, return the runner's answer: `ok`,
    and where it is false code, detail and remedy."""
    order = json.dumps({"act": act, "name": name, "mode": mode}).encode()
    try:
        return dict(json.loads(ask(run_dir / SOCKET_NAME, order, timeout_s)))
    except (OSError, ValueError) as error:
        remedy = "see `supervisorctl status` and the container's log"
        detail = f"no answer from the engine's runner: {error}"
        return {"ok": False, "code": "ready.no-runner", "detail": detail, "remedy": remedy}
