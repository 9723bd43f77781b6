# SPDX-License-Identifier: Apache-2.0
"""Hostile clients: whatever they send, the vault serves on, leaks nothing and stays small.

Every message follows from a seed, so that a failure can be had again.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attacker import STORE_VERBS, VERBS, Attacker
from stack import ROOT, eventually
from vault_process import Loop, close_all, connect, make_generation, open_fds, running_vault
from warmhold_entrypoint.container.fdstore import FdStore
from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import encode_description
from warmhold_wcache.protocol import FrameReader, encode, send_some
from warmhold_wcache.store import FdStoreClient

MESSAGES = 12_000
STORE_MESSAGES = 4_000
GROWTH_KIB = 6 << 10


class VaultProcess:
    """`python -m warmhold_wcache.serve` of its own, whose memory and descriptors can be read."""

    def __init__(self, folder: Path, fd_limit: int = 20_000) -> None:
        self.path = folder / "vault.sock"
        start = (
            "import os, resource, sys; n = int(sys.argv[1]);"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (n, n));"
            "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        )
        serve = ["-m", "warmhold_wcache.serve", "--socket", str(self.path), "--log-level", "error"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, str(fd_limit), *serve],
            env={"PYTHONPATH": str(ROOT / "wcache"), "PATH": os.environ["PATH"]},
        )

    def fds(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) == 0


@pytest.fixture
def make_vault(tmp_path: Path) -> Iterator[Callable[..., VaultProcess]]:
    made: list[VaultProcess] = []

    def make(**limits: int) -> VaultProcess:
        made.append(VaultProcess(tmp_path, **limits))
        return made[-1]

    yield make
    for vault in made:
        vault.end()


@pytest.fixture
def vault(make_vault: Callable[..., VaultProcess]) -> VaultProcess:
    return make_vault()


def publish(client: VaultClient) -> bytes:
    generation, fds = make_generation()
    client.publish(generation, fds)
    close_all(fds)
    return encode_description(generation)


def drop_all_but(client: VaultClient, kept: str) -> None:
    for row in client.stat():
        if row["model"] != kept:
            client.drop(row["id"], force=True)


def test_10000_hostile_messages_change_nothing(vault: VaultProcess) -> None:
    ours = open_fds()
    with VaultClient(vault.path, timeout_s=20, wait_s=20) as client:
        description = publish(client)
        (row,) = client.stat()
        attacker = Attacker(vault.path, 1, VERBS, description)
        before = memory = 0
        while attacker.sent < MESSAGES:
            attacker.session()
            if not before and attacker.sent > MESSAGES // 6:
                eventually(lambda: client.hello()["clients"] == 1, "calm")
                drop_all_but(client, row["model"])
                before, memory = vault.fds(), vault.rss_kib()
        eventually(lambda: client.hello()["clients"] == 1, "the end of the attackers")
        drop_all_but(client, row["model"])
        # The attackers may have ended the lease (same process) and dropped the generation.
        publish(client)
        assert [item["id"] for item in client.stat()] == [row["id"]]
        eventually(lambda: vault.fds() <= before, f"{before} descriptors")
        assert vault.rss_kib() - memory < GROWTH_KIB
        _, fds = client.fetch(row["key"])
        assert os.pread(fds[0], 2, 0) == b"a0"
        close_all(fds)
        attacker.close()
    assert attacker.sent >= 10_000
    assert attacker.answers > 2_000, "most conversations end before they begin"
    assert open_fds() == ours


def test_the_fd_store_outlives_the_same(tmp_path: Path) -> None:
    before = open_fds()
    store = FdStore(tmp_path / "fdstore.sock", os.getuid())
    with Loop(store):
        path = tmp_path / "fdstore.sock"
        generation, fds = make_generation()
        client = FdStoreClient(path)
        client.put("x.good", fds)
        attacker = Attacker(path, 2, STORE_VERBS, encode_description(generation))
        while attacker.sent < STORE_MESSAGES:
            attacker.session()
        attacker.close()
        for entry in client.entries():
            if entry.name != "x.good":
                client.drop(entry.name)
        assert [(entry.name, entry.total) for entry in client.entries()] == [("x.good", 3)]
        with client.take("x.good") as bag:
            assert os.pread(bag.fds[0], 2, 0) == b"a0"
        eventually(lambda: store._server.clients == 0, "the end of the attackers")
        assert store._fds == 3
    store.close()
    close_all(fds)
    assert open_fds() == before


@pytest.mark.parametrize("start", [b"", b"\0", encode({"verb": "hello"})[:-1]], ids=len)
def test_200_silent_clients_delay_nobody(vault: VaultProcess, start: bytes) -> None:
    with VaultClient(vault.path, timeout_s=20, wait_s=20) as client:
        publish(client)
        before = vault.fds()
        silent = [connect(vault.path) for _ in range(200)]
        for sock in silent:
            sock.send(start)
        eventually(lambda: client.hello()["clients"] == 201, "all clients")
        publish(client)
        assert len(client.stat()) == 1
        for sock in silent:
            sock.close()
        eventually(lambda: client.hello()["clients"] == 1, "the end of the silent")
        assert vault.fds() == before


def test_of_too_many_clients_the_longest_silent_goes(vault: VaultProcess) -> None:
    with VaultClient(vault.path, timeout_s=20, wait_s=20) as client:
        client.hello()
        silent = []
        for _ in range(600):
            silent.append(connect(vault.path))
            if len(silent) % 100 == 0:
                assert client.hello()["clients"] <= 257
        assert silent[0].recv(1) == b""
        client.hello()
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("fd_limit", [24, 40, 80])
def test_a_vault_out_of_descriptors_serves_on(
    make_vault: Callable[..., VaultProcess], fd_limit: int
) -> None:
    vault = make_vault(fd_limit=fd_limit)
    with VaultClient(vault.path, timeout_s=20, wait_s=20) as client:
        publish(client)
        silent = [connect(vault.path) for _ in range(100)]
        generation, fds = make_generation("big", 100)
        with pytest.raises(WcacheError):
            client.publish(generation, fds)
        close_all(fds)
        with VaultClient(vault.path, timeout_s=20) as late:
            assert late.hello()["generations"] == 1  # while the silent ones stay
        for sock in silent:
            sock.close()
        assert eventually(lambda: [row["model"] for row in client.stat()], "an answer") == [
            "model a"
        ]
        publish(client)


def test_a_message_that_begins_must_end(tmp_path: Path) -> None:
    before = open_fds()
    with running_vault(tmp_path, limit_s=0.3) as (path, vault):
        slow = connect(path)
        data = encode({"verb": "stat", "pad": "x" * 1000})
        with pytest.raises(OSError):
            for byte in data:
                slow.send(bytes([byte]))
                time.sleep(0.005)
        idle = connect(path)
        idle.sendall(encode({"verb": "hello"}))
        assert idle.recv(4)
        eventually(lambda: vault.server.clients == 1, "the end of the slow one")
        time.sleep(0.5)
        assert vault.server.clients == 1  # silence between messages is no fault
        slow.close()
        idle.close()
    assert open_fds() == before


def test_an_answer_must_be_read(tmp_path: Path) -> None:
    with running_vault(tmp_path, limit_s=0.3) as (path, vault):
        with VaultClient(path) as client:
            publish(client)
        deaf = connect(path)
        deaf.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                deaf.send(encode({"verb": "stat"}) * 100)
        eventually(lambda: vault.server.clients == 0, "the end of the deaf one")
        deaf.close()


def test_a_watcher_that_never_reads_costs_little_and_delays_nobody(vault: VaultProcess) -> None:
    with VaultClient(vault.path, timeout_s=20, wait_s=20) as client:
        publish(client)
        (row,) = client.stat()
        client.release(row["id"])
        before, memory = vault.fds(), vault.rss_kib()
        deaf = [connect(vault.path) for _ in range(20)]
        for sock in deaf:
            sock.sendall(encode({"verb": "watch"}))
        events = client.watch()
        assert next(events) == {"ok": True, "event": "resident", "ids": [row["id"]]}
        for _ in range(2_000):
            client.lease(row["id"])
            client.release(row["id"])
            assert [next(events)["event"], next(events)["event"]] == ["leased", "released"]
        # The kernel keeps a few hundred frames for each, the vault a few hundred more.
        assert client.hello()["clients"] == 2
        assert vault.rss_kib() - memory < GROWTH_KIB
        for sock in deaf:
            while sock.recv(1 << 20):
                pass
            sock.close()
        events.close()
        eventually(lambda: vault.fds() == before, f"{before} descriptors")


STEPS = range(8)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("verb", ["publish", "fetch"])
def test_a_disconnect_at_any_step_leaves_nothing(tmp_path: Path, verb: str, steps: int) -> None:
    """A transfer of 600 descriptors is cut after each of its messages, and in the middle of one."""
    before = open_fds()
    generation, fds = make_generation("a", 600)
    for fd in fds:
        segments.seal(fd)
    described = segments.create_sealed(encode_description(generation), "d")
    with running_vault(tmp_path) as (path, vault):
        with VaultClient(path) as client:
            if verb == "fetch":
                client.publish(generation, fds)
                client.release(generation.id)
        eventually(lambda: vault.server.clients == 0, "calm")
        calm = open_fds()
        sent, reader, sock = [described, *fds], FrameReader(1 << 20), connect(path)
        messages: list[tuple[dict[str, Any], list[int], int]]
        if verb == "publish":
            messages = [({"verb": "publish", "total": 601}, [], 0)]
            messages += [({"verb": "fds"}, sent[i : i + 250], 0) for i in (0, 250, 500)]
        else:
            messages = [({"verb": "fetch", "key": generation.key}, [], 0)]
            messages += [({"verb": "next"}, [], count) for count in (250, 250, 101)]
        for body, batch, want in messages[: steps // 2]:
            send_some(sock, memoryview(encode(body)), batch)
            while (frame := reader.read(sock, want)) is None:
                pass
            assert frame.body["ok"] is True
            frame.fds.close()
        if steps % 2:
            body, batch, _ = messages[steps // 2]
            send_some(sock, memoryview(encode(body))[:-1], batch)
        sock.close()
        eventually(lambda: open_fds() == calm, "the end of the connection")
        with VaultClient(path) as client:
            assert len(client.stat()) == (verb == "fetch")
            if verb == "fetch":
                assert client.stat()[0]["holders"] == []
    close_all(sent)
    assert open_fds() == before
