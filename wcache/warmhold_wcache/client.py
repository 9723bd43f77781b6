# SPDX-License-Identifier: Apache-2.0
"""What an engine, a runner or a command asks of the vault. Standard library only.

Descriptors that `fetch` returns are the caller's to close. A lease belongs to the process that made
the connection, so a client must not be shared across a fork.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from . import segments
from .connection import Connection
from .errors import malformed
from .generation import Generation, encode_description, read_description

DEFAULT_SOCKET = Path("/run/warmhold/wcache.sock")
T = TypeVar("T")


class VaultClient:
    """One connection to the vault, made at the first call; every call has a time limit.

    `wait_s` is how long a vault that is just being started may take to come (within the limit).
    Every call raises WcacheError; see `errors` for the codes.
    """

    def __init__(
        self, socket_path: Path = DEFAULT_SOCKET, timeout_s: float = 5.0, wait_s: float = 0.0
    ) -> None:
        self._connection = Connection(socket_path, timeout_s)
        self._socket_path = socket_path
        self._timeout_s = timeout_s
        self._wait_s = wait_s

    def __enter__(self) -> "VaultClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; leases stay. A later call opens a new one."""
        self._connection.close()

    def hello(self) -> dict[str, Any]:
        """Return the vault's version, pid, uid and count of generations: a round trip."""
        return self._ask({"verb": "hello"})

    def publish(self, generation: Generation, fds: Sequence[int]) -> None:
        """Given a generation and its segments' descriptors, seal and publish them.

        Return when the fd store holds duplicates. Replaces a generation of the same key. The
        descriptors stay the caller's. Implies a lease of this process.
        """
        if len(fds) != len(generation.segments):
            raise malformed(f"{len(fds)} descriptors for {len(generation.segments)} segments")
        description = encode_description(generation)
        if generation.backend == "memfd":
            for fd in fds:
                segments.seal(fd)
        described = segments.create_sealed(description, f"warmhold:{generation.id}")
        try:
            self._call(lambda: self._connection.give({"verb": "publish"}, [described, *fds]))
        finally:
            os.close(described)

    def fetch(self, key: Mapping[str, str]) -> tuple[Generation, list[int]]:
        """Given an exact key, return the generation and its segments' descriptors.

        Raise MissError where it is not resident. Implies a lease of this process until `release`
        or its end.
        """
        request = {"verb": "fetch", "key": dict(key)}
        _, bag = self._call(lambda: self._connection.take(request))
        with bag:
            if len(bag) < 2:
                raise malformed("a generation without segments")
            generation = read_description(bag.fds[0])
            if generation.key != dict(key) or len(generation.segments) != len(bag) - 1:
                raise malformed("the vault sent another generation")
            description, *fds = bag.take()
            os.close(description)
        return generation, fds

    def lease(self, generation_id: str) -> None:
        """Hold a generation for this process until `release` or its end."""
        self._ask({"verb": "lease", "id": generation_id})

    def release(self, generation_id: str) -> None:
        """End this process's lease; one that is not there is fine."""
        self._ask({"verb": "release", "id": generation_id})

    def stat(self) -> list[dict[str, Any]]:
        """Return a row for each generation: id, model, keys, bytes, segments, last_use, holders."""
        rows = self._ask({"verb": "stat"}).get("generations")
        if not isinstance(rows, list):
            raise malformed("no list of generations")
        return rows

    def drop(self, generation_id: str, force: bool = False) -> None:
        """Give up a generation; raise WcacheError where a process holds it, unless forced."""
        self._ask({"verb": "drop", "id": generation_id, "force": force})

    def watch(self) -> Iterator[dict[str, Any]]:
        """Yield what is resident (`event` "resident", `ids`), then each change: `event`
        ("published", "dropped", "leased" or "released"), `id`, and `pid` (0: the vault itself).

        Begins when the first is asked for, on a connection of its own, and waits for each without a
        limit. Raise UnreachableError where the vault is gone, or dropped us for reading too slowly.
        """
        return Connection(self._socket_path, self._timeout_s).listen({"verb": "watch"})

    def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call(lambda: self._connection.ask(body)).body

    def _call(self, act: Callable[[], T]) -> T:
        return self._connection.call(act, self._wait_s)
