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

from .errors import Fault
from .loop import Loop

SOCKET_NAME = "orders.sock"
CREATE, RESTORE = "create", "restore"
_MAX_ORDER_BYTES = 4096
_MAX_ANSWER_BYTES = 1 << 20


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

    def refuse(self, code: str, detail: str, remedy: str) -> None:
        """Say why nothing came of it."""
        self.answer({"ok": False, "code": code, "detail": detail, "remedy": remedy})


class OrderServer:
    """Takes orders from the runner's own loop and hands each on. Owns the socket."""

    def __init__(self, run_dir: Path, loop: Loop, take: Callable[[Order], None]) -> None:
        self._path = run_dir / SOCKET_NAME
        self._loop = loop
        self._take = take
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.listen(16)
        self._socket.setblocking(False)
        loop.watch(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Take no more orders."""
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            self._loop.watch(connection.fileno(), lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        """An order is one small message, which comes whole or not at all."""
        self._loop.forget(connection.fileno())
        try:
            order = json.loads(connection.recv(_MAX_ORDER_BYTES))
            act, name = str(order["act"]), str(order["name"])
            if act not in (CREATE, RESTORE):
                raise ValueError(act)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        self._take(Order(connection, act, name))


def give_order(run_dir: Path, act: str, name: str, timeout_s: float) -> dict[str, Any]:
    """Given the run directory, an order and a limit in seconds, return the runner's answer: `ok`,
    and where it is false code, detail and remedy."""
    remedy = "see `supervisorctl status` and the container's log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(run_dir / SOCKET_NAME))
            connection.sendall(json.dumps({"act": act, "name": name}).encode())
            answer = b""
            while len(answer) < _MAX_ANSWER_BYTES and (chunk := connection.recv(65536)):
                answer += chunk
            return dict(json.loads(answer))
        except (OSError, ValueError) as error:
            fault = Fault("ready.no-runner", f"no answer from the engine's runner: {error}", remedy)
    return {"ok": False, "code": fault.code, "detail": fault.detail, "remedy": fault.remedy}
