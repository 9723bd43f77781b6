# SPDX-License-Identifier: Apache-2.0
"""Messages on a Unix stream socket: a length, a JSON object, and file descriptors. Never pickle.

A frame is 4 bytes of length (big endian) and that many bytes of JSON. The two sides take turns, so
every batch of descriptors is acknowledged before the next one is sent. A reader asks the kernel for
as many descriptors as the conversation expects at this point and for none otherwise: what was not
asked for is never opened here. What is bounded: a request, an answer, a batch, a generation.
"""

import array
import errno
import json
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from .errors import WcacheError, malformed

VERSION = 1
MAX_REQUEST_BYTES = 64 << 10
MAX_ANSWER_BYTES = 32 << 20
MAX_BATCH = 250  # the kernel takes 253 in one message (SCM_MAX_FD)
MAX_FDS = 4097  # of one generation: its description and 4096 segments
_HEADER_BYTES = 4
_CHUNK_BYTES = 64 << 10
_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5


class FdBag:
    """Owns file descriptors until they are taken; closing it closes what is left."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def __enter__(self) -> "FdBag":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors, still owned by the bag."""
        return tuple(self._fds)

    def add(self, fds: Iterable[int]) -> None:
        """Given descriptors, own them from now on."""
        self._fds.extend(fds)

    def take(self) -> list[int]:
        """Return all descriptors; the caller owns them now."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Close what was not taken."""
        for fd in self.take():
            with suppress(OSError):
                os.close(fd)


@dataclass(frozen=True)
class Frame:
    """A message that came whole, and its descriptors (the receiver's to close)."""

    body: dict[str, Any]
    fds: FdBag


@dataclass(frozen=True)
class Peer:
    """Who connected, as the kernel says; PID 0 means a process outside this PID namespace."""

    pid: int
    uid: int


class ClosedError(Exception):
    """The other side closed the connection."""


def encode(body: Mapping[str, Any]) -> bytes:
    """Given a JSON object, return its frame."""
    payload = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return struct.pack(">I", len(payload)) + payload


def decode(payload: bytes | bytearray) -> dict[str, Any]:
    """Given a frame's bytes, return the object; raise WcacheError for anything else."""
    try:
        value = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise malformed(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise malformed("not a JSON object")
    return value


class FrameReader:
    """Puts one frame after the other together from a socket, blocking or not. Owns what is half."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._fds = FdBag()

    @property
    def is_amid(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def close(self) -> None:
        """Give up the half frame and close its descriptors."""
        self._buffer = bytearray()
        self._fds.close()

    def read(self, sock: socket.socket, want_fds: int = 0) -> Frame | None:
        """Receive once; return the frame if it is whole now.

        Raise ClosedError at the end of the stream, WcacheError for a frame that is malformed, too
        large, or without exactly `want_fds` descriptors, and the socket's own OSErrors.
        """
        space = socket.CMSG_SPACE(want_fds * array.array("i").itemsize) if want_fds else 0
        wanted = min(self._missing(), _CHUNK_BYTES)
        data, ancillary, flags, _ = sock.recvmsg(wanted, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
                self._fds.add(fds)
        if flags & socket.MSG_CTRUNC:
            raise malformed("more file descriptors than asked for, or than can be open here")
        if not data:
            raise ClosedError
        self._buffer += data
        if self._missing():
            return None
        payload, self._buffer = self._buffer[_HEADER_BYTES:], bytearray()
        frame = Frame(decode(payload), FdBag(self._fds.take()))
        if len(frame.fds) != want_fds:
            count = len(frame.fds)
            frame.fds.close()
            raise malformed(f"{count} file descriptors instead of {want_fds}")
        return frame

    def _missing(self) -> int:
        """How many bytes are to come of the header, and of the body once its length is known."""
        have = len(self._buffer)
        if have < _HEADER_BYTES:
            return _HEADER_BYTES - have
        (length,) = struct.unpack_from(">I", self._buffer)
        if length > self._max_bytes:
            raise WcacheError(
                "wcache.too-large", f"a message of {length} bytes; {self._max_bytes} are allowed"
            )
        if length == 0:
            raise malformed("an empty message")
        return int(_HEADER_BYTES + length - have)


def send_some(sock: socket.socket, data: memoryview, fds: Sequence[int]) -> int:
    """Send data, and the descriptors with its first byte; return how many bytes went."""
    if not fds:
        return sock.send(data)
    rights = array.array("i", fds).tobytes()
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def read_peer(sock: socket.socket) -> Peer:
    """Given a connected socket, return who called `connect` on it."""
    pid, uid, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return Peer(pid, uid & 0xFFFFFFFF)


def open_peer_pidfd(sock: socket.socket, peer: Peer) -> int:
    """Given a connected socket, return a pidfd of its peer; raise OSError where it has ended."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # it has ended, and its PID may be another's by now
            raise
    return os.pidfd_open(peer.pid)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
