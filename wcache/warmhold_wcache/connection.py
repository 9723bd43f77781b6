# SPDX-License-Identifier: Apache-2.0
"""The asking side of the protocol: one connection, every call bounded by one time limit.

A call on a connection that was lost meanwhile (the vault was restarted) is made once more on a new
one, within the same limit: every verb may be repeated. An engine that has gone does not come back.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .errors import UnreachableError, WcacheError, error_from_json, malformed
from .protocol import (
    MAX_ANSWER_BYTES,
    MAX_BATCH,
    MAX_FDS,
    ClosedError,
    FdBag,
    Frame,
    FrameReader,
    encode,
    send_some,
)

_POLL_S = 0.01
T = TypeVar("T")


class Connection:
    """Owns the socket. Connects at the first call; not for use by two threads at once."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._socket: socket.socket | None = None
        self._reader = FrameReader(MAX_ANSWER_BYTES)

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._reader.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, act: Callable[[], T], wait_s: float = 0.0, again: bool = True) -> T:
        """Given what to do, do it within the time limit, once more if the connection was lost and
        `again` is true.

        `wait_s` is how long a vault that is not there yet may take to come.
        """
        self._deadline = time.monotonic() + self._timeout_s
        try:
            try:
                self._connect(wait_s)
                return act()
            except (ClosedError, ConnectionError):
                if not again:
                    raise
                self.close()
                self._connect(self._timeout_s)
                return act()
        except (ClosedError, ConnectionError) as error:
            self.close()
            raise UnreachableError(
                "wcache.dead-socket", f"{self._path}: the other side went away: {error}"
            ) from error
        except TimeoutError as error:
            self.close()
            raise UnreachableError(
                "wcache.hung",
                f"{self._path}: no answer within {self._timeout_s:g} s",
                "see `supervisorctl status wcache` and the container's log",
            ) from error
        except WcacheError as error:
            if error.code in ("wcache.malformed", "wcache.too-large"):
                self.close()  # the two sides may no longer agree on where they are
            raise
        except OSError as error:
            self.close()
            raise WcacheError(
                "wcache.refused", f"{self._path}: {error.strerror}", "raise the limit of open files"
            ) from error

    def ask(self, body: Mapping[str, Any], fds: Sequence[int] = (), want_fds: int = 0) -> Frame:
        """Send one frame and return its answer; raise the WcacheError that is in it."""
        assert self._socket is not None
        try:
            self._send(encode(body), fds)
        except (BrokenPipeError, ConnectionResetError):
            # The other side may have said why before it closed.
            self._raise_parting_words()
            raise
        frame = self._receive(want_fds)
        if frame.body.get("ok") is not True:
            frame.fds.close()
            raise error_from_json(frame.body)
        return frame

    def give(self, request: Mapping[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        """Given a request and descriptors, send them in batches; return the last answer."""
        answer = self.ask({**request, "total": len(fds)})
        for start in range(0, len(fds), MAX_BATCH):
            answer = self.ask({"verb": "fds"}, fds[start : start + MAX_BATCH])
        return answer.body

    def take(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], FdBag]:
        """Given a request, return its answer and the descriptors that follow it in batches."""
        head = self.ask(request).body
        total = head.get("total")
        if type(total) is not int or not 0 <= total <= MAX_FDS:
            raise malformed(f"{total!r} descriptors to come")
        bag = FdBag()
        try:
            while len(bag) < total:
                count = min(MAX_BATCH, total - len(bag))
                bag.add(self.ask({"verb": "next"}, want_fds=count).fds.take())
            self.ask({"verb": "next"})
        except BaseException:
            bag.close()
            raise
        return head, bag

    def listen(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Given a request, yield its answer and then every frame that follows, however late. The
        connection ends with the iterator.

        Raise UnreachableError when the other side ends it: it stopped, or too much was not read.
        """
        try:
            yield self.call(lambda: self.ask(request)).body
            assert self._socket is not None
            self._socket.settimeout(None)  # nothing may happen for days
            while True:
                frame = self._reader.read(self._socket)
                if frame is not None:
                    yield frame.body
        except (ClosedError, ConnectionError) as error:
            detail = f"{self._path}: the other side ended the connection"
            raise UnreachableError("wcache.dead-socket", detail) from error
        finally:
            self.close()

    def _connect(self, wait_s: float) -> None:
        """Connect unless connected; wait for a socket to be there or served up to `wait_s`."""
        if self._socket is not None:
            return
        give_up = min(self._deadline, time.monotonic() + wait_s)
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(self._rest_s())
            try:
                sock.connect(str(self._path))
            except BlockingIOError:  # its queue is full: nobody accepts
                sock.close()
                self._rest_s()
            except OSError as error:
                sock.close()
                if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    raise _explain(self._path, error) from error
                if time.monotonic() >= give_up:
                    raise _explain(self._path, error) from None
            else:
                self._socket = sock
                return
            time.sleep(_POLL_S)

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        assert self._socket is not None
        view = memoryview(data)
        while view:
            self._socket.settimeout(self._rest_s())
            view = view[send_some(self._socket, view, fds) :]
            fds = ()

    def _receive(self, want_fds: int) -> Frame:
        assert self._socket is not None
        while True:
            self._socket.settimeout(self._rest_s())
            frame = self._reader.read(self._socket, want_fds)
            if frame is not None:
                return frame

    def _raise_parting_words(self) -> None:
        try:
            body = self._receive(0).body
        except (ClosedError, OSError):
            return
        raise error_from_json(body)

    def _rest_s(self) -> float:
        rest_s = self._deadline - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError
        return rest_s


def _explain(path: Path, error: OSError) -> UnreachableError:
    """Given why a connection failed, return it as one of our codes."""
    remedy = "see `supervisorctl status wcache` and the container's log"
    if isinstance(error, FileNotFoundError):
        return UnreachableError("wcache.absent", f"{path}: there is no socket", remedy)
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError("wcache.dead-socket", f"{path}: nobody serves the socket", remedy)
    if isinstance(error, PermissionError):
        detail = f"{path}: this user may not connect"
        return UnreachableError("wcache.other-uid", detail, "run it as the vault's user")
    return UnreachableError("wcache.absent", f"{path}: {error.strerror}", remedy)
