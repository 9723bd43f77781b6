# SPDX-License-Identifier: Apache-2.0
"""A snapshot in the making as the runner follows it: what is answered, and said meanwhile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from warmhold_entrypoint.errors import Fault
from warmhold_entrypoint.running.loop import Loop
from warmhold_entrypoint.snapshot_mode import snapshotting
from warmhold_entrypoint.snapshot_mode.snapshotting import Snapshotting

KILLED = {"ok": False, "code": "snapshot.killed", "detail": "it was killed", "remedy": "again"}
LOST = {"ok": False, "code": "snapshot.resume", "detail": "it does not serve", "remedy": "anew"}


class Order:
    name = "one"

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def answer(self, result: Any) -> None:
        self.answers.append(result)


class Making:
    """Makers that end at once, with the results that are left."""

    results: list[Any]

    def __init__(self, request: dict[str, Any], loop: Loop) -> None:
        self.request = dict(request)
        self.ended, self.resumed = True, False

    def finish(self) -> Any:
        return self.results.pop(0)


@pytest.fixture
def order() -> Order:
    return Order()


@pytest.fixture
def making(order: Order, monkeypatch: pytest.MonkeyPatch) -> Snapshotting:
    monkeypatch.setattr(snapshotting, "Making", Making)
    env = SimpleNamespace(
        state_dir=Path("/s"), run_dir=Path("/r"), snapshot_weights="flat", snapshot_compress=False
    )
    env.engine_uid = None
    plan = SimpleNamespace(snapshots=SimpleNamespace(identity={"kernel": "k"}))
    given: Any = (order, SimpleNamespace(env=env), plan, 1, None)
    return Snapshotting(*given)


def test_the_engine_goes_on_after_a_killed_maker(making: Snapshotting, order: Order) -> None:
    Making.results = [KILLED, {"ok": True}]
    assert making.follow() is None and not making.over
    assert making.follow() is None and making.over
    assert order.answers == [KILLED] and making.code == "snapshot.killed"


def test_an_engine_that_cannot_be_resumed_is_told_as_that(
    making: Snapshotting, order: Order
) -> None:
    """Not as a snapshot alone that was not made: the engine is started anew."""
    Making.results = [KILLED, LOST]
    assert making.follow() is None
    assert making.follow() == Fault.of(LOST) and making.over
    assert order.answers == [LOST] and making.code == "snapshot.resume"


def test_without_a_process_to_resume_it_the_engine_is_lost(
    making: Snapshotting, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError("no process to be had")

    Making.results = [KILLED]
    monkeypatch.setattr(snapshotting, "Making", refuse)
    fault = making.follow()
    assert fault and fault.code == "snapshot.resume" and making.over
    assert [answer["code"] for answer in order.answers] == ["snapshot.resume"]


def test_what_it_says_to_other_orders(making: Snapshotting) -> None:
    assert making.detail == "the snapshot one is being made"
    making._making.resumed = True
    assert making.detail == "the snapshot one is being made, while the engine serves again"
