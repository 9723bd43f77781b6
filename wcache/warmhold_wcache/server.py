# SPDX-License-Identifier: Apache-2.0
"""Serves any number of clients on a Unix socket from one thread, and waits for none of them.

Every socket is non-blocking; a message that has begun, a transfer in progress and an answer that is
not read each have a time limit; with too many clients connected the one silent for longest goes.
A client that listens gets frames it did not ask for, and may ask for nothing more.
The vault and PID 1's fd store are services of it. Nothing that a client does raises out of `step`.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .errors import WcacheError, malformed
from .protocol import (
    MAX_BATCH,
    MAX_REQUEST_BYTES,
    ClosedError,
    FdBag,
    Frame,
    FrameReader,
    Peer,
    encode,
    read_peer,
    send_some,
)

_BACKLOG = 512
_ACCEPTS = 16
_PAUSE_S = 0.2
_MAX_UNREAD_BYTES = 64 << 10  # of a listener, beyond what the kernel keeps for it


@dataclass(frozen=True)
class Reply:
    """An answer in the middle of a transfer: a body, descriptors lent to it, and how many come."""

    body: dict[str, Any]
    fds: Sequence[int] = ()
    want_fds: int = 0


Answer = dict[str, Any]
Transfer = Generator[Reply, Frame, Answer]


class Service(Protocol):
    """What a server serves."""

    def admits(self, sock: socket.socket, peer: Peer) -> bool:
        """Tell whether this peer gets any answer at all."""

    def handle(self, client: "Client", body: dict[str, Any]) -> Answer | Transfer:
        """Given a request, return the answer or a transfer that ends in it; raise WcacheError."""

    def warn(self, message: str, **fields: object) -> None:
        """Log what should not happen."""


@dataclass
class Client:
    """One connection and where its conversation stands."""

    sock: socket.socket
    peer: Peer
    reader: FrameReader
    active_at: float
    transfer: Transfer | None = None
    want_fds: int = 0
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    out_fds: Sequence[int] = ()
    deadline: float | None = None
    listens: bool = False  # set by the service


def listen(path: Path, uid: int | None = None) -> socket.socket:
    """Given a path, replace what is there by a listening socket of mode 0600; it may be chowned."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        if uid is not None and uid != os.getuid():
            os.chown(path, uid, -1)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


class Server:
    """Owns the listening socket, the clients and the selector; others may add descriptors to it."""

    def __init__(
        self,
        listener: socket.socket,
        service: Service,
        max_clients: int = 256,
        limit_s: float = 5.0,
    ) -> None:
        self._listener = listener
        self._service = service
        self._max_clients = max_clients
        self._limit_s = limit_s
        self._clients: dict[int, Client] = {}
        self._selector = selectors.DefaultSelector()
        self._paused_until: float | None = None
        listener.setblocking(False)
        self.watch(listener.fileno(), self._accept)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Given a descriptor, call back whenever it can be read."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def forget(self, fd: int) -> None:
        """Given a descriptor, watch it no more; one that is not watched is fine."""
        with suppress(KeyError):
            self._selector.unregister(fd)

    @property
    def clients(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    def broadcast(self, body: dict[str, Any]) -> None:
        """Given a frame, send it to every client that listens, and wait for none: one that lets too
        much pile up, or does not read within the time limit, is dropped."""
        listeners = [client for client in self._clients.values() if client.listens]
        frame = encode(body) if listeners else b""
        for client in listeners:
            if len(client.out) + len(frame) > _MAX_UNREAD_BYTES:
                self._drop(client)
                continue
            if not client.out:
                client.deadline = time.monotonic() + self._limit_s
                self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
            client.out = memoryview(bytes(client.out) + frame)
            self._serve(client)

    def step(self, timeout_s: float | None = None) -> None:
        """Wait for the next event, at most that long, and do what it asks for."""
        deadlines = [client.deadline for client in self._clients.values() if client.deadline]
        deadlines += [self._paused_until] if self._paused_until else []
        if deadlines:
            rest_s = max(0.0, min(deadlines) - time.monotonic())
            timeout_s = rest_s if timeout_s is None else min(timeout_s, rest_s)
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Client):
                if key.data.sock.fileno() in self._clients:
                    self._serve(key.data)
            else:
                key.data()
        self._expire(time.monotonic())

    def close(self) -> None:
        """Close every connection and the listening socket."""
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, mostly: a silent client gives its own. With none to give, the
                # socket would stay readable and spin the loop.
                if not self._drop_longest_silent():
                    self._service.warn("cannot accept a client", error=error)
                    self.forget(self._listener.fileno())
                    self._paused_until = time.monotonic() + _PAUSE_S
                    return
                continue
            try:
                self._admit(sock)
            except OSError:
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = read_peer(sock)
        if not self._service.admits(sock, peer):
            refusal = WcacheError(
                "wcache.other-uid", f"uid {peer.uid} is not served", "run it as the vault's user"
            )
            with sock, suppress(OSError):
                sock.send(encode(refusal.to_json()))
            return
        client = Client(sock, peer, FrameReader(MAX_REQUEST_BYTES), time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._clients[sock.fileno()] = client
        if len(self._clients) > self._max_clients:
            self._drop_longest_silent()

    def _serve(self, client: Client) -> None:
        """Go on with one client; whatever it does wrong ends its own connection only."""
        try:
            if client.out:
                self._flush(client)
            else:
                self._receive(client)
        except BlockingIOError:
            pass
        except WcacheError as error:
            with suppress(OSError):
                client.sock.send(encode(error.to_json()))
            self._drop(client)
        except (OSError, ClosedError):
            self._drop(client)
        except Exception as error:  # a service must outlive its own bugs and a lack of memory
            self._service.warn("a client met a bug", error=repr(error), pid=client.peer.pid)
            self._drop(client)

    def _receive(self, client: Client) -> None:
        now = time.monotonic()
        client.active_at = now
        frame = client.reader.read(client.sock, client.want_fds)
        if frame is None:
            if client.deadline is None:
                client.deadline = now + self._limit_s
            return
        if client.listens:
            raise malformed("a client that listens has nothing more to say")
        client.want_fds = 0
        try:
            reply = self._advance(client, frame)
        except WcacheError as error:
            self._end_transfer(client)
            reply = Reply(error.to_json())
        finally:
            frame.fds.close()
        client.out, client.out_fds = memoryview(encode(reply.body)), reply.fds
        client.want_fds = reply.want_fds
        client.deadline = now + self._limit_s
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        self._flush(client)

    def _advance(self, client: Client, frame: Frame) -> Reply:
        """Give the frame to the transfer under way, or begin with it; return what to answer."""
        try:
            if client.transfer is not None:
                return client.transfer.send(frame)
            answer = self._service.handle(client, frame.body)
            if isinstance(answer, dict):
                return Reply(answer)
            client.transfer = answer
            return next(answer)
        except StopIteration as end:
            client.transfer = None
            return Reply(end.value)

    def _flush(self, client: Client) -> None:
        sent = send_some(client.sock, client.out, client.out_fds)
        client.out, client.out_fds = client.out[sent:], ()
        if not client.out:
            busy = client.transfer is not None or client.reader.is_amid
            client.deadline = time.monotonic() + self._limit_s if busy else None
            self._selector.modify(client.sock, selectors.EVENT_READ, client)

    def _expire(self, now: float) -> None:
        for client in list(self._clients.values()):
            if client.deadline is not None and client.deadline <= now:
                self._drop(client)
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            self.watch(self._listener.fileno(), self._accept)

    def _drop_longest_silent(self) -> bool:
        """Close one connection, one in the middle of nothing if possible; tell if there was any."""
        idle = [client for client in self._clients.values() if client.deadline is None]
        candidates = idle or list(self._clients.values())
        if candidates:
            self._drop(min(candidates, key=lambda client: client.active_at))
        return bool(candidates)

    def _drop(self, client: Client) -> None:
        # What ends with one client may be told to others, and end them too.
        if self._clients.pop(client.sock.fileno(), None) is None:
            return
        self._selector.unregister(client.sock)
        client.reader.close()
        self._end_transfer(client)
        client.sock.close()

    def _end_transfer(self, client: Client) -> None:
        transfer, client.transfer = client.transfer, None
        if transfer is not None:
            try:
                transfer.close()
            except Exception as error:  # as in _serve
                self._service.warn("a transfer met a bug", error=repr(error), pid=client.peer.pid)


class LentFds:
    """Descriptors that close only when their owner and every transfer of them are done."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        self._users = 1

    def __enter__(self) -> Sequence[int]:
        self._users += 1
        return self.fds

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """End one use: a transfer's, or (once) the owner's."""
        self._users -= 1
        if self._users == 0:
            FdBag(self.fds).close()


def take_fds(total: int, bag: FdBag) -> Generator[Reply, Frame, None]:
    """Given a number of descriptors, ask for them batch by batch and put them into the bag."""
    while len(bag) < total:
        count = min(MAX_BATCH, total - len(bag))
        frame = yield Reply({"ok": True, "have": len(bag)}, want_fds=count)
        if frame.body.get("verb") != "fds":
            raise malformed("a batch of descriptors was due")
        bag.add(frame.fds.take())


def give_fds(fds: Sequence[int], head: dict[str, Any]) -> Transfer:
    """Given descriptors and what to say first, send them batch by batch, each after a `next`."""
    reply = Reply({**head, "ok": True, "total": len(fds)})
    for start in range(0, len(fds), MAX_BATCH):
        _expect((yield reply), "next")
        batch = fds[start : start + MAX_BATCH]
        reply = Reply({"ok": True, "count": len(batch)}, batch)
    _expect((yield reply), "next")
    return {"ok": True}


def _expect(frame: Frame, verb: str) -> None:
    if frame.body.get("verb") != verb:
        raise malformed(f"the verb {verb} was due")
