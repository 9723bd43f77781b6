# SPDX-License-Identifier: Apache-2.0
"""Who watches the vault hears of every change, in order, and can do nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import ROOT, eventually
from vault_process import close_all, connect, make_generation, open_fds, running_vault
from warmhold_wcache import server
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.protocol import FrameReader, encode


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


def publish(client: VaultClient, name: str = "a") -> str:
    generation, fds = make_generation(name)
    client.publish(generation, fds)
    close_all(fds)
    return generation.id


def test_every_change_is_told_in_order(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        first = publish(client)
        events = client.watch()
        assert next(events) == {"ok": True, "event": "resident", "ids": [first]}
        client.lease(first)  # held already: no change
        client.release(first)
        client.release(first)
        close_all(client.fetch({"model": "a", "dtype": "float32"})[1])
        client.drop(first, force=True)
        second = publish(client, "b")
        pid = os.getpid()
        assert [next(events) for _ in range(6)] == [
            {"ok": True, "event": event, "id": generation_id, "pid": pid}
            for event, generation_id in [
                ("released", first),
                ("leased", first),
                ("released", first),
                ("dropped", first),
                ("published", second),
                ("leased", second),
            ]
        ]
        events.close()


def test_a_watcher_may_not_ask(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, vault):
        sock, reader = connect(path), FrameReader(1 << 20)
        answers = []
        for _ in range(2):
            sock.sendall(encode({"verb": "watch"}))
            while (frame := reader.read(sock)) is None:
                pass
            answers.append(frame.body)
        assert answers[0] == {"ok": True, "event": "resident", "ids": []}
        assert answers[1]["code"] == "wcache.malformed"
        assert sock.recv(1) == b""
        sock.close()
        assert vault.server.clients == 0


def test_the_end_of_a_watcher_is_seen_without_a_change(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, vault), VaultClient(path) as client:
        events = client.watch()
        next(events)
        assert vault.server.clients == 1
        events.close()
        eventually(lambda: vault.server.clients == 0, "the end of the connection")


def test_a_vault_that_ends_is_told(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _):
        events = VaultClient(path).watch()
        next(events)
    with pytest.raises(WcacheError, match=r"wcache\.dead-socket"):
        next(events)
    with pytest.raises(WcacheError, match=r"wcache\.dead-socket"):
        next(VaultClient(path).watch())


def test_an_unread_change_has_a_time_limit_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_UNREAD_BYTES", 1 << 40)
    with running_vault(tmp_path, limit_s=0.3) as (path, vault), VaultClient(path) as client:
        generation_id = publish(client)
        deaf = connect(path)
        deaf.sendall(encode({"verb": "watch"}))
        assert deaf.recv(1)
        while vault.server.clients == 2:
            client.release(generation_id)
            client.lease(generation_id)
        deaf.close()


def test_a_watchers_half_message_has_a_time_limit(tmp_path: Path) -> None:
    with running_vault(tmp_path, limit_s=0.3) as (path, vault), VaultClient(path) as client:
        generation_id = publish(client)
        half = connect(path)
        half.sendall(encode({"verb": "watch"}))
        assert half.recv(1)
        half.sendall(b"\0")
        (watcher,) = (item for item in vault.server._clients.values() if item.listens)
        eventually(lambda: watcher.reader.is_amid, "the half message")
        client.release(generation_id)  # what is sent in between does not end the limit
        eventually(lambda: vault.server.clients == 1, "the end of the half message")
        half.close()


def test_the_command_prints_a_line_per_event_until_ctrl_c(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "warmhold_wcache.cli", "--socket"]
    with (
        running_vault(tmp_path) as (path, _),
        VaultClient(path) as client,
        subprocess.Popen(
            [*argv, str(path), "watch"],
            env={"PYTHONPATH": str(ROOT / "wcache"), "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as watcher,
    ):
        assert watcher.stdout is not None and watcher.stderr is not None
        assert watcher.stdout.readline() == "resident\n"
        generation_id = publish(client)
        assert watcher.stdout.readline() == f"published {generation_id} pid={os.getpid()}\n"
        assert watcher.stdout.readline() == f"leased {generation_id} pid={os.getpid()}\n"
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(20) == 130
        assert watcher.stderr.read().strip() == ""
