# SPDX-License-Identifier: Apache-2.0
"""The control socket: who is served, silent and hostile clients, and what it leaves open."""

import asyncio
import os
import random
import socket
import stat
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from control_stand import close, on_loop, read_answer, serving
from stack import ROOT
from vault_process import open_fds
from warmhold_wcache import control_server
from warmhold_wcache.protocol import MAX_REQUEST_BYTES, Peer, encode, send_some

MESSAGES = 2000


@on_loop
async def test_its_mode(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        assert stat.S_IMODE(stand.path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("offset", "served"), [(0, True), (1, False)])
@on_loop
async def test_another_uid_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, served: bool
) -> None:
    uid = os.getuid() + offset
    monkeypatch.setattr(control_server, "read_peer", lambda sock: Peer(1, uid))
    async with serving(tmp_path) as stand:
        answer = await stand.ask(verb="canary")
        assert answer["ok"] is served
        assert served or answer["code"] == "control.other-uid"
        assert stand.engine.calls == (["generate"] if served else [])


@on_loop
async def test_root_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "read_peer", lambda sock: Peer(1, 0))
    monkeypatch.setattr(control_server.os, "getuid", lambda: 10001)
    async with serving(tmp_path) as stand:
        assert (await stand.ask(verb="canary"))["ok"]


@on_loop
async def test_a_silent_client_blocks_nobody_and_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, limit_s=0.01) as stand:
        silent, silent_writer = await stand.connect()
        half, half_writer = await stand.connect()
        half_writer.write(encode({"verb": "canary"})[:5])
        assert (await stand.ask(verb="canary"))["ok"]
        assert await read_answer(silent) is None
        assert await read_answer(half) is None
        await close(silent_writer)
        await close(half_writer)


@on_loop
async def test_a_slow_verb_blocks_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"warmhold_state"}
        slow = stand.ask_soon(verb="state")
        await stand.engine.held.wait()
        assert (await stand.ask(verb="canary"))["ok"]
        stand.engine.release.set()
        assert (await slow)["ok"]


@on_loop
async def test_of_too_many_the_one_silent_for_longest_goes(tmp_path: Path) -> None:
    async with serving(tmp_path, max_clients=3) as stand:
        silent = [await stand.connect() for _ in range(5)]
        assert [await read_answer(reader) for reader, _ in silent[:2]] == [None, None]
        assert (await stand.ask(verb="canary"))["ok"]
        assert await read_answer(silent[2][0]) is None
        silent[4][1].write(encode({"verb": "canary"}))
        answer = await read_answer(silent[4][0])
        assert answer is not None and answer["ok"]
        for _, writer in silent:
            await close(writer)


@on_loop
async def test_too_many_that_wait_for_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, max_clients=2) as stand:
        stand.engine.holds = {"generate"}
        slow = [stand.ask_soon(verb="canary") for _ in range(2)]
        while len(stand.engine.calls) < 2:
            await asyncio.sleep(0)
        assert (await stand.ask(verb="state"))["code"] == "control.busy"
        stand.engine.release.set()
        assert [(await task)["ok"] for task in slow] == [True, True]


@on_loop
async def test_quiesced_it_holds_no_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, limit_s=1e6) as stand:
        silent, writer = await stand.connect()
        while not stand.server.clients:
            await asyncio.sleep(0)
        assert (await stand.ask(verb="quiesce"))["ok"]
        assert await read_answer(silent) is None
        await stand.calm()
        await close(writer)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack(">I", 2) + b"[]", "control.malformed"),
        (struct.pack(">I", 3) + b"\xff{}", "control.malformed"),
        (struct.pack(">I", 0), "control.malformed"),
        (struct.pack(">I", 60000) + b"[" * 60000, "control.malformed"),
        (struct.pack(">I", MAX_REQUEST_BYTES + 1), "control.too-large"),
        (struct.pack(">I", 2**32 - 1) + b"{" * 100_000, "control.too-large"),
    ],
    ids=["list", "bytes", "empty", "deep", "large", "huge"],
)
@on_loop
async def test_hostile_frames(tmp_path: Path, data: bytes, code: str) -> None:
    async with serving(tmp_path) as stand:
        reader, writer = await stand.connect()
        writer.write(data)
        answer = await read_answer(reader)
        assert answer is not None and answer["code"] == code
        await close(writer)
        assert (await stand.ask(verb="canary"))["ok"]


@on_loop
async def test_descriptors_are_not_taken(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        ours = open_fds()

        def send() -> bytes:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(stand.path))
                send_some(sock, memoryview(encode({"verb": "canary"})), [0] * 250)
                return sock.recv(1 << 16)

        assert b"control.malformed" in await asyncio.to_thread(send)
        await stand.calm()
        assert open_fds() == ours


@on_loop
async def test_who_does_not_wait_for_the_answer_is_cut(tmp_path: Path) -> None:
    async with serving(tmp_path) as stand:
        stand.engine.holds = {"generate"}
        reader, writer = await stand.connect()
        writer.write(encode({"verb": "canary"}))
        await stand.engine.held.wait()
        writer.write(encode({"verb": "canary"}))
        assert await read_answer(reader) is None
        await close(writer)
        assert stand.engine.cancelled == ["generate"]


@on_loop
async def test_2000_hostile_messages_change_nothing(tmp_path: Path) -> None:
    dice = random.Random(5)  # noqa: S311 - no secret
    verbs = ["canary", "quiesce", "resume", "state", "x"]
    async with serving(tmp_path) as stand:
        assert (await stand.ask(verb="canary"))["ok"]
        await stand.calm()
        ours = open_fds()
        for _ in range(MESSAGES):
            reader, writer = await stand.connect()
            data = bytearray(encode({"verb": dice.choice(verbs), "timeout_s": dice.random()}))
            how = dice.randrange(4)
            if how == 0:
                del data[dice.randrange(len(data)) :]
            elif how == 1:
                data[dice.randrange(len(data))] = dice.randrange(256)
            elif how == 2:
                data = bytearray(dice.randbytes(dice.randint(1, 300)))
            writer.write(data)
            if dice.random() < 0.5:
                writer.write_eof()
                with suppress(ConnectionError):
                    await reader.read(-1)
            await close(writer)
        await stand.calm()
        assert (await stand.ask(verb="resume"))["ok"]
        assert (await stand.ask(verb="canary"))["ok"]
        assert stand.gate.inside == 0
        await stand.calm()
        assert open_fds() <= ours


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = (
        "import sys, warmhold_wcache.vllm_plugin.control as c; p = c.ControlPlugin();"
        "p.attach_router(None);"
        "print([n for n in ('torch', 'vllm', 'fastapi', 'starlette') if n in sys.modules])"
    )
    environ = {"PYTHONPATH": str(ROOT / "wcache")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_client_imports_no_event_loop() -> None:
    code = (
        "import sys, warmhold_wcache.control_client;"
        "print([n for n in ('asyncio', 'selectors', 'logging') if n in sys.modules])"
    )
    environ = {"PYTHONPATH": str(ROOT / "wcache")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert "asyncio" not in done.stdout
