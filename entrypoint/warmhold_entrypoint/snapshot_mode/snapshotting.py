# SPDX-License-Identifier: Apache-2.0
"""What the runner does for snapshots beside its engine: one in the making, from order to answer."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from warmhold_snapshot import artifact, pids
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.identity import is_on_gpu

from ..container.conf import CONTROL_SOCKET, VAULT_SOCKET
from ..errors import Fault
from ..gpus.gpu_snapshots import find_plugins
from ..log import Log
from ..plan import Plan
from ..running.loop import Loop
from ..running.orders import Order
from ..settings import Settings
from .making import Making
from .snapshots import AUTO_PREFIX, FOLDER

# A new container's own processes stay below, so that these numbers are free there.
_PIDS_ABOVE = 1000
_DRAIN_S, _AUTO_DRAIN_S = 30.0, 1.0
# More than all limits of a maker's own steps until the engine serves again.
_LIMIT_S = 480.0

_log = Log("snapshot")


class Snapshotting:
    """One snapshot of the running engine. Owns its maker, and the order until it is answered."""

    def __init__(
        self, order: Order | None, settings: Settings, plan: Plan, pid: int, loop: Loop
    ) -> None:
        """Given an order, or None where nobody asked: earlier ones of that kind are then removed;
        those that somebody made stay."""
        self.name = (order.name if order else AUTO_PREFIX) or "snapshot-"
        if self.name.endswith("-"):
            self.name += f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
        self.over = False
        self._interrupted = False
        self._order = order
        self._loop = loop
        self._result: Mapping[str, Any] = {}
        on_gpu = is_on_gpu(plan.snapshots.identity)
        request = {
            "act": "create",
            "pid": pid,
            "name": self.name,
            "folder": str(settings.env.state_dir / FOLDER),
            "control": str(settings.env.run_dir / CONTROL_SOCKET),
            "vault": str(settings.env.run_dir / VAULT_SOCKET),
            "weights": settings.env.snapshot_weights,
            "compress": settings.env.snapshot_compress,
            "plugins": str(find_plugins(settings)) if on_gpu else "",
            "drain_s": _DRAIN_S if order else _AUTO_DRAIN_S,
            "identity": dict(plan.snapshots.identity),
            "other_uid": bool(settings.env.engine_uid),
            "prune": "" if order else AUTO_PREFIX,
        }
        self._making = Making(request, loop)
        self._until = time.monotonic() + _LIMIT_S

    @property
    def detail(self) -> str:
        """Why no other order is taken meanwhile."""
        serves = "" if self.holds else ", while the engine serves again"
        return f"the snapshot {self.name} is being made{serves}"

    @property
    def code(self) -> str:
        """Why there is no artifact, once it is over; "" where there is one."""
        return str(self._result.get("code", ""))

    @property
    def deadline(self) -> float | None:
        """When the engine has to serve again (monotonic); None where it does."""
        return self._until if self.holds else None

    @property
    def holds(self) -> bool:
        """Whether the engine may be held; once it is resumed only checksums are computed."""
        return not (self.over or self._making.resumed)

    def let_end(self) -> bool:
        """Tell whether the engine can be asked to end: one that is held is resumed first, or the
        wish to end would be part of the snapshot."""
        if self.holds:
            self.interrupt()
            return False
        return True

    def interrupt(self) -> None:
        """Give up; the engine is resumed first. A second interrupt would interrupt that."""
        if not self._interrupted:
            self._interrupted = True
            self._making.interrupt()

    def follow(self) -> Fault | None:
        """Look how far it is; return a fault where the engine does not serve again.

        A maker that ended without a word may have left the engine held: another one resumes it.
        """
        if self.holds and time.monotonic() > self._until:
            _log.warning("the maker of a snapshot does not end, killing it")
            self._until = time.monotonic() + _LIMIT_S
            self._making.kill()
        if self.over or not self._making.ended:
            return None
        making, result = self._making, self._making.finish()
        if making.request["act"] == "resume":
            if not result["ok"]:  # the answer is that the engine ends, and not only its snapshot
                self._result = result
            self._end()
            return None if result["ok"] else Fault.of(result)
        self._result = result
        if result.get("code") == "snapshot.killed" and not making.resumed:
            _log.warning("the maker of a snapshot was killed, resuming the engine")
            try:
                self._making = Making({**making.request, "act": "resume"}, self._loop)
            except OSError as error:  # of memory, processes or descriptors there are too few
                detail = f"the engine cannot be resumed: {error}"
                fault = Fault("snapshot.resume", detail, "see `docker stats`")
                self._result = {"ok": False, **asdict(fault)}
                self._end()
                return fault
            return None
        self._end()
        return Fault.of(result) if result.get("code") == "snapshot.resume" else None

    def abandon(self) -> None:
        """The engine has ended: end the maker too, and say so."""
        if not self.over:
            result = self._making.finish()
            self._result = self._result or result
            self._end()

    def _end(self) -> None:
        self.over = True
        result = self._result
        if result["ok"]:
            shown = ("pause_s", "frozen_s", "image_bytes", "weights_bytes")
            _log.info("snapshot made", name=self.name, **{name: result[name] for name in shown})
        else:
            _log.warning("no snapshot", code=result["code"], detail=result["detail"])
        if self._order:
            self._order.answer(result)


def raise_pids(plan: Plan) -> None:
    """Before an engine is started, let its process ids come out high, where it may be snapshotted.

    Where that fails the engine starts all the same, and a restore may find its numbers taken.
    """
    if plan.snapshots.identity:
        raise_high()


def raise_high() -> None:
    """Let the ids of processes that are started now come out high."""
    try:
        pids.raise_cursor(_PIDS_ABOVE)
    except (SnapshotError, RuntimeError) as error:  # of threads there may be none to have
        _log.warning("low process ids", detail=str(error))


def remove_revoked(settings: Settings, plan: Plan) -> None:
    """Remove the artifacts that have been revoked, and what killed makers left, whatever it holds:
    a revoked key must not come back to life, nor be found in an image."""
    folder = settings.env.state_dir / FOLDER
    for name in plan.snapshots.revoked:
        try:
            artifact.remove(folder / name)
            _log.info("removed a snapshot that has been revoked", name=name)
        except (OSError, SnapshotError) as error:
            _log.error("a snapshot that has been revoked stays", name=name, detail=str(error))
    if plan.snapshots.revoked:
        with suppress(OSError, SnapshotError):  # without the key nobody knows which are needed
            artifact.Store(folder).sweep_weights()
    with suppress(OSError):  # there is no such folder yet
        for left in artifact.sweep(folder):
            _log.warning("removed what a killed maker left", folder=left)
