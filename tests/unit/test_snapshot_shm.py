# SPDX-License-Identifier: Apache-2.0
"""What lies in /dev/shm, saved and put back: in a folder of the test's own."""

import os
from pathlib import Path
from typing import Any

import pytest
from warmhold_snapshot import shm
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.shm import ShmFile

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ring with holes, a semaphore that CRIU gave a second name, and what is nobody's."""
    made = tmp_path / "shm"
    made.mkdir()
    ring = made / "psm_ring"
    with ring.open("wb") as file:
        file.truncate(8 * MIB)
        file.seek(5 * MIB)
        file.write(b"ring" * 1000)
    ring.chmod(0o600)
    semaphore = made / "sem.one"
    semaphore.write_bytes(b"s" * 32)
    semaphore.chmod(0o640)
    os.link(semaphore, made / "link_remap.12")
    (made / "sem.empty").touch()
    (made / "torch_123").write_bytes(b"t" * 10)
    (made / "other").write_bytes(b"not the engine's")
    (made / "psm_link").symlink_to("/etc/passwd")
    (made / "psm_folder").mkdir()
    return made


def save(folder: Path, pack: Path) -> tuple[ShmFile, ...]:
    return shm.save({(folder / "torch_123").stat().st_ino}, pack, folder)


def test_what_is_saved(folder: Path, tmp_path: Path) -> None:
    files = {file.name: file for file in save(folder, tmp_path / "pack")}
    assert sorted(files) == ["link_remap.12", "psm_ring", "sem.empty", "sem.one", "torch_123"]
    assert files["sem.one"].same_as == "link_remap.12"
    assert files["psm_ring"].size_bytes == 8 * MIB
    assert files["psm_ring"].stored_bytes < MIB
    assert (tmp_path / "pack").stat().st_size == sum(file.stored_bytes for file in files.values())
    assert (tmp_path / "pack").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["stat", "open"])
def test_what_others_remove_meanwhile_is_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    original = getattr(os, call)

    def remove_first(path: str, *given: Any, **named: Any) -> Any:
        if path == "sem.empty":
            (folder / path).unlink()
        return original(path, *given, **named)

    monkeypatch.setattr(os, call, remove_first)
    names = [file.name for file in save(folder, tmp_path / "pack")]
    assert names == ["link_remap.12", "psm_ring", "sem.one", "torch_123"]


def test_all_comes_back(folder: Path, tmp_path: Path) -> None:
    files = save(folder, tmp_path / "pack")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    shm.put_back(files, tmp_path / "pack", fresh)
    assert sorted(path.name for path in fresh.iterdir()) == sorted(file.name for file in files)
    for name in ("psm_ring", "sem.one", "sem.empty", "torch_123"):
        old, new = folder / name, fresh / name
        assert new.read_bytes() == old.read_bytes()
        assert new.stat().st_mode == old.stat().st_mode
    assert (fresh / "psm_ring").stat().st_blocks * 512 < MIB, "holes stay holes"
    assert (fresh / "sem.one").samefile(fresh / "link_remap.12")


def test_it_takes_the_place_of_what_a_dead_engine_left(folder: Path, tmp_path: Path) -> None:
    files = save(folder, tmp_path / "pack")
    wanted = (folder / "psm_ring").read_bytes()
    (folder / "psm_ring").write_bytes(b"later")
    shm.put_back(files, tmp_path / "pack", folder)
    assert (folder / "psm_ring").read_bytes() == wanted
    assert (folder / "other").read_bytes() == b"not the engine's"


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    files = save(folder, tmp_path / "pack")
    fresh, target = tmp_path / "fresh", tmp_path / "target"
    fresh.mkdir()
    target.write_text("mine")
    (fresh / "psm_ring").symlink_to(target)
    shm.put_back(files, tmp_path / "pack", fresh)
    assert target.read_text() == "mine" and not (fresh / "psm_ring").is_symlink()


def test_a_failure_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    files = save(folder, pack)
    os.truncate(pack, pack.stat().st_size - 1)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "other").write_text("stays")
    with pytest.raises(SnapshotError) as caught:
        shm.put_back(files, pack, fresh)
    assert caught.value.code == "snapshot.shm"
    assert [path.name for path in fresh.iterdir()] == ["other"]


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".", ".."])
def test_names_stay_within(name: str, tmp_path: Path) -> None:
    (tmp_path / "pack").write_bytes(b"")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    entry = ShmFile(name, 0, 0o600, os.getuid(), os.getgid())
    with pytest.raises(SnapshotError):
        shm.put_back([entry], tmp_path / "pack", fresh)
    assert list(fresh.iterdir()) == [] and not (tmp_path / "out").exists()


def test_after_a_restore_only_link_remaps_go(folder: Path, tmp_path: Path) -> None:
    files = save(folder, tmp_path / "pack")
    shm.remove(files, folder, remaps_only=True)
    assert not (folder / "link_remap.12").exists() and (folder / "sem.one").exists()
    shm.remove(files, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["other", "psm_folder", "psm_link"]
