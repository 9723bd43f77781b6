# SPDX-License-Identifier: Apache-2.0
"""A hostile client of the vault's protocol. All that it sends follows from a seed."""

import json
import os
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vault_process import close_all, connect
from warmhold_wcache import segments
from warmhold_wcache.protocol import encode, send_some

VERBS = ["hello", "publish", "fetch", "lease", "release", "stat", "drop", "watch", "fds", "next"]
STORE_VERBS = ["put", "take", "list", "drop", "fds", "next"]
FIELDS = ["total", "key", "id", "force", "name", "fds", "count", "ok"]
ODD: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3, 250, 4097, 4098, 10**30, 1.5, "", "x", "\ud800", "x.a"),
    *([], {}, [[]], {"a": 1}, {"a": "b"}, "generation.x", {"model": "a", "dtype": "float32"}),
]


class Attacker:
    """Sends malformed conversations to a socket and counts the messages."""

    def __init__(self, path: Path, seed: int, verbs: list[str], description: bytes) -> None:
        self.path = path
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.verbs = verbs
        self.description = description
        self.sent = 0
        self.answers = 0
        self.in_step = True  # whether the other side sees frames where we see them
        self.null = os.open("/dev/null", os.O_RDWR)
        self.memfd = segments.create(4096, "hostile")
        self.sealed = segments.create(4096, "sealed")
        segments.seal(self.sealed)
        self.pidfd = os.pidfd_open(os.getpid())
        self.pair = socket.socketpair()
        self.acts: list[Callable[[socket.socket], None]] = [
            *(self.noise, self.truncated, self.oversized, self.odd_request, self.many_at_once),
            *(self.uninvited_fds, self.transfer, self.transfer, self.half_fetch),
        ]

    def close(self) -> None:
        close_all([self.null, self.memfd, self.sealed, self.pidfd])
        for sock in self.pair:
            sock.close()

    def session(self) -> None:
        self.in_step = True
        with connect(self.path) as sock, suppress(OSError):
            for _ in range(self.random.randint(1, 4)):
                self.random.choice(self.acts)(sock)

    def send(self, sock: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
        self.sent += 1
        send_some(sock, memoryview(data), fds or [])

    def request(self) -> dict[str, Any]:
        body = {"verb": self.random.choice(self.verbs)} if self.random.random() < 0.9 else {}
        for field in self.random.sample(FIELDS, self.random.randint(0, 4)):
            body[field] = self.random.choice(ODD)
        return body

    def any_fds(self, most: int) -> list[int]:
        kinds = [self.null, self.memfd, self.sealed, self.pidfd, self.pair[0].fileno()]
        return [self.random.choice(kinds) for _ in range(self.random.randint(0, most))]

    def noise(self, sock: socket.socket) -> None:
        self.in_step = False
        self.send(sock, self.random.randbytes(self.random.randint(1, 300)))

    def truncated(self, sock: socket.socket) -> None:
        self.in_step = False
        data = encode(self.request())
        self.send(sock, data[: self.random.randint(1, len(data))])

    def oversized(self, sock: socket.socket) -> None:
        self.in_step = False
        length = self.random.choice([65537, 1 << 24, 2**32 - 1])
        self.send(sock, struct.pack(">I", length) + b"{" * self.random.randint(0, 1000))

    def odd_request(self, sock: socket.socket) -> None:
        payload = encode(self.request())[4:]
        if self.random.random() < 0.5:
            broken = bytearray(payload)
            broken[self.random.randrange(len(broken))] = self.random.randrange(256)
            payload = bytes(broken)
        self.send(sock, struct.pack(">I", len(payload)) + payload)
        self.hear(sock)

    def many_at_once(self, sock: socket.socket) -> None:
        count = self.random.randint(2, 6)
        self.send(sock, b"".join(encode(self.request()) for _ in range(count)))
        self.sent += count - 1

    def uninvited_fds(self, sock: socket.socket) -> None:
        self.send(sock, encode(self.request()), self.any_fds(250))

    def transfer(self, sock: socket.socket) -> None:
        """A publish or put that stops somewhere, or brings the wrong descriptors."""
        total = self.random.choice([1, 2, 3, 4, 251, 300])
        verb = "put" if "put" in self.verbs else "publish"
        name = f"x.{self.random.randint(0, 3)}"
        self.send(sock, encode({"verb": verb, "total": total, "name": name}))
        self.hear(sock)
        described = segments.create_sealed(self.mutated(), "d")
        try:
            while total > 0 and self.random.random() < 0.9:
                count = min(total, 250) + self.random.choice([0] * 8 + [1, -1])
                fds = ([described] + self.any_fds(0) + [self.sealed] * 300)[: max(0, count)]
                if self.random.random() < 0.2:
                    fds = self.any_fds(250)
                answer = "fds" if self.random.random() < 0.9 else self.random.choice(self.verbs)
                self.send(sock, encode({"verb": answer}), fds[:253])
                self.hear(sock)
                total -= 250
        finally:
            os.close(described)
        self.drain(sock)

    def half_fetch(self, sock: socket.socket) -> None:
        """A fetch or take that is left off, or whose batches are not received."""
        key = {"model": "a", "dtype": "float32"}
        verb = "take" if "put" in self.verbs else "fetch"
        name = f"x.{self.random.randint(0, 3)}"
        self.send(sock, encode({"verb": verb, "key": key, "name": name}))
        self.hear(sock)
        for _ in range(self.random.randint(0, 3)):
            self.send(sock, encode({"verb": "next"}))
            self.hear(sock)
        self.drain(sock)

    def mutated(self) -> bytes:
        """A description with a piece cut out, doubled or overwritten."""
        text = bytearray(self.description)
        first = self.random.randrange(len(text))
        piece = text[first : first + self.random.randint(1, 40)]
        how = self.random.randrange(4)
        if how == 0:
            del text[first : first + len(piece)]
        elif how == 1:
            text[first:first] = piece
        elif how == 2:
            text[first : first + 1] = self.random.randbytes(1)
        else:
            value = json.loads(self.description)
            value[self.random.choice(list(value))] = self.random.choice(ODD)
            text = bytearray(json.dumps(value).encode())
        return bytes(text)

    def hear(self, sock: socket.socket) -> None:
        """Mostly, wait for an answer: who leaves at once never gets far into a conversation."""
        if self.in_step and self.random.random() < 0.8:
            data, fds, _, _ = socket.recv_fds(sock, 65536, 253)
            close_all(fds)
            self.answers += bool(data)

    def drain(self, sock: socket.socket) -> None:
        """Receive what is there by now, descriptors too, and close them."""
        if self.random.random() < 0.5:
            return
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                data, fds, _, _ = socket.recv_fds(sock, 65536, 253)
                close_all(fds)
                if not data:
                    break
        sock.settimeout(20)
