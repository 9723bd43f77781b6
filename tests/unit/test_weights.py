# SPDX-License-Identifier: Apache-2.0
"""What the loader reports, read as an untrusted text, and what the vault answers in a moment."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vault_process import close_all, make_generation, open_fds, running_vault
from warmhold_entrypoint.container.conf import ENGINE_FOLDER
from warmhold_entrypoint.errors import Rejection
from warmhold_entrypoint.weight_cache import resident, weights
from warmhold_entrypoint.weight_cache.resident import Vault, read_vault
from warmhold_wcache.client import VaultClient

HIT = {
    **{"mode": "ipc_cache", "bytes": 10, "seconds": {"total": 0.5}, "code": "", "reason": ""},
    **{"fields": {}, "published": "", "not_published": ""},
}
MISS = {
    **HIT,
    **{"mode": "disk", "code": "wcache.key-mismatch", "reason": "content", "published": "g2"},
    **{"fields": {"content": ["a", "b"]}, "seconds": {"total": 2.0}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / ENGINE_FOLDER
    made.mkdir()
    return made


def write(folder: Path, name: str, report: object) -> None:
    (folder / f"weights-{name}.json").write_text(json.dumps(report))


def test_all_hits_are_a_hit(folder: Path) -> None:
    write(folder, "1-1", HIT)
    write(folder, "2-1", {**HIT, "seconds": {"total": 0.7}})
    found = weights.summarise(weights.read_reports(folder.parent))
    assert found is not None
    assert (found["mode"], found["bytes"], found["seconds"], found["loads"]) == (
        *("ipc_cache", 20, 0.7, 2),
    )


def test_one_miss_is_a_load_from_disk_with_its_reason(folder: Path) -> None:
    write(folder, "1-1", HIT)
    write(folder, "2-1", MISS)
    found = weights.summarise(weights.read_reports(folder.parent))
    assert found is not None
    assert (found["mode"], found["code"], found["fields"]) == (
        *("disk", "wcache.key-mismatch", ["content"]),
    )
    assert found["published"] == ["g2"]


def test_no_report_is_no_summary(tmp_path: Path) -> None:
    assert weights.summarise(weights.read_reports(tmp_path)) is None


@pytest.mark.parametrize(
    "report",
    [
        *("", "[]", "{}", "null", '{"mode": 1}', "\ud800", "[" * 100_000),
        json.dumps({**HIT, "mode": "snapshot"}),
        json.dumps({**HIT, "seconds": {"total": "x"}}),
        json.dumps({**HIT, "fields": {"x": 1}}).replace("1}", "[" * 10_000 + "]" * 10_000 + "}"),
        json.dumps({**HIT, "bytes": 10**400}),
        '{"fields": {"a": ' + "[" * 200_000,
        json.dumps({**HIT, "reason": "x" * (2 << 20)}),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_report_is_left_out(folder: Path, report: str) -> None:
    (folder / "weights-1-1.json").write_bytes(report.encode(errors="surrogatepass"))
    write(folder, "2-1", HIT)
    assert [item.mode for item in weights.read_reports(folder.parent)] == ["ipc_cache"]


def test_neither_links_nor_pipes_are_read(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps(HIT))
    (folder / "weights-1-1.json").symlink_to(secret)
    os.mkfifo(folder / "weights-2-1.json")
    (folder / "weights-3-1.json").mkdir()
    before = open_fds()
    assert weights.read_reports(folder.parent) == []
    writer = os.open(folder / "weights-2-1.json", os.O_RDWR)  # it keeps a pipe from ending
    assert weights.read_reports(folder.parent) == []
    os.close(writer)
    assert open_fds() == before
    weights.forget_reports(folder.parent)
    assert [path.name for path in folder.iterdir()] == ["weights-3-1.json"]
    assert secret.exists()


def test_rejections_tell_what_happened() -> None:
    planned = [
        Rejection("snapshot", "s", "", ""),
        Rejection("ipc_cache", "ipc_cache.loading", "", ""),
    ]
    hit: dict[str, Any] = {"mode": "ipc_cache", "code": "", "reason": ""}
    miss = {"mode": "disk", "code": "wcache.key-mismatch", "reason": "differs in content"}
    plain = {"mode": "disk", "code": "", "reason": ""}
    assert [item.code for item in weights.correct(planned, hit)] == ["s"]
    assert [item.code for item in weights.correct(planned, miss)] == ["s", "ipc_cache.key-mismatch"]
    assert [item.code for item in weights.correct(planned, plain)] == ["s", "ipc_cache.loading"]


# The vault, asked by the plan


@pytest.fixture
def grown_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listening process of these tests counts as old however young it is."""
    monkeypatch.setattr(resident, "_STARTING_S", -1.0)


@pytest.mark.usefixtures("grown_up")
def test_no_vault_and_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert read_vault(path).code == "absent"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    assert read_vault(path).code == "dead-socket"


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A listener that accepts and says nothing."""
    path = tmp_path / "silent"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        yield path


@pytest.mark.usefixtures("grown_up")
def test_a_silent_vault_is_hung(silent: Path) -> None:
    found = read_vault(silent)
    assert (found.code, found.rows) == ("hung", ())


def test_a_vault_that_has_just_started_is_not_waited_for(
    silent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "_STARTING_S", 1e9)
    asked = threading.Event()
    monkeypatch.setattr(resident, "VaultClient", lambda *_: asked.set())
    assert read_vault(silent).code == "loading"
    assert not asked.is_set()


def test_the_age_is_that_of_the_listening_process(silent: Path) -> None:
    age_s = resident._read_age_s(silent)
    assert age_s is not None
    assert 0 <= age_s <= time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.usefixtures("grown_up")
def test_a_vault_that_answers(tmp_path: Path) -> None:
    generation, fds = make_generation()
    with running_vault(tmp_path) as (path, _):
        assert read_vault(path) == Vault()
        with VaultClient(path) as client:
            client.publish(generation, fds)
        (row,) = read_vault(path).rows
    close_all(fds)
    assert row["launch_key"] == generation.launch_key
    assert weights.is_resident(row, generation.launch_key)
