# SPDX-License-Identifier: Apache-2.0
"""Content identity: one digest per version of a file, and what counts as another version."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
from warmhold_wcache import content
from warmhold_wcache.content import (
    ContentError,
    compute_content,
    find_weight_files,
    read_cached_content,
    read_versions,
)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are younger than what is kept; pretend that they are not."""
    monkeypatch.setattr(content, "_SETTLED_S", -1e9)


def _checkpoint(folder: Path, fill: int = 1, files: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    for index in range(files):
        body = struct.pack("<Q", len(header)) + header + bytes([fill + index]) * 64
        (folder / f"model-{index}.safetensors").write_bytes(body)
    return folder


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    original = content._hash_file

    def hash_file(version: content.FileVersion, *rest: object) -> str:
        read.append(Path(version.path).name)
        return original(version, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(content, "_hash_file", hash_file)
    return read


def test_a_file_is_read_once_per_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = _checkpoint(tmp_path / "model"), tmp_path / "digests"
    read = _reads(monkeypatch)
    first = compute_content(model, cache)
    assert sorted(read) == ["model-0.safetensors", "model-1.safetensors"]
    assert compute_content(model, cache) == first == read_cached_content(model, cache)
    assert len(read) == 2
    (model / "model-1.safetensors").write_bytes(b"other")
    assert compute_content(model, cache).digest != first.digest
    assert read[2:] == ["model-1.safetensors"]


def test_a_forged_mtime_is_another_version(tmp_path: Path) -> None:
    model, cache = _checkpoint(tmp_path / "model"), tmp_path / "digests"
    first = compute_content(model, cache)
    path = model / "model-0.safetensors"
    before = path.stat()
    time.sleep(0.02)  # two ticks of the clock that stamps ctime
    with path.open("r+b") as file:  # in place: same inode, size and name
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (
        before.st_mtime_ns,
        before.st_size,
        before.st_ino,
    )
    assert read_cached_content(model, cache).digest == ""
    assert compute_content(model, cache).digest != first.digest


def test_a_swapped_file_of_the_same_shape_is_another_content(tmp_path: Path) -> None:
    cache = tmp_path / "digests"
    original = compute_content(_checkpoint(tmp_path / "a", fill=1), cache)
    tuned = compute_content(_checkpoint(tmp_path / "b", fill=9), cache)
    assert original.digest != tuned.digest
    Path(tmp_path / "b").rename(tmp_path / "moved")
    assert compute_content(tmp_path / "moved", cache).digest == tuned.digest


def test_a_truncated_file_is_another_content(tmp_path: Path) -> None:
    model, cache = _checkpoint(tmp_path / "model"), tmp_path / "digests"
    first = compute_content(model, cache)
    os.truncate(model / "model-0.safetensors", 40)
    assert compute_content(model, cache).digest != first.digest


def test_a_file_that_is_still_being_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_SETTLED_S", 2.0)
    model, cache = _checkpoint(tmp_path / "model"), tmp_path / "digests"
    assert compute_content(model, cache).digest
    assert read_cached_content(model, cache).digest == ""


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _checkpoint(tmp_path / "model", files=1)
    path = model / "model-0.safetensors"

    def grow(done: int, total: int) -> None:
        with path.open("ab") as file:
            file.write(b"x")

    with pytest.raises(ContentError, match="changed while it was read"):
        compute_content(model, None, grow)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    model = _checkpoint(tmp_path / "model")
    seen: list[tuple[int, int]] = []
    compute_content(model, None, lambda done, total: seen.append((done, total)))
    whole = sum(version.size_bytes for version in read_versions(model))
    assert seen[-1] == (whole, whole)


def test_the_first_kind_of_weight_file_counts(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "model.bin", "config.json"):
        (tmp_path / name).touch()
    assert [path.name for path in find_weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        *("2_Dense/model.safetensors", "1_Dense/pytorch_model.bin", "mask_embedding.pt"),
        "adapters/retrieval/adapter_model.safetensors",
    ],
)
def test_what_a_model_reads_on_its_own_is_content_too(tmp_path: Path, name: str) -> None:
    folder = _checkpoint(tmp_path / "a")
    plain = compute_content(folder, None).digest
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"one")
    one = compute_content(folder, None).digest
    (folder / name).write_bytes(b"two")
    assert len({plain, one, compute_content(folder, None).digest}) == 3


def test_a_folder_without_weights_has_no_content(tmp_path: Path) -> None:
    assert read_cached_content(tmp_path, None).digest == ""
    with pytest.raises(ContentError, match="no weight file"):
        compute_content(tmp_path, None)


def test_a_spoilt_entry_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = _checkpoint(tmp_path / "model", files=1), tmp_path / "digests"
    first = compute_content(model, cache)
    (entry,) = cache.glob("*.json")
    for text in ("", "{", "[]", "[" * 60_000, '{"version": {}}', entry.read_text()[:-10]):
        entry.write_text(text)
        assert read_cached_content(model, cache).digest == ""
        assert compute_content(model, cache) == first
    assert entry.stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("written", [False, True])
def test_an_entry_is_neither_a_link_nor_a_pipe(tmp_path: Path, written: bool) -> None:
    model, cache = _checkpoint(tmp_path / "model", files=1), tmp_path / "digests"
    assert compute_content(model, cache).digest == read_cached_content(model, cache).digest
    (entry,) = cache.glob("*.json")
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert read_cached_content(model, cache).digest == ""
    entry.unlink()
    os.mkfifo(entry)
    writer = os.open(entry, os.O_RDWR) if written else None
    assert read_cached_content(model, cache).digest == ""
    if writer is not None:
        os.close(writer)


def test_digests_are_not_needed(tmp_path: Path) -> None:
    model = _checkpoint(tmp_path / "model")
    (tmp_path / "file").touch()
    assert compute_content(model, tmp_path / "file" / "digests") == compute_content(model, None)
