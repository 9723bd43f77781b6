# SPDX-License-Identifier: Apache-2.0
"""Memory images in LZ4: every byte comes back, and what is not LZ4 any more is refused."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from warmhold_snapshot import compression
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.images import measure_by_kind

MIB = 1 << 20
CONTENTS = {
    "pages-1.img": bytes(3 * MIB) + b"x" * 5000,
    "pages-2.img": random.Random(1).randbytes(2 * MIB),  # gets larger  # noqa: S311
    "pages-3.img": b"",
    "pages-4.img": b"page" * 1024,
    "core-7.img": b"core",
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    compression.compress(folder)
    return folder


def expand(images: Path) -> dict[str, bytes]:
    with compression.expanded(images, images.parent, ".tmp-one-") as (folder, lock_fd):
        assert os.fstat(lock_fd).st_ino == folder.stat().st_ino
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_byte_comes_back(images: Path, tmp_path: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in images.iterdir()}
    assert set(sizes) == {"core-7.img", *(f"pages-{number}.img.lz4" for number in range(1, 5))}
    assert sizes["pages-1.img.lz4"] < MIB / 10
    assert measure_by_kind(sizes) == {"pages": sum(sizes.values()) - 4, "core": 4}
    assert compression.is_compressed(images)
    assert expand(images) == CONTENTS
    assert list(tmp_path.iterdir()) == [images], "nothing is left of it"


def test_it_can_be_followed(images: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    total = sum(path.stat().st_size for path in images.glob("*.lz4"))
    with compression.expanded(
        images, tmp_path, ".tmp-", lambda done, total: seen.append((done, total))
    ):
        assert seen == sorted(seen) and len(seen) == 7 and seen[-1] == (total, total)


def test_it_can_be_ended(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: pieces that nobody has begun with are left."""
    seen: list[int] = []
    begun: list[object] = []
    restore = compression._restore

    def restore_slowly(*given: Any) -> bool:
        begun.append(given)
        time.sleep(0.05)
        return restore(*given)

    monkeypatch.setattr(compression, "_restore", restore_slowly)
    monkeypatch.setattr(compression, "_pool", lambda: ThreadPoolExecutor(1))

    def end(done: int, total: int) -> None:
        seen.append(done)
        raise SnapshotError("snapshot.stopped", "enough")

    with (
        pytest.raises(SnapshotError, match="enough"),
        compression.expanded(images, tmp_path, ".tmp-", end),
    ):
        pass
    assert len(seen) == 1 and len(begun) <= 2 and list(tmp_path.iterdir()) == [images]


def test_a_folder_that_cannot_be_made(images: Path) -> None:
    with (
        pytest.raises(SnapshotError) as caught,
        compression.expanded(images, images / "core-7.img", ".tmp-one-"),
    ):
        pass
    assert caught.value.code == "snapshot.disk"


def test_images_as_they_were_need_nothing(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(b"1")
    assert not compression.is_compressed(tmp_path)


@pytest.mark.parametrize("at", [0, 3, 4, 7, 8, 40])
def test_changed_bytes_end_nothing_but_the_restore(images: Path, at: int, tmp_path: Path) -> None:
    """Checksums come first, but with WARMHOLD_SNAPSHOT_VERIFY=metadata there are none."""
    path = images / "pages-4.img.lz4"
    content = bytearray(path.read_bytes().ljust(41, b"\0"))
    content[at] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        expand(images)
    assert caught.value.code == "snapshot.damaged"
    assert list(tmp_path.iterdir()) == [images]


@pytest.mark.parametrize("cut", [1, 5, 3000])
def test_a_file_that_was_cut(images: Path, cut: int) -> None:
    path = images / "pages-2.img.lz4"
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(SnapshotError, match=r"pages-2\.img\.lz4"):
        expand(images)


def test_no_room(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SnapshotError) as caught:
        expand(images)
    assert (caught.value.code, "No space" in caught.value.detail) == ("snapshot.disk", True)
    assert list(tmp_path.iterdir()) == [images]
