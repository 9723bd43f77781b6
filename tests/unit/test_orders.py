# SPDX-License-Identifier: Apache-2.0
"""Orders to the runner: taken by its loop, answered late, and no matter who goes away."""

import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from warmhold_entrypoint.running.loop import Loop
from warmhold_entrypoint.running.orders import SOCKET_NAME, Order, give_order, serve_orders


class Stand:
    """A server with the loop that it belongs to, and the orders that it took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orders: list[Order] = []
        self.loop = Loop()
        self.server = serve_orders(folder, self.loop, self.orders.append)

    def take(self) -> Order:
        while not self.orders:
            self.loop.wait(None)
        return self.orders.pop()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path)
    yield made
    made.server.close()
    made.loop.close()


def give(stand: Stand, answers: list[Any]) -> threading.Thread:
    thread = threading.Thread(
        target=lambda: answers.append(give_order(stand.folder, "create", "one", 60))
    )
    thread.start()
    return thread


def test_an_order_and_its_answer(stand: Stand) -> None:
    answers: list[Any] = []
    thread = give(stand, answers)
    order = stand.take()
    assert (order.act, order.name) == ("create", "one")
    order.answer({"ok": True, "name": "one"})
    thread.join(60)
    assert answers == [{"ok": True, "name": "one"}]


def test_a_refusal(stand: Stand) -> None:
    answers: list[Any] = []
    thread = give(stand, answers)
    stand.take().refuse("snapshot.off", "why", "do")
    thread.join(60)
    assert answers == [{"ok": False, "code": "snapshot.off", "detail": "why", "remedy": "do"}]


def test_whoever_gave_it_may_go_away(stand: Stand) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(stand.folder / SOCKET_NAME))
        client.sendall(b'{"act": "create", "name": "", "mode": ""}')
    stand.take().answer({"ok": True})


@pytest.mark.parametrize(
    "words",
    [b"", b"no json", b"[]", b'{"act": "create", "name": ""}', b"[" * 4096],
    ids=lambda words: str(words[:8]),
)
def test_what_is_no_order_is_not_taken(stand: Stand, words: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(stand.folder / SOCKET_NAME))
        client.sendall(words)
        client.shutdown(socket.SHUT_WR)
        stand.loop.wait(None)
        stand.loop.wait(None)
        assert client.recv(10) == b""
    assert stand.orders == []


def test_of_those_who_say_nothing_some_are_kept(stand: Stand) -> None:
    with ExitStack() as clients:
        connected = []
        for _ in range(40):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(60)
            client.connect(str(stand.folder / SOCKET_NAME))
            connected.append(client)
            stand.loop.wait(None)
        for client in connected[:24]:
            assert client.recv(10) == b""
        for client in connected[24:]:
            client.sendall(b'{"act": "create", "name": "", "mode": ""}')
            stand.take().answer({"ok": True})


def test_one_that_is_cut_off_as_it_speaks_harms_nobody(stand: Stand) -> None:
    with ExitStack() as clients:
        connected = []
        for number in range(17):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(stand.folder / SOCKET_NAME))
            connected.append(client)
            if number < 16:
                stand.loop.wait(None)
        connected[0].sendall(b'{"act": "create", "name": "", "mode": ""}')
        stand.loop.wait(None)  # both are seen at once, in either order
        assert len(stand.orders) <= 1
        connected[1].sendall(b'{"act": "create", "name": "x", "mode": ""}')
        while not any(order.name == "x" for order in stand.orders):
            stand.loop.wait(None)


def test_nobody_but_the_user_may_give_one(stand: Stand) -> None:
    assert stat.S_IMODE((stand.folder / SOCKET_NAME).stat().st_mode) == 0o600


def test_no_runner(tmp_path: Path) -> None:
    answer = give_order(tmp_path, "create", "", 1)
    assert (answer["ok"], answer["code"]) == (False, "ready.no-runner")
    assert cast(str, answer["remedy"])
