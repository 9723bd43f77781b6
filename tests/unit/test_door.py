# SPDX-License-Identifier: Apache-2.0
"""A listening socket that gets no connection for a while."""

import errno
import select
import socket

import pytest
from warmhold_wcache import door

PATIENCE_S = 60


def test_who_comes_meanwhile_waits_and_gets_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        door.shut(listener.fileno())
        with socket.socket() as client:
            client.setblocking(False)
            assert client.connect_ex(listener.getsockname()) == errno.EINPROGRESS
            with pytest.raises(BlockingIOError):
                listener.accept()  # over loopback it would be there by now
            door.unlock(listener.fileno())
            assert select.select([listener], [], [], PATIENCE_S)[0]
            accepted, _ = listener.accept()
            with accepted:
                client.setblocking(True)
                accepted.sendall(b"x")
                assert client.recv(1) == b"x"


def test_a_connection_that_was_there_before_goes_on() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        door.shut(listener.fileno())
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"


def test_a_door_that_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError):
        door.unlock(listener.fileno())
