# SPDX-License-Identifier: Apache-2.0
"""A restart that somebody asked for: in which mode, out of which snapshot, and what came of it.

Looked at before the running engine is given up, so that a wish that cannot be met costs nothing.
A snapshot by upstream's command is such a wish too: it is made between two engines.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.upstream import is_upstreams

from ..errors import EntrypointError, Fault, Rejection
from ..log import Log
from ..plan import Plan
from ..reporting.story import Story
from ..settings import Settings
from ..snapshot_mode.upstream import choose, put_first
from ..snapshot_mode.upstream_command import create
from ..start import make_plan, make_sound_plan
from .beside import run_beside
from .loop import Loop
from .orders import CREATE, Order
from .phases import Gap

_log = Log("snapshot")


class Wanted:
    """Owns the order of a restart until it is answered; most of the time there is none."""

    def __init__(self, loop: Loop, story: Story, gap: Gap) -> None:
        self._loop, self._story, self._gap = loop, story, gap
        self._order: Order | None = None
        self._made: Mapping[str, Any] = {}  # what upstream's command made for it

    def take(self, order: Order, command: Sequence[str]) -> str:
        """Given an order and the container's command, return why the engine is to end ("" where the
        order was refused: a start would not come about that way)."""
        snapshot, against = _look(command, order)
        if against:
            order.refuse(against.code, against.detail, against.remedy)
            return ""
        order.name, self._order, self._made = snapshot, order, {}
        if order.act == CREATE:
            return f"ended so that `vllm snapshot create` has the GPU for {order.name}"
        if order.mode == "snapshot":
            return f"restarted to restore the snapshot {order.name}"
        return f"restarted in mode {order.mode}" if order.mode else "restarted on request"

    def make(self, settings: Settings, plan: Plan) -> None:
        """Given those of the engine that has ended, have upstream make the snapshot that was asked
        for, if one was. Where that fails the order is refused."""
        order = self._order
        if order is None or order.act != CREATE:
            return
        self._story.reason = f"`vllm snapshot create` makes {order.name}"
        try:
            self._made = run_beside(self._loop, partial(create, settings, plan, order.name))
        except SnapshotError as error:
            _log.warning("no snapshot", code=error.code, detail=error.detail)
            self.refuse(Fault.of(error.to_json()))
        self._gap.close("snapshot")

    def make_plan(self, command: Sequence[str]) -> tuple[Settings, Plan]:
        """Given the container's command, return settings and plan of the next start. A wish that
        cannot be met any more is refused, and the usual start follows."""
        order = self._order
        if order is None:
            return make_sound_plan(command)
        try:
            settings, plan = make_sound_plan(command, snapshot=_ours(order), mode=_forced(order))
            if order.act != CREATE and is_upstreams(order.name):
                plan = put_first(settings, plan, order.name)
            return settings, plan
        except EntrypointError as error:
            self.refuse(error.faults[0])
            return make_sound_plan(command)

    def check(self, plan: Plan) -> None:
        """Given the plan of the next start, refuse a snapshot that is not in it."""
        if self._order and self._order.mode == "snapshot" and not plan.attempts[0].snapshot:
            self.refuse(plan.rejections[0])

    def refuse(self, why: Rejection | Fault) -> None:
        """Say why the engine does not come back that way; nobody needs to have asked."""
        if self._order:
            self._order.refuse(why.code, why.detail, why.remedy)
            self._order = None

    def answer(self, result: Mapping[str, Any]) -> None:
        """The engine serves: say how."""
        if self._order:
            self._order.answer({"ok": True, "name": self._order.name, **self._made, **result})
            self._order = None


def _forced(order: Order) -> str:
    """The mode that has to be planned alone. A snapshot comes first anyway, and where it fails the
    next rung has to follow."""
    return "" if order.mode == "snapshot" else order.mode


def _ours(order: Order) -> str:
    """The artifact of ours that has to be restored, and no other; "" for the usual one."""
    return "" if is_upstreams(order.name) else order.name


def _look(command: Sequence[str], order: Order) -> tuple[str, Rejection | Fault | None]:
    """Given an order, return which snapshot a start would restore, and what is against that
    start."""
    settings, plan, faults, _ = make_plan(command, snapshot=_ours(order), mode=_forced(order))
    if is_upstreams(order.name):
        name, reason = choose(settings, plan, order)
        return name, reason or next(iter(faults), None)
    if order.mode != "snapshot":
        return "", next(iter(faults), None)
    against: list[Rejection | Fault] = [item for item in plan.rejections if item.mode == "snapshot"]
    return plan.snapshots.name, next(iter([*against, *faults]), None)
