# SPDX-License-Identifier: Apache-2.0
"""Flat files: what was written comes back, every damage is found, nothing half-made stays."""

import os
import resource
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warmhold_snapshot import checksum
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.flat import FlatFiles, Weights

ID, OTHER = "0123456789abcdef", "fedcba9876543210"
PIECE_BYTES = 1 << 16
# Less than a piece, a piece and a bit, exactly two pieces.
CONTENT = [os.urandom(size) for size in (4096, PIECE_BYTES + 4096, 2 * PIECE_BYTES)]
BYTES = sum(map(len, CONTENT))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def flat(tmp_path: Path) -> FlatFiles:
    return FlatFiles(tmp_path / "weights", bytes(32))


@pytest.fixture
def targets() -> Iterator[list[int]]:
    fds = [os.memfd_create("target") for _ in CONTENT]
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def weights() -> Iterator[Weights]:
    fds = [os.memfd_create("weights") for _ in CONTENT]
    for fd, content in zip(fds, CONTENT, strict=True):
        assert os.pwrite(fd, content, 0) == len(content)
    yield Weights(ID, b'{"of": "g1"}', tuple(zip(fds, map(len, CONTENT), strict=True)))
    for fd in fds:
        os.close(fd)


def refusal(act: Callable[[], object]) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        act()
    return caught.value


def names(flat: FlatFiles) -> list[str]:
    return sorted(path.name for path in flat.folder.iterdir())


def test_what_was_written_comes_back(flat: FlatFiles, weights: Weights, targets: list[int]) -> None:
    assert refusal(lambda: flat.verify(ID)).code == "snapshot.weights-absent"
    flat.write(weights)
    assert names(flat) == [ID] and flat.holds(weights)
    assert flat.folder.stat().st_mode & 0o777 == 0o700
    assert (flat.folder / ID).stat().st_mode & 0o777 == 0o600
    seen: list[tuple[int, int]] = []
    with flat.open(ID) as file:
        assert bytes(file.header.description) == weights.description
        file.copy(targets, lambda done, total: seen.append((done, total)))
    found = [os.pread(fd, BYTES, 0) for fd in targets]
    assert found == CONTENT and seen[-1] == (BYTES, BYTES)
    flat.verify(ID, checksums=True)


def test_one_that_is_there_is_reused_and_another_takes_its_place(
    flat: FlatFiles, weights: Weights
) -> None:
    flat.write(weights)
    place = flat.folder / ID
    inode = place.stat().st_ino
    flat.write(weights)
    assert place.stat().st_ino == inode
    flat.write(Weights(ID, b'{"of": "g2"}', weights.segments))
    assert place.stat().st_ino != inode and names(flat) == [ID]
    place.write_bytes(b"damaged")
    flat.write(weights)
    flat.verify(ID, checksums=True)


@pytest.mark.parametrize("place", [0, 4095, 4096, BYTES - 1])
def test_a_bit_that_flipped(
    flat: FlatFiles, weights: Weights, targets: list[int], place: int
) -> None:
    flat.write(weights)
    with (flat.folder / ID).open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    flat.verify(ID)  # header and size alone
    segment = 0 if place < 4096 else 1 if place == 4096 else 2
    for act in (lambda: flat.verify(ID, checksums=True), lambda: copy(flat, targets)):
        error = refusal(act)
        assert error.code == "snapshot.weights-damaged"
        assert f"segment(s) {segment} have other bytes" in error.detail


def copy(flat: FlatFiles, targets: list[int]) -> None:
    with flat.open(ID) as file:
        file.copy(targets)


def test_every_byte_of_the_header_counts(flat: FlatFiles, weights: Weights) -> None:
    flat.write(weights)
    place = flat.folder / ID
    good = place.read_bytes()
    for position in range(BYTES, len(good)):
        changed = bytearray(good)
        changed[position] ^= 1
        place.write_bytes(changed)
        assert refusal(lambda: flat.verify(ID)).code == "snapshot.weights-damaged", position


def test_cut_or_grown(flat: FlatFiles, weights: Weights) -> None:
    flat.write(weights)
    place = flat.folder / ID
    good = place.read_bytes()
    for length in (0, 1, 71, 72, 4096, BYTES, len(good) - 72, len(good) - 1):
        place.write_bytes(good[:length])
        assert refusal(lambda: flat.verify(ID)).code == "snapshot.weights-damaged", length
    for content in (good + b"\0", b"\0" + good, good[4096:]):
        place.write_bytes(content)
        assert refusal(lambda: flat.verify(ID)).code == "snapshot.weights-damaged"


def test_that_of_another_generation_or_key(flat: FlatFiles, weights: Weights) -> None:
    flat.write(weights)
    (flat.folder / ID).rename(flat.folder / OTHER)
    assert f"it is of {ID}" in refusal(lambda: flat.verify(OTHER)).detail
    other = FlatFiles(flat.folder, secrets.token_bytes(32))
    assert "its seal does not fit" in refusal(lambda: other.verify(OTHER)).detail


@pytest.mark.parametrize("name", ["", "..", "../.key", "a/b", ID[:-1], ID.upper()])
def test_what_is_no_id_leads_nowhere(flat: FlatFiles, name: str) -> None:
    for act in (flat.verify, flat.remove):
        assert refusal(lambda act=act: act(name)).code == "snapshot.weights-absent"


def test_a_link_is_not_followed(flat: FlatFiles, weights: Weights, tmp_path: Path) -> None:
    flat.write(weights)
    (flat.folder / ID).rename(tmp_path / "away")
    (flat.folder / ID).symlink_to(tmp_path / "away")
    assert refusal(lambda: flat.verify(ID)).code == "snapshot.weights-absent"


def test_removed_while_it_is_read(flat: FlatFiles, weights: Weights, targets: list[int]) -> None:
    flat.write(weights)
    with flat.open(ID) as file:
        flat.remove(ID)
        file.copy(targets)
    assert not flat.holds(weights)
    flat.remove(ID)


@pytest.mark.parametrize("room", [0, PIECE_BYTES, BYTES, BYTES + 10])
def test_a_full_disk_leaves_nothing(flat: FlatFiles, weights: Weights, room: int) -> None:
    kept, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        error = refusal(lambda: flat.write(weights))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kept, hard))
    assert error.code == "snapshot.disk" and names(flat) == []


def test_whoever_follows_it_may_end_it(
    flat: FlatFiles, weights: Weights, targets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(checksum, "PIECE_BYTES", 256)
    flat.write(weights)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), flat.open(ID) as file:
        file.copy(targets, stop)


def test_what_nobody_needs_goes(flat: FlatFiles, weights: Weights) -> None:
    flat.sweep(())  # there is no folder yet
    flat.write(weights)
    flat.write(Weights(OTHER, b"{}", weights.segments[:1]))
    (flat.folder / f".tmp-{ID}-0123").touch()
    flat.sweep({OTHER})
    assert names(flat) == [OTHER]
