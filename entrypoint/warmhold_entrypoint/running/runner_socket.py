# SPDX-License-Identifier: Apache-2.0
"""A unix socket of the runner, for root alone, served from its loop; and the asking side of it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .loop import Loop

_MAX_ANSWER_BYTES = 1 << 20


class RunnerSocket:
    """Accepts connections and hands each on, set not to block. Owns the listening socket."""

    def __init__(self, path: Path, loop: Loop, take: Callable[[socket.socket], None]) -> None:
        self._path = path
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
        """Accept no more."""
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            self._take(connection)


def ask(path: Path, request: bytes, timeout_s: float) -> bytes:
    """Given a runner's socket and a request (none where it is empty), return all of its answer.

    Raise OSError where nobody answers within `timeout_s`, ValueError where too much comes.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        if request:  # even of nothing a send fails where the answer has come and the end is closed
            connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
            if len(answer) > _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        return answer
