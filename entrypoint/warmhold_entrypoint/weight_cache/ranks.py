# SPDX-License-Identifier: Apache-2.0
"""Asks upstream's holder processes, one for each GPU and model, what they hold.

A real round trip through each one's own loop: upstream's /health only looks at exit codes. What
comes back is a pickle of a process without rights, so that nothing but plain values is read of it.
Source: vLLM 0.33's model_loader/weight_cache/protocol.py and daemon.py.
"""

import io
import pickle  # upstream's protocol; the reader below makes no objects
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATTERN = "vllm_weight_cache_*.sock"
_DRAFT = "_draft.sock"
_LENGTH = struct.Struct("!Q")
_MAX_ANSWER_BYTES = 1 << 16
# A holder process answers its own user alone; the runner may be another one.
_REFUSED = "Rejecting weight cache connection from uid"


class RankError(Exception):
    """A process that does not answer as one that holds weights; `gone` where there is none."""

    def __init__(self, message: str, gone: bool = False) -> None:
        self.gone = gone
        super().__init__(message)


@dataclass(frozen=True)
class Held:
    """What the holder's processes hold: bytes by the name of their socket; None where a process
    answers, but tells its own user alone."""

    by_socket: dict[str, int | None]

    @property
    def targets(self) -> int:
        """How many processes hold the model itself, not a draft of it."""
        return sum(not name.endswith(_DRAFT) for name in self.by_socket)

    @property
    def bytes(self) -> int:
        """All bytes that are known."""
        return sum(size or 0 for size in self.by_socket.values())

    @property
    def bytes_per_gpu(self) -> int | None:
        """The most that one GPU holds, a model and a draft of it together; None where some process
        does not tell."""
        if None in self.by_socket.values():
            return None
        sizes: dict[str, int] = {}
        for name, size in self.by_socket.items():
            gpu = name.removesuffix(_DRAFT).removesuffix(".sock")
            sizes[gpu] = sizes.get(gpu, 0) + (size or 0)
        return max(sizes.values(), default=0)


def find_sockets(folder: Path) -> list[Path]:
    """Given the holder's folder, return the sockets in it, whoever may listen there."""
    return sorted(folder.glob(_PATTERN))


def ask_ranks(folder: Path, count: int, timeout_s: float) -> Held:
    """Given the holder's folder and how many GPUs this node has, ask each process; raise RankError
    unless at least so many hold the model, and each one that is there answers in time."""
    held = Held({path.name: ask_rank(path, timeout_s) for path in find_sockets(folder)})
    if held.targets < count:
        raise RankError(f"{held.targets} of {count} processes hold weights", gone=True)
    return held


def ask_rank(path: Path, timeout_s: float) -> int | None:
    """Given a process's socket, return the bytes that it holds, or None where it answers its own
    user alone; raise RankError."""
    try:
        answer = _ask(path, {"cmd": "get_memory"}, timeout_s)
    except (FileNotFoundError, ConnectionError) as error:
        raise RankError(f"{path.name}: {error.strerror or error}", gone=True) from error
    except (OSError, ValueError) as error:
        raise RankError(f"{path.name}: {error or type(error).__name__}") from error
    if answer.get("status") == "ok" and isinstance(size := answer.get("memory_bytes"), int):
        if size > 0:
            return size
        raise RankError(f"{path.name}: it has given its weights up", gone=True)
    message = answer.get("message")
    if not isinstance(message, str):  # whose text could be endless
        raise RankError(f"{path.name}: it neither holds weights nor says why")
    if message.startswith(_REFUSED):
        return None
    raise RankError(f"{path.name}: {message[:200]}")


class _PlainReader(pickle.Unpickler):
    """Reads numbers, texts and collections of them; a name of a class or function is an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def _ask(path: Path, request: dict[str, str], timeout_s: float) -> dict[str, Any]:
    payload = pickle.dumps(request)
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(_LENGTH.pack(len(payload)) + payload)
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
        if length > _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        answer = _load(_receive(connection, length, deadline))
    if not isinstance(answer, dict):
        raise ValueError("an answer that is no mapping")
    return answer


def _load(payload: bytes) -> object:
    try:
        return _PlainReader(io.BytesIO(payload)).load()
    except Exception as error:  # of bytes that are no pickle it raises whatever they lead to
        raise ValueError(f"an answer that is no plain value: {error!r}"[:200]) from error


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        rest_s = deadline - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError("it did not answer in time")
        connection.settimeout(rest_s)
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionError("it closed the connection")
        received += chunk
    return received
