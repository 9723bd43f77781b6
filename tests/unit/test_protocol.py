# SPDX-License-Identifier: Apache-2.0
"""Frames over real sockets: whole, in pieces, with descriptors, and wrong in every way."""

import errno
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from vault_process import close_all, open_fds
from warmhold_wcache.errors import MissError, WcacheError, error_from_json
from warmhold_wcache.protocol import (
    ClosedError,
    FdBag,
    Frame,
    FrameReader,
    Peer,
    decode,
    encode,
    open_peer_pidfd,
    read_peer,
    send_some,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left.settimeout(20)
    right.settimeout(20)
    with left, right:
        yield left, right


def read(sock: socket.socket, want_fds: int = 0, max_bytes: int = 1000) -> Frame:
    reader = FrameReader(max_bytes)
    try:
        while True:
            frame = reader.read(sock, want_fds)
            if frame is not None:
                return frame
    finally:
        reader.close()


def test_a_frame_arrives_whole_however_it_is_cut(pair: Pair) -> None:
    left, right = pair
    body = {"verb": "hello", "text": "ü\ud800", "n": [1, None, True]}
    for byte in encode(body):
        left.send(bytes([byte]))
    assert read(right).body == body


def test_two_frames_at_once_are_two_frames(pair: Pair) -> None:
    left, right = pair
    left.send(encode({"a": 1}) + encode({"b": 2}))
    reader = FrameReader(1000)
    frames = [frame for _ in range(4) if (frame := reader.read(right))]
    assert [frame.body for frame in frames] == [{"a": 1}, {"b": 2}]
    assert not reader.is_amid


def test_descriptors_come_with_their_frame_and_close_on_exec(pair: Pair) -> None:
    left, right = pair
    pipe = os.pipe()
    send_some(left, memoryview(encode({})), pipe)
    frame = read(right, want_fds=2)
    assert len(frame.fds) == 2
    for fd, original in zip(frame.fds.fds, pipe, strict=True):
        assert os.fstat(fd).st_ino == os.fstat(original).st_ino
        assert not os.get_inheritable(fd)
    frame.fds.close()
    close_all(list(pipe))


@pytest.mark.parametrize(("sent", "wanted"), [(1, 0), (0, 1), (1, 2), (3, 2), (4, 1), (250, 0)])
def test_a_wrong_count_is_refused_and_nothing_stays_open(
    pair: Pair, sent: int, wanted: int
) -> None:
    left, right = pair
    before = open_fds()
    with open("/dev/null", "rb") as file:  # noqa: PTH123
        send_some(left, memoryview(encode({})), [file.fileno()] * sent)
    with pytest.raises(WcacheError, match=r"wcache\.malformed"):
        read(right, wanted)
    assert open_fds() == before


@pytest.mark.parametrize(
    "payload",
    [
        *(b"x", b"[]", b"1", b'"x"', b"null", b"{", b'{"a":NaN}', b'{"a":-Infinity}', b"\xff\xfe"),
        *(b"[" * 900, b'{"a":' * 180, b'{"a":' + b"9" * 5000 + b"}", b"\0"),
    ],
    ids=repr,
)
def test_what_is_no_object_is_malformed(payload: bytes) -> None:
    with pytest.raises(WcacheError, match=r"wcache\.malformed"):
        decode(payload)


def test_depth_beyond_the_interpreters_is_malformed() -> None:
    with pytest.raises(WcacheError, match=r"wcache\.malformed"):
        decode(b'{"a":' * 200_000)


@pytest.mark.parametrize("length", [1001, 1 << 20, 2**32 - 1])
def test_a_length_beyond_the_bound_is_refused_before_anything_is_read(
    pair: Pair, length: int
) -> None:
    left, right = pair
    left.send(struct.pack(">I", length) + b"x")
    with pytest.raises(WcacheError, match=r"wcache\.too-large"):
        read(right)


def test_an_empty_frame_is_malformed(pair: Pair) -> None:
    left, right = pair
    left.send(bytes(4))
    with pytest.raises(WcacheError, match=r"wcache\.malformed"):
        read(right)


def test_the_end_of_the_stream_is_told(pair: Pair) -> None:
    left, right = pair
    left.send(encode({})[:5])
    left.close()
    with pytest.raises(ClosedError):
        read(right)


def test_the_peer_is_who_connected(pair: Pair) -> None:
    peer = read_peer(pair[0])
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    pidfd = open_peer_pidfd(pair[0], peer)
    with open(f"/proc/self/fdinfo/{pidfd}") as info:  # noqa: PTH123
        assert f"Pid:\t{os.getpid()}\n" in info.read()
    os.close(pidfd)


class Answering:
    """A socket of a kernel that answers so when it is asked for the peer's pidfd."""

    def __init__(self, code: int) -> None:
        self.code = code

    def getsockopt(self, *_: int) -> int:
        raise OSError(self.code, os.strerror(self.code))


def test_a_peer_that_has_ended_is_not_looked_for_by_its_pid() -> None:
    ours = Peer(os.getpid(), os.getuid())
    os.close(open_peer_pidfd(Answering(errno.ENOPROTOOPT), ours))  # type: ignore[arg-type]
    for code in (errno.ESRCH, errno.EINVAL):  # Linux 6.5 to 6.15
        with pytest.raises(OSError, match=os.strerror(code)):
            open_peer_pidfd(Answering(code), ours)  # type: ignore[arg-type]


def test_a_bag_closes_what_was_not_taken() -> None:
    before = open_fds()
    with FdBag(os.pipe()) as bag:
        bag.add(os.pipe())
        assert len(bag) == 4
        taken = bag.take()
        bag.add(os.pipe())
    assert open_fds() == before + 4
    close_all(taken)


@pytest.mark.parametrize(
    "error",
    [
        WcacheError("wcache.in-use", "held", "stop it"),
        MissError("wcache.key-mismatch", "a", {"a": ("1", "2")}),
        MissError("wcache.absent", "nothing", {}),
    ],
)
def test_errors_travel(error: WcacheError) -> None:
    back = error_from_json(decode(encode(error.to_json())[4:]))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
