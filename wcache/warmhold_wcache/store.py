# SPDX-License-Identifier: Apache-2.0
"""The vault's view of the fd store: where duplicates of its descriptors outlive it.

Each call has a connection of its own, so nothing is left open on the other side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .connection import Connection
from .errors import malformed
from .protocol import FdBag


@dataclass(frozen=True)
class Entry:
    """A name in the store, when it was put there (Unix s), and how many descriptors it has."""

    name: str
    put_at: float
    total: int


class FdStoreClient:
    """Puts descriptors into the store and takes duplicates back."""

    def __init__(self, path: Path, timeout_s: float = 5.0) -> None:
        self._connection = Connection(path, timeout_s)

    def put(self, name: str, fds: Sequence[int]) -> None:
        """Keep duplicates under a name, in place of what was there; return when they are kept."""
        try:
            self._connection.call(
                lambda: self._connection.give({"verb": "put", "name": name}, fds), wait_s=1.0
            )
        finally:
            self._connection.close()

    def take(self, name: str) -> FdBag:
        """Return duplicates of what is kept under a name."""
        try:
            return self._connection.call(
                lambda: self._connection.take({"verb": "take", "name": name})
            )[1]
        finally:
            self._connection.close()

    def entries(self) -> list[Entry]:
        """Return what is kept. A store that is not there yet may take a while to come."""
        try:
            answer = self._connection.call(
                lambda: self._connection.ask({"verb": "list"}), wait_s=5.0
            ).body
        finally:
            self._connection.close()
        try:
            return [
                Entry(str(name), float(put_at), int(total))
                for name, put_at, total in answer["entries"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise malformed(f"the store's list: {error}") from error

    def drop(self, name: str) -> None:
        """Give up what is kept under a name; nothing is fine too."""
        try:
            self._connection.call(lambda: self._connection.ask({"verb": "drop", "name": name}))
        finally:
            self._connection.close()
