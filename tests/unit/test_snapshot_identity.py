# SPDX-License-Identifier: Apache-2.0
"""What must be equal: every field that differs is named, and no secret can be read."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from warmhold_snapshot import identity
from warmhold_snapshot.errors import SnapshotError

KEY = bytes(32)
GIVEN: dict[str, Any] = {
    "key": KEY,
    "criu_version": "4.2.1",
    "versions": {"build": "b1", "vllm": "0.33.0"},
    "argv": ["vllm", "serve", "m", "--api-key", "sk-1"],
    "environment": {"VLLM_X": "1", "URL": "http://sk-1@host"},
    "files": {"model": {"config.json": "sha256 1", "a b.json": "sha256 2"}},
    "packages": ["vllm-0.33.0", "torch-2.9"],
    "secrets": {"VLLM_API_KEY": "sk-1"},
    "served": ["demo"],
    "weights": "w1",
}


def collect(**changes: object) -> dict[str, str]:
    return identity.collect_identity(**{**GIVEN, **changes})


def differing(**changes: object) -> list[str]:
    return [item.field for item in identity.compare(collect(), collect(**changes))]


def test_equal() -> None:
    assert identity.compare(collect(), collect()) == []
    identity.require_equal(collect(), collect())


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"criu_version": "4.3"}, ["criu"]),
        ({"versions": {"build": "b2", "vllm": "0.33.0"}}, ["version.build"]),
        ({"versions": {"build": "b1"}}, ["version.vllm"]),
        ({"versions": {**GIVEN["versions"], "driver": "1"}}, ["version.driver"]),
        ({"argv": ["vllm", "serve", "n", "--api-key", "sk-1"]}, ["argv"]),
        ({"environment": {**GIVEN["environment"], "VLLM_X": "2"}}, ["environment.VLLM_X"]),
        ({"environment": {"URL": "http://sk-1@host"}}, ["environment.VLLM_X"]),
        ({"weights": "w2"}, ["weights"]),
        ({"files": {"model": {**GIVEN["files"]["model"], "config.json": "n"}}}, ["files.model"]),
        ({"files": {**GIVEN["files"], "config": {"/c": "sha256 1"}}}, ["files.config"]),
        ({"files": {}}, ["files.model"]),
        ({"packages": ["vllm-0.33.0"]}, ["packages"]),
        ({"packages": reversed(GIVEN["packages"])}, []),
        ({"served": ["demo", "other"]}, ["served"]),
        ({"key": bytes([1] * 32)}, ["files.model", "secret.VLLM_API_KEY"]),
        ({"secrets": {**GIVEN["secrets"], "HF_TOKEN": "hf_abc"}}, ["secret.HF_TOKEN"]),
    ],
)
def test_each_field(changes: dict[str, object], fields: list[str]) -> None:
    assert differing(**changes) == fields


def test_a_changed_or_removed_secret() -> None:
    assert "secret.VLLM_API_KEY" in differing(secrets={"VLLM_API_KEY": "sk-2"})
    assert "secret.VLLM_API_KEY" in differing(secrets={})


def test_the_machine_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nvendor_id\t: V\nmodel\t\t: 7\nflags\t\t: sse avx2\n\n"
        "processor\t: 1\nflags\t\t: other\n"
    )
    then, now = collect(), collect(proc=tmp_path)
    assert now["cpu"] == "V 7" and now["cpu_flags"] == "avx2 sse"
    assert {"cpu", "cpu_flags"} <= {item.field for item in identity.compare(then, now)}
    assert {"kernel", "machine", "page_bytes"} <= set(then)


def test_cpu_flags_show_only_what_differs() -> None:
    (item,) = identity.compare({"cpu_flags": "a b c"}, {"cpu_flags": "a c d"})
    assert item.line() == "cpu_flags: -b +d"


def test_of_files_only_those_that_differ_are_shown() -> None:
    changed = {"model": {"config.json": "sha256 3", "a b.json": "sha256 2"}}
    (item,) = identity.compare(collect(), collect(files=changed))
    assert [word.partition(":")[0] for word in item.line().split()] == [
        *("files.model", "-config.json", "+config.json")
    ]
    (item,) = identity.compare(collect(files={}), collect())
    assert item.line().startswith("files.model: absent then, a%20b.json:")


def test_what_files_contain_cannot_be_told_from_it() -> None:
    """A file may hold a key of few bytes, whose digest could be found by trying."""
    assert "sha256 1" not in json.dumps(collect())
    assert collect(key=bytes([1] * 32))["files.model"] != collect()["files.model"]


def test_what_revokes_is_a_part_of_it() -> None:
    given = (KEY, GIVEN["secrets"], GIVEN["files"], GIVEN["served"])
    part = identity.collect_revoking(*given)
    assert set(part) == {"secret.VLLM_API_KEY", "files.model", "served"}
    assert part.items() <= collect().items()


def test_absent_fields_are_called_so() -> None:
    (item,) = identity.compare({"version.driver": "580"}, {})
    assert item.line() == "version.driver: 580 then, absent now"


def test_a_mismatch_names_every_field() -> None:
    with pytest.raises(SnapshotError) as caught:
        identity.require_equal(collect(), collect(weights="w2", criu_version="5"))
    assert caught.value.code == "snapshot.identity-mismatch"
    assert caught.value.lines == ("criu: 4.2.1 then, 5 now", "weights: w1 then, w2 now")


def test_a_summary_begins_with_versions() -> None:
    more: dict[str, Any] = {"packages": ["x"], "environment": {"A": "1", "B": "2"}}
    versions = {"build": "b2", "vllm": "0.33.0"}
    changed = collect(versions=versions, weights="w2", **more)
    lines = identity.summarise(identity.compare(collect(), changed)).split("; ")
    assert lines[:2] == ["version.build: b1 then, b2 now", "weights: w1 then, w2 now"]
    assert lines[2].startswith("environment.A: ") and lines[3:] == ["and 4 more"]
    assert identity.summarise(identity.compare(collect(), collect(weights="w2"))) == lines[1]


def test_no_secret_can_be_read() -> None:
    text = json.dumps(collect())
    assert "sk-1" not in text and "<VLLM_API_KEY>" in text


def test_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / ".key"
    key = identity.read_key(path)
    assert len(key) == 32 and key != bytes(32)
    assert path.stat().st_mode & 0o777 == 0o600
    assert identity.read_key(path) == key
    assert [entry.name for entry in path.parent.iterdir()] == [".key"]


def test_a_key_file_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SnapshotError) as caught:
        identity.read_key(tmp_path / ".key")
    assert caught.value.code == "snapshot.key"
    assert list(tmp_path.iterdir()) == []


def test_a_key_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for content, mode in ((bytes(31), 0o600), (bytes(33), 0o600), (bytes(32), 0o640)):
        path.write_bytes(content)
        path.chmod(mode)
        with pytest.raises(SnapshotError) as caught:
            identity.read_key(path)
        assert caught.value.code == "snapshot.key"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError):
        identity.read_key(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
