# SPDX-License-Identifier: Apache-2.0
"""PID 1 as the fd store: duplicates of the vault's descriptors that outlive the vault.

As systemd's: `put` descriptors under a name, `list`, `take` duplicates back, `drop`. What they are
is not looked at. PID 1 must neither die nor wait here, nor run out of descriptors
that it needs itself: the server below waits for nobody, and a share of the limit is never lent.
"""

import errno
import re
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmhold_wcache.errors import WcacheError, malformed
from warmhold_wcache.protocol import MAX_FDS, FdBag, Peer
from warmhold_wcache.server import (
    Answer,
    Client,
    LentFds,
    Server,
    Transfer,
    give_fds,
    listen,
    take_fds,
)

from ..log import Log
from ..running import tree

_MAX_ENTRIES = 1024
_MAX_CLIENTS = 16
# One batch of each client may be under way, and PID 1 reads /proc and starts supervisord.
_OWN_FDS = 320
_NAME = re.compile(r"[a-z]+\.[\w.-]{1,100}", re.ASCII)
_SO_PEERGROUPS = 59  # asm-generic/socket.h
_GROUPS_BYTES = 1024  # the most that Python asks for
_ERROR_PAUSE_S = 0.1

_log = Log("fdstore")


@dataclass
class _Entry:
    lent: LentFds
    put_at: float


class FdStore:
    """The service. Owns its socket and every descriptor that was put."""

    def __init__(self, path: Path, uid: int) -> None:
        self._path = path
        self._uid = uid
        self._entries: dict[str, _Entry] = {}
        self._fds = 0  # kept, and promised to transfers under way
        self._server = Server(listen(self._path, uid), self, max_clients=_MAX_CLIENTS)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Given a descriptor of PID 1's own, call back in `step` whenever it can be read."""
        self._server.watch(fd, callback)

    def step(self, timeout_s: float | None = None) -> None:
        """Serve what is to be served, at most waiting that long; never raise."""
        try:
            self._server.step(timeout_s)
        except Exception as error:  # PID 1 must outlive every fault of the store
            _log.error("the fd store met a bug", error=repr(error))
            time.sleep(_ERROR_PAUSE_S)

    def close(self) -> None:
        """Close every descriptor: the weights go with the last one."""
        self._server.close()
        for entry in self._entries.values():
            entry.lent.give_up()
        self._entries.clear()
        self._path.unlink(missing_ok=True)

    def admits(self, sock: socket.socket, peer: Peer) -> bool:
        """Serve root and the engine's user, but no process of an engine itself."""
        return peer.uid in (0, self._uid) and tree.ENGINE_GROUP not in _read_groups(sock)

    def warn(self, message: str, **fields: object) -> None:
        """Log what the server met."""
        _log.warning(message, **fields)

    def handle(self, client: Client, body: dict[str, Any]) -> Answer | Transfer:
        """Given a request, do what its verb says."""
        verb = body.get("verb")
        if verb == "list":
            return self._list()
        name = body.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise malformed("a name is kind.name, of letters, digits, '.', '_', '-'")
        if verb == "put":
            return self._put(name, body.get("total"))
        if verb == "take":
            return self._take(name)
        if verb == "drop":
            self._remove(name)
            return {"ok": True}
        raise malformed("unknown verb")

    def _list(self) -> Answer:
        entries = [
            [name, entry.put_at, len(entry.lent.fds)] for name, entry in self._entries.items()
        ]
        return {"ok": True, "entries": entries}

    def _put(self, name: str, total: object) -> Transfer:
        """Keep the descriptors that come, in place of an earlier entry, once they are all there."""
        if type(total) is not int or not 1 <= total <= MAX_FDS:
            raise malformed(f"1 to {MAX_FDS} descriptors can be put at once")
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_FDS
        if len(self._entries) >= _MAX_ENTRIES or self._fds + total > limit:
            raise WcacheError(
                "wcache.too-large",
                f"{self._fds} descriptors in {len(self._entries)} entries are kept; no room for"
                f" {total} more below the limit of {limit}",
                "drop what is not used, or raise the container's limit of open files",
            )
        self._fds += total
        kept = False
        try:
            with FdBag() as bag:
                yield from take_fds(total, bag)
                self._remove(name)
                self._entries[name] = _Entry(LentFds(bag.take()), time.time())
                kept = True
        finally:
            if not kept:
                self._fds -= total
        return {"ok": True}

    def _take(self, name: str) -> Transfer:
        entry = self._entries.get(name)
        if entry is None:
            raise WcacheError("wcache.absent", f"nothing is kept as {name}")
        with entry.lent as fds:
            return (yield from give_fds(fds, {}))

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._fds -= len(entry.lent.fds)
            entry.lent.give_up()


def _read_groups(sock: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of a peer; none where the kernel does not tell."""
    try:
        groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        # More groups than fit: nothing of ours has so many.
        return (tree.ENGINE_GROUP,) if error.errno == errno.ERANGE else ()
    return tuple(memoryview(groups).cast("I"))
