# SPDX-License-Identifier: Apache-2.0
"""A vault in a thread of the test's own process, and small generations to put into it."""

import contextlib
import gc
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest
from warmhold_wcache import cli, segments
from warmhold_wcache.generation import Generation, Segment, Tensor
from warmhold_wcache.log import Log
from warmhold_wcache.server import listen
from warmhold_wcache.store import FdStoreClient
from warmhold_wcache.vault import Vault

SIZE = 4096


def open_fds() -> int:
    """How many descriptors this process has open (the one that looks is not counted)."""
    gc.collect()  # earlier tests may have left sockets to it
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


def least_fds() -> int:
    """The least of several looks: what is open while nothing is going on. The store closes its end
    of a call of the vault's a moment after the answer."""
    looks = []
    for _ in range(20):
        looks.append(open_fds())
        time.sleep(0.01)
    return min(looks)


def make_generation(
    name: str = "a", count: int = 3, backend: str = "memfd"
) -> tuple[Generation, list[int]]:
    """Given a name, return a generation and its segments, whose bytes follow from the name."""
    fds = [segments.create(SIZE, f"test:{name}:{index}") for index in range(count)]
    for index, fd in enumerate(fds):
        os.pwrite(fd, f"{name}{index}".encode() * 100, 0)
    generation = Generation(
        key={"model": name, "dtype": "float32"},
        launch_key={"argv": name},
        backend=backend,
        device="cpu",
        model=f"model {name}",
        segments=tuple(Segment(SIZE, 0, segments.checksum(fd, SIZE)) for fd in fds),
        tensors=tuple(
            Tensor(f"w{index}", "parameter", index, 0, (32, 32), (32, 1), "float32")
            for index in range(count)
        ),
        aliases={"tied": "w0"},
        attributes={"scale": 0.5, "list": [1, None]},
    )
    return generation, fds


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class Steps(Protocol):
    """A server, or the fd store around one."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None: ...

    def step(self) -> None: ...


class Loop:
    """Steps a server in a thread, as long as the block lasts."""

    def __init__(self, server: Steps) -> None:
        self._server = server
        self._reader, self._writer = os.pipe()
        self._asked = False
        server.watch(self._reader, lambda: None)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._asked:
            self._server.step()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._asked = True
        os.write(self._writer, b"\0")
        self._thread.join(20)
        assert not self._thread.is_alive()
        close_all([self._reader, self._writer])


@contextmanager
def running_vault(
    folder: Path, store: Path | None = None, limit_s: float = 5.0, log_level: str = "error"
) -> Iterator[tuple[Path, Vault]]:
    """A vault that serves at a path; everything it held is closed afterwards."""
    path = folder / "vault.sock"
    listener = listen(path)
    kept = None if store is None else FdStoreClient(store)
    vault = Vault(listener, kept, Log(log_level), limit_s)
    vault.recover()
    try:
        with Loop(vault.server):
            yield path, vault
    finally:
        vault.server.close()
        vault.close()


def command(path: Path, *arguments: str) -> tuple[int, str]:
    """Run `wcache` in this process; return its exit code and what it wrote."""
    written = io.StringIO()
    argv = ["wcache", "--socket", str(path), "--timeout", "1", *arguments]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(written),
        pytest.raises(SystemExit) as caught,
    ):
        patch.setattr(sys, "argv", argv)
        cli.main()
    return int(caught.value.code or 0), written.getvalue()


def connect(path: Path) -> socket.socket:
    """Connect, also while so many wait for the vault to accept that its queue is full."""
    deadline = time.monotonic() + 20
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(20)
        try:
            sock.connect(str(path))
            return sock
        except BlockingIOError:
            sock.close()
            assert time.monotonic() < deadline, "the queue stays full"
            time.sleep(0.001)
