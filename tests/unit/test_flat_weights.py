# SPDX-License-Identifier: Apache-2.0
"""Weights between a vault and a flat file: a fresh vault gets what another one held."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vault_process import SIZE, close_all, make_generation, open_fds, running_vault
from warmhold_entrypoint.snapshot_mode.flat_weights import open_weights, publish_flat, write_flat
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.verify import check_resident

CODE = "snapshot.weights-absent"


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "snapshots")


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """The socket of a vault that holds nothing."""
    (tmp_path / "fresh").mkdir()
    with running_vault(tmp_path / "fresh") as (path, _):
        yield path


@pytest.fixture
def generation_id(tmp_path: Path, store: Store) -> str:
    """A generation that is in a flat file; the vault that held it is gone."""
    generation, fds = make_generation(count=300)
    with running_vault(tmp_path) as (path, _):
        with VaultClient(path) as client:
            client.publish(generation, fds)
        with open_weights(path, {generation.id}) as (weights,):
            assert weights.size_bytes == generation.size_bytes
            write_flat(path, store, weights)
            write_flat(path, store, weights)
    close_all(fds)
    return generation.id


def test_a_fresh_vault_gets_the_same_generation(
    store: Store, fresh: Path, generation_id: str
) -> None:
    assert publish_flat(store, generation_id, fresh) == 300 * SIZE
    wanted, originals = make_generation(count=300)
    with VaultClient(fresh) as client:
        (row,) = client.stat()
        assert (row["id"], row["launch_key"]) == (generation_id, wanted.launch_key)
        assert row["holders"] == [], "the lease is given back"
        found, fds = client.fetch(wanted.key)
        assert found == wanted
        for fd, original in zip(fds, originals, strict=True):
            assert os.pread(fd, SIZE, 0) == os.pread(original, SIZE, 0)
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & segments.SEALS == segments.SEALS
        assert str(Path(f"/proc/self/fd/{fds[0]}").readlink()).startswith("/memfd:weights-0")
        assert check_resident(client, row).sound
    close_all([*fds, *originals])


def test_a_damaged_file_publishes_nothing_and_goes(
    store: Store, fresh: Path, generation_id: str
) -> None:
    with (store.flat.folder / generation_id).open("r+b") as file:
        file.seek(5 * SIZE)
        file.write(b"X")
    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, generation_id, fresh)
    assert caught.value.code == "snapshot.weights-damaged"
    assert list(store.flat.folder.iterdir()) == []
    with VaultClient(fresh) as client:
        assert client.stat() == []
    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, generation_id, fresh)
    assert caught.value.code == CODE


def test_a_sound_file_outlives_a_vault_that_is_gone(
    store: Store, tmp_path: Path, generation_id: str
) -> None:
    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, generation_id, tmp_path / "nobody.sock")
    assert caught.value.code == CODE
    store.flat.verify(generation_id, checksums=True)


def test_an_end_in_the_middle(store: Store, fresh: Path, generation_id: str) -> None:
    def stop(done: int, total: int) -> None:
        raise SnapshotError("snapshot.stopped", "a stop")

    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, generation_id, fresh, stop)
    assert caught.value.code == "snapshot.stopped"
    store.flat.verify(generation_id, checksums=True)
    with VaultClient(fresh) as client:
        assert client.stat() == []


def test_what_the_vault_does_not_give(fresh: Path, tmp_path: Path) -> None:
    for socket in (fresh, tmp_path / "nobody.sock"):
        with pytest.raises(SnapshotError) as caught, open_weights(socket, {"0123456789abcdef"}):
            pass
        assert caught.value.code == CODE
    with open_weights(tmp_path / "nobody.sock", ()) as none:
        assert none == []
