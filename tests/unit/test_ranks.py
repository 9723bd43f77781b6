# SPDX-License-Identifier: Apache-2.0
"""Upstream's holder asked over its own protocol, and whatever else may listen there."""

import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from warmhold_entrypoint.weight_cache.ranks import Held, RankError, ask_rank, ask_ranks

LENGTH = struct.Struct("!Q")
Serve = Callable[..., Path]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Sockets that each answer one question with these bytes, or never."""
    servers: list[socket.socket] = []

    def start(answer: bytes | None, name: str = "a") -> Path:
        path = tmp_path / f"vllm_weight_cache_{name}.sock"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen()
        servers.append(server)

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                asked = connection.recv(4096)
                assert pickle.loads(asked[LENGTH.size :]) == {"cmd": "get_memory"}  # noqa: S301
                connection.sendall(answer or b"")

        if answer is not None:
            threading.Thread(target=run, daemon=True).start()
        return path

    yield start
    for server in servers:
        server.close()


def packed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def framed(value: Any) -> bytes:
    return packed(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def fails(path: Path) -> RankError:
    with pytest.raises(RankError) as caught:
        ask_rank(path, 0.3)
    return caught.value


def test_a_process_that_holds_weights(serve: Serve) -> None:
    assert ask_rank(serve(framed({"status": "ok", "memory_bytes": 7})), 5) == 7


def test_a_process_of_another_user_answers_too(serve: Serve) -> None:
    text = "Rejecting weight cache connection from uid 0"
    assert ask_rank(serve(framed({"status": "error", "message": text})), 5) is None


def test_what_holds_nothing_is_gone(serve: Serve, tmp_path: Path) -> None:
    assert fails(tmp_path / "absent.sock").gone
    assert fails(serve(framed({"status": "ok", "memory_bytes": 0}))).gone
    assert fails(serve(b"", "closed")).gone
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as once:
        once.bind(str(dead))
    assert "refused" in str(error := fails(dead)) and error.gone


def test_what_does_not_answer_in_time_is_not_gone_yet(serve: Serve) -> None:
    assert not fails(serve(None)).gone


@pytest.mark.parametrize(
    "answer",
    [
        LENGTH.pack(1 << 40),
        LENGTH.pack(4) + b"\xff\xff\xff\xff",
        framed(["no mapping"]),
        framed({"status": "error", "message": "Unknown command"}),
        framed({"status": "ok", "memory_bytes": "7"}),
        framed({}),
        # Pickles whose instructions do not fit together.
        packed(b"K\x01}b."),
        packed(b"K\x01(K\x02K\x03u."),
        packed(b"\x8e" + b"\xff" * 7 + b"\x7f."),
        packed(b"\x95" + b"\xff" * 8 + b"K\x01."),
    ],
)
def test_other_answers(serve: Serve, answer: bytes) -> None:
    assert not fails(serve(answer)).gone


def test_a_message_is_a_text_or_not_shown(serve: Serve) -> None:
    endless: Any = "a"
    for _ in range(60):  # printed it would have 2 ** 60 letters
        endless = [endless, endless]
    assert "says why" in str(fails(serve(framed({"message": endless}))))


def test_an_answer_byte_by_byte_has_the_same_limit(tmp_path: Path) -> None:
    path = tmp_path / "vllm_weight_cache_slow.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def run() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                for byte in framed({"status": "ok", "memory_bytes": 7}):
                    connection.sendall(bytes([byte]))
                    time.sleep(0.1)

        thread = threading.Thread(target=run)
        thread.start()
        assert not fails(path).gone
        thread.join(20)


def test_an_answer_runs_nothing(serve: Serve, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    assert "no plain value" in str(fails(serve(framed(Evil()))))
    assert not (tmp_path / "made").exists()


def test_all_of_them(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="0 of 1 processes"):
        ask_ranks(tmp_path, 1, 5)
    for name in ("a", "b"):
        serve(framed({"status": "ok", "memory_bytes": 7}), name)
    serve(framed({"status": "ok", "memory_bytes": 2}), "a_draft")
    held = ask_ranks(tmp_path, 2, 5)
    assert (held.targets, held.bytes, held.bytes_per_gpu) == (2, 16, 9)


def test_a_draft_does_not_stand_for_the_model(serve: Serve, tmp_path: Path) -> None:
    serve(framed({"status": "ok", "memory_bytes": 2}), "a_draft")
    with pytest.raises(RankError, match="0 of 1 processes"):
        ask_ranks(tmp_path, 1, 5)
    assert Held({}).bytes_per_gpu == 0
    assert Held({"a.sock": 5, "b.sock": None}).bytes_per_gpu is None
