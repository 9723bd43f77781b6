# SPDX-License-Identifier: Apache-2.0
"""Which artifact fits, and what is against each of the others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from warmhold_entrypoint import snapshots
from warmhold_entrypoint.resident import Vault
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshots import GENERATIONS, Snapshots, collect_secrets, judge
from warmhold_snapshot import check
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.check import Point
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.manifest import FORMAT, Manifest
from warmhold_snapshot.mark import write_mark
from warmhold_snapshot.pids import Process

NOW = {
    "kernel": "k",
    "secret.api_key.0": "h1",
    "weights": json.dumps({"content": "c", "files": "f"}),
}
HERE = {"container": "c1", "weights": "g1"}
VAULT = Vault(rows=({"id": "g1"},))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state" / "snapshots")


def publish(store: Store, name: str = "one", created: str = "1", **identity: str) -> None:
    with store.draft(name) as draft:
        manifest = Manifest(
            format=FORMAT,
            name=name,
            created=created,
            identity={**NOW, **identity},
            processes=(Process(3001, 1, 3001, 3001, "vllm", 5, (3001,)),),
            stdio=(),
            listeners=(),
            open_files=(),
            counts={},
            shm=(),
            files=(),
            bytes_by_kind={},
            bytes_by_process={},
            timings={},
            notes={GENERATIONS: "g1"},
        )
        store.publish(draft, manifest)


def look(store: Store, vault: Vault = VAULT, wanted: str = "", **now: str) -> Snapshots:
    return judge(store, {**NOW, **now}, HERE, vault, wanted)


def test_there_is_none(store: Store) -> None:
    found = look(store)
    assert (found.code, found.name, found.identity) == ("snapshot.absent", "", NOW)
    assert look(store, wanted="two").detail == "no snapshot two"


def test_the_newest_that_fits(store: Store) -> None:
    publish(store, "a", "1")
    publish(store, "b", "2")
    publish(store, "c", "3", kernel="other")
    found = look(store)
    assert (found.code, found.name, found.circumstances) == ("", "b", HERE)
    assert look(store, wanted="a").name == "a"
    assert look(store, wanted="c").code == "snapshot.identity-mismatch"


def test_every_field_that_differs_is_named(store: Store) -> None:
    publish(store, kernel="old", cpu="x")
    found = look(store)
    assert found.code == "snapshot.identity-mismatch" and found.revoked == ()
    assert "kernel: old then, k now" in found.detail and "cpu: x then, absent now" in found.detail


@pytest.mark.parametrize("now", [{"secret.api_key.0": "h2"}, {"secret.api_key.1": "h"}])
def test_an_artifact_with_another_secret_is_revoked(store: Store, now: dict[str, str]) -> None:
    publish(store, "a")
    publish(store, "b", **now)
    found = look(store, **now)
    assert (found.name, found.revoked) == ("b", ("a",))


def test_a_digest_that_was_not_known_then_is_no_difference(store: Store) -> None:
    publish(store, weights=json.dumps({"content": "", "files": "f"}))
    assert look(store).name == "one"
    assert look(store, weights=json.dumps({"content": "c", "files": "g"})).name == ""


def test_one_that_failed_here_is_not_tried_again(store: Store) -> None:
    publish(store)
    write_mark(store.path("one"), SnapshotError("snapshot.canary", "why"), HERE)
    found = look(store)
    assert (found.code, found.name) == ("snapshot.marked-failed", "")
    assert "snapshot.canary: why" in found.detail
    assert look(store, wanted="one").name == "one"
    write_mark(store.path("one"), SnapshotError("snapshot.canary", "why"), {**HERE, "weights": ""})
    assert look(store).name == "one"


@pytest.mark.parametrize(
    ("vault", "name"),
    [
        (Vault(rows=({"id": "g1"}, {"id": "g2"})), "one"),
        (Vault("loading", "young"), "one"),
        (Vault(rows=({"id": "g2"},)), ""),
        (Vault("absent", "no socket"), ""),
    ],
)
def test_the_weights_have_to_be_there(store: Store, vault: Vault, name: str) -> None:
    publish(store)
    found = look(store, vault)
    assert found.name == name
    assert found.code == ("" if name else "snapshot.weights-absent")


def test_a_damaged_one_is_passed_over(store: Store) -> None:
    publish(store, "a", "1")
    publish(store, "b", "2")
    (store.path("b") / "manifest.json").write_text("{}")
    assert look(store).name == "a"
    store.remove("a")
    assert look(store).code == "snapshot.damaged"


def settings(tmp_path: Path, *command: str, **variables: str) -> Settings:
    variables = {"STATE_DIR": str(tmp_path / "state"), **variables}
    environ = {f"WARMHOLD_{name}": value for name, value in variables.items()}
    made, faults, _ = read_settings(environ, command)
    assert faults == []
    return made


def read(wanted: Settings, **environment: str) -> Snapshots:
    key = {"content": "c", "files": "f"}
    return snapshots.read_snapshots(wanted, ["vllm"], environment, {"v": "1"}, key, VAULT)


@pytest.fixture
def rights(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    missing: list[Point] = []
    monkeypatch.setattr(check, "find_missing_rights", lambda other_uid: missing)
    monkeypatch.setattr(snapshots.criu, "read_version", lambda: "4.2.1")
    return missing


def test_what_makes_snapshots_impossible(tmp_path: Path, rights: list[Point]) -> None:
    assert read(settings(tmp_path, SNAPSHOT="off")).code == "snapshot.off"
    assert read(settings(tmp_path)).code == "snapshot.absent"
    assert read(settings(tmp_path)).identity == {}
    rights.append(Point("CAP_SYS_ADMIN", False, "for it", "cap_add: [SYS_ADMIN]"))
    found = read(settings(tmp_path))
    assert (found.code, found.detail) == ("snapshot.rights", "CAP_SYS_ADMIN")
    assert found.remedy == "cap_add: [SYS_ADMIN]"


def test_no_criu(
    tmp_path: Path, rights: list[Point], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> str:
        raise SnapshotError("snapshot.criu-absent", "no criu", "use the image")

    monkeypatch.setattr(snapshots.criu, "read_version", absent)
    assert read(settings(tmp_path)).code == "snapshot.criu-absent"


def test_the_identity(tmp_path: Path, rights: list[Point], store: Store) -> None:
    wanted = settings(tmp_path, "--api-key", "sk-1", "sk-2")
    found = read(wanted, PATH="/bin", HOSTNAME="a", SUPERVISOR_ENABLED="1", AWS_KEY="secret")
    fields = set(found.identity)
    assert {"environment.PATH", "environment.AWS_KEY", "secret.api_key.1"} <= fields
    assert not {"environment.HOSTNAME", "environment.SUPERVISOR_ENABLED"} & fields
    shown = json.dumps(dict(found.identity))
    assert "sk-1" not in shown and "secret" not in json.dumps(found.identity["environment.AWS_KEY"])
    again = read(wanted, PATH="/bin", HOSTNAME="b", AWS_KEY="secret")
    assert again.identity == found.identity
    assert read(wanted, PATH="/usr/bin", AWS_KEY="secret").identity != found.identity


def test_a_certificate_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("one")
    wanted = settings(tmp_path, "--ssl-certfile", str(path))
    before = collect_secrets(wanted)
    path.write_text("two")
    assert collect_secrets(wanted).keys() == before.keys() == {"ssl-certfile"}
    assert collect_secrets(wanted) != before


def test_circumstances_change_with_the_weights() -> None:
    before: dict[str, Any] = snapshots.read_circumstances(VAULT)
    assert snapshots.read_circumstances(VAULT) == before
    other = snapshots.read_circumstances(replace(VAULT, rows=()))
    assert {name for name in before if before[name] != other[name]} == {"weights"}
