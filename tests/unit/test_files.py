# SPDX-License-Identifier: Apache-2.0
"""Small files: whole or not at all, with their mode, and never through a link."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from warmhold_entrypoint.files import read_json, write_atomically


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_text_and_mode(tmp_path: Path, mode: int) -> None:
    write_atomically(tmp_path / "f", "grüße\n", mode)
    assert (tmp_path / "f").read_bytes() == "grüße\n".encode()
    assert (tmp_path / "f").stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_only_the_owner_reads_it_by_default(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", "")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_reader_of_the_old_file_keeps_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "f", "new \udc80")
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_link_at_the_path_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "f").symlink_to(victim)
    write_atomically(tmp_path / "f", "new")
    assert (victim.read_text(), (tmp_path / "f").read_text()) == ("kept", "new")
    assert not (tmp_path / "f").is_symlink()


def test_a_link_at_the_temporary_name_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / f".f.{os.getpid()}").symlink_to(victim)
    with pytest.raises(OSError):
        write_atomically(tmp_path / "f", "new")
    assert victim.read_text() == "kept"
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    ("content", "value"),
    [(b'{"a": 1}', {"a": 1}), (b"[1]", None), (b"{", None), (b"", None), (b"\xff", None)],
)
def test_read_json(tmp_path: Path, content: bytes, value: dict[str, int] | None) -> None:
    (tmp_path / "f").write_bytes(content)
    assert read_json(tmp_path / "f") == value


def test_read_json_of_nothing(tmp_path: Path) -> None:
    assert read_json(tmp_path / "f") is None
    assert read_json(tmp_path) is None
