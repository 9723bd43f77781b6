# SPDX-License-Identifier: Apache-2.0
"""The vault: keeps the descriptors of published generations and hands them out.

It maps nothing and runs on the standard library, because its memory is paid on every machine. With
an fd store it may die at any moment: a publish is acknowledged only after the store holds
duplicates, and a starting vault takes them back, leases included. A generation is visible whole or
not at all. `serve` is its process.
"""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from .errors import WcacheError, malformed
from .generation import Generation, key_id
from .leases import Leases
from .log import Log
from .protocol import MAX_FDS, VERSION, FdBag, Peer, open_peer_pidfd
from .residents import Resident, Residents, read_generation
from .server import Answer, Client, Server, Transfer, give_fds, take_fds
from .store import FdStoreClient

MAX_GENERATIONS = 256
_SHOWN = 200


class Vault:
    """The service. Owns the residents and the leases, and their duplicates in the store."""

    def __init__(
        self,
        listener: socket.socket,
        store: FdStoreClient | None,
        log: Log,
        limit_s: float = 5.0,
    ) -> None:
        self._store = store
        self._log = log
        self._residents = Residents()
        self.server = Server(listener, self, limit_s=limit_s)
        self._leases = Leases(self.server.watch, self.server.forget, self._tell, store, log)
        self._verbs: dict[str, Callable[[Client, dict[str, Any]], Answer | Transfer]] = {
            "hello": self._hello,
            "publish": self._publish,
            "fetch": self._fetch,
            "lease": self._lease,
            "release": self._release,
            "stat": self._stat,
            "drop": self._drop,
            "watch": self._watch,
        }

    def admits(self, sock: socket.socket, peer: Peer) -> bool:
        """Serve this process's own user, and root."""
        return peer.uid in (0, os.getuid())

    def warn(self, message: str, **fields: object) -> None:
        """Log what the server met."""
        self._log.warning(message, **fields)

    def handle(self, client: Client, body: dict[str, Any]) -> Answer | Transfer:
        """Given a request, do what its verb says."""
        verb = self._verbs.get(str(body.get("verb")))
        if verb is None:
            raise malformed(f"unknown verb {str(body.get('verb'))[:_SHOWN]!r}")
        return verb(client, body)

    def recover(self) -> int:
        """Take back what the store holds; return how many generations are resident.

        An entry that does not hold what its name says is dropped there: it would only leak.
        """
        if self._store is None:
            return 0
        entries = sorted(self._store.entries(), key=lambda entry: entry.name)
        for entry in entries:  # by name, so generations come before their leases
            kind, _, rest = entry.name.partition(".")
            with self._store.take(entry.name) as bag:
                try:
                    if kind == "generation":
                        self._residents.keep(read_generation(bag), bag, entry.put_at)
                    else:
                        self._recover_lease(rest, bag, entry.put_at)
                except WcacheError as error:
                    self._log.warning("dropped an entry", name=entry.name, detail=error.detail)
                    self._store.drop(entry.name)
        return len(self._residents)

    def close(self) -> None:
        """Close every descriptor that is not the server's. The store keeps its duplicates."""
        self._leases.close()
        self._residents.close()

    def _recover_lease(self, name: str, bag: FdBag, put_at: float) -> None:
        generation_id, _, pid = name.partition(".")
        if generation_id not in self._residents or len(bag) != 1 or not pid.isdigit():
            raise malformed("a lease of nothing")
        resident = self._residents[generation_id]
        resident.last_use = max(resident.last_use, put_at)
        # One that has ended meanwhile ends at the loop's first step.
        self._leases.add(generation_id, int(pid), bag.take()[0])

    def _hello(self, client: Client, body: dict[str, Any]) -> Answer:
        count = len(self._residents)
        return {
            **{"ok": True, "version": VERSION, "pid": os.getpid(), "uid": os.getuid()},
            **{"generations": count, "clients": self.server.clients, "leases": len(self._leases)},
        }

    def _publish(self, client: Client, body: dict[str, Any]) -> Transfer:
        total = body.get("total")
        if type(total) is not int or not 2 <= total <= MAX_FDS:
            raise malformed("a generation has a description and 1 to 4096 segments")
        with FdBag() as bag:
            yield from take_fds(total, bag)
            generation = read_generation(bag)
            new = generation.id not in self._residents
            if new and len(self._residents) >= MAX_GENERATIONS:
                raise WcacheError("wcache.too-large", f"{MAX_GENERATIONS} generations are resident")
            if self._store is not None:
                self._store.put(f"generation.{generation.id}", bag.fds)
            self._residents.keep(generation, bag, time.time())
        self._tell("published", generation.id, client.peer.pid)
        self._begin_lease(client, generation.id)
        self._log.info(
            "generation published",
            id=generation.id,
            model=generation.model,
            bytes=generation.size_bytes,
            segments=len(generation.segments),
            pid=client.peer.pid,
        )
        self._drop_superseded(generation)
        return {"ok": True, "id": generation.id}

    def _fetch(self, client: Client, body: dict[str, Any]) -> Transfer:
        key = body.get("key")
        if not isinstance(key, dict) or any(type(value) is not str for value in key.values()):
            raise malformed("a key is an object of texts")
        generation_id = key_id(key)
        if generation_id not in self._residents:
            raise self._residents.explain_miss(key)
        resident = self._residents[generation_id]
        new = self._begin_lease(client, generation_id)
        resident.last_use = time.time()
        try:
            with resident.lent as fds:
                return (yield from give_fds(fds, {"id": generation_id}))
        except BaseException:
            # It never got them, so it holds nothing.
            if new:
                self._leases.end(generation_id, client.peer.pid)
            raise

    def _lease(self, client: Client, body: dict[str, Any]) -> Answer:
        generation_id = self._known(body)
        self._residents[generation_id].last_use = time.time()
        self._begin_lease(client, generation_id)
        return {"ok": True}

    def _release(self, client: Client, body: dict[str, Any]) -> Answer:
        self._leases.end(str(body.get("id")), client.peer.pid)
        return {"ok": True}

    def _stat(self, client: Client, body: dict[str, Any]) -> Answer:
        rows = self._residents.rows()
        for row in rows:
            row["holders"] = self._leases.holders(row["id"])
        return {"ok": True, "generations": rows}

    def _drop(self, client: Client, body: dict[str, Any]) -> Answer:
        generation_id = self._known(body)
        holders = self._leases.holders(generation_id)
        if holders and body.get("force") is not True:
            raise WcacheError(
                "wcache.in-use",
                f"generation {generation_id} is held by PID {', '.join(map(str, holders))}",
                "stop the engine, or drop with --force (a running engine keeps its memory)",
            )
        self._give_up(generation_id, client.peer.pid)
        self._log.info("generation dropped", id=generation_id, pid=client.peer.pid)
        return {"ok": True}

    def _drop_superseded(self, generation: Generation) -> None:
        """Give up what a publish made obsolete. What a process holds waits for the next such one.

        Whoever maps a generation holds it, from before its first mapping until its process ends.
        """
        for generation_id in self._residents.find_superseded(generation):
            if self._leases.holders(generation_id):
                continue
            try:
                resident = self._give_up(generation_id, 0)
            except WcacheError as error:  # the publish itself is done
                self._log.warning(
                    "superseded generation stays", id=generation_id, detail=error.detail
                )
                continue
            self._log.info(
                "superseded generation dropped",
                id=generation_id,
                by=generation.id,
                bytes=resident.size_bytes,
            )

    def _give_up(self, generation_id: str, pid: int) -> Resident:
        """Drop a generation, first in the store: what it keeps would come back with a restart."""
        if self._store is not None:
            self._store.drop(f"generation.{generation_id}")
        self._leases.end_all(generation_id)
        resident = self._residents.give_up(generation_id)
        self._tell("dropped", generation_id, pid)
        return resident

    def _watch(self, client: Client, body: dict[str, Any]) -> Answer:
        client.listens = True
        return {"ok": True, "event": "resident", "ids": list(self._residents)}

    def _known(self, body: dict[str, Any]) -> str:
        generation_id = str(body.get("id"))
        if generation_id not in self._residents:
            detail = f"generation {generation_id[:_SHOWN]} is not resident"
            raise WcacheError("wcache.absent", detail, "see `wcache status`")
        return generation_id

    def _begin_lease(self, client: Client, generation_id: str) -> bool:
        """Begin the lease of the client's process; tell whether it is a new one."""
        pid = client.peer.pid
        try:
            pidfd = open_peer_pidfd(client.sock, client.peer)
        except (OSError, ValueError, OverflowError) as error:
            raise WcacheError(
                "wcache.refused", f"PID {pid} cannot hold a lease: {error}"
            ) from error
        return self._leases.begin(generation_id, pid, pidfd)

    def _tell(self, event: str, generation_id: str, pid: int) -> None:
        """Tell all who watch of a change, and whose process made it (0: the vault itself)."""
        self.server.broadcast({"ok": True, "event": event, "id": generation_id, "pid": pid})
