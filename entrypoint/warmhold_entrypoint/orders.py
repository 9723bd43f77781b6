# SPDX-License-Identifier: Apache-2.0
"""Orders to the runner over a socket of its own: make a snapshot, restore one.

A connection carries one order, a line of JSON, and its answer, which may take minutes. An order is
the runner's own business once it has been taken: whoever gave it may go away.
"""

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .loop import Loop
from .phases import Phases
from .runner_socket import RunnerSocket, ask

SOCKET_NAME = "orders.sock"
CREATE, RESTORE = "create", "restore"
_MAX_ORDER_BYTES = 4096


class Order:
    """One order: what is to be done with the snapshot of which name ("" for the usual one)."""

    def __init__(self, connection: socket.socket, act: str, name: str) -> None:
        self.act = act
        self.name = name
        self._connection = connection

    def answer(self, result: Mapping[str, Any]) -> None:
        """Say what came of it, once; nobody has to be listening."""
        # Far smaller than a socket's buffer, so that nobody can make the loop wait.
        with self._connection, suppress(OSError):
            self._connection.sendall(json.dumps(dict(result)).encode() + b"\n")

    def answer_restored(self, phases: Phases) -> None:
        """Say how long the restore took."""
        shown = {"name": self.name, "total_s": phases.total_s, "seconds": phases.seconds}
        self.answer({"ok": True, **shown})

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
            act, name = str(order["act"]), str(order["name"])
            if act not in (CREATE, RESTORE):
                raise ValueError(act)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        take(Order(connection, act, name))

    def wait_for_order(connection: socket.socket) -> None:
        loop.watch(connection.fileno(), lambda: read(connection))

    return RunnerSocket(run_dir / SOCKET_NAME, loop, wait_for_order)


def give_order(run_dir: Path, act: str, name: str, timeout_s: float) -> dict[str, Any]:
    """Given the run directory, an order and a limit in seconds, return the runner's answer: `ok`,
    and where it is false code, detail and remedy."""
    order = json.dumps({"act": act, "name": name}).encode()
    try:
        return dict(json.loads(ask(run_dir / SOCKET_NAME, order, timeout_s)))
    except (OSError, ValueError) as error:
        remedy = "see `supervisorctl status` and the container's log"
        detail = f"no answer from the engine's runner: {error}"
        return {"ok": False, "code": "ready.no-runner", "detail": detail, "remedy": remedy}
