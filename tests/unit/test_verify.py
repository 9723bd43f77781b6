# SPDX-License-Identifier: Apache-2.0
"""`wcache verify` against the checkpoint: the same, changed, gone, or not to be read here."""

import dataclasses
import json
import mmap
import os
import sys
from pathlib import Path

import pytest
from stack import write_model
from vault_process import SIZE, close_all, command, make_generation, running_vault
from warmhold_wcache import checkpoint, cli
from warmhold_wcache.client import VaultClient
from warmhold_wcache.content import compute_content


def publish(path: Path, folder: Path, model: str = "", **key: str) -> str:
    """Publish what stands for a checkpoint, as an engine that was started with a launch key."""
    content = compute_content(folder, None)
    files = [[version.path, version.size_bytes, 0, 0, 0] for version in content.versions]
    generation, fds = make_generation()
    generation = dataclasses.replace(
        generation,
        key={"content": content.digest, "is_draft": "false", **key},
        launch_key={"files": json.dumps(files)},
        model=model or str(folder),
    )
    with VaultClient(path) as client:
        client.publish(generation, fds)
    close_all(fds)
    return generation.id


def flip(folder: Path) -> None:
    """Flip one bit of the weights and give the file its old time again."""
    file = folder / "model.safetensors"
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("model", ["", "org/name", "/nowhere"], ids=["path", "hub", "moved"])
def test_the_checkpoint_is_read_again(tmp_path: Path, model: str) -> None:
    folder = write_model(tmp_path / "model")
    with running_vault(tmp_path) as (path, _):
        generation_id = publish(path, folder, model)
        code, text = command(path, "verify")
        name = model or str(folder)
        sound = f"{generation_id} {name}: sound, 3 segment(s) checked; checkpoint: "
        assert (code, text) == (0, f"{sound}same\n")
        flip(folder)
        code, text = command(path, "verify")
        assert (code, text) == (1, f"{sound}CHANGED (content)\n")
        code, text = command(path, "verify", "--json")
        (report,) = json.loads(text)
        assert (code, report["sound"], report["id"]) == (1, True, generation_id)
        assert report["checkpoint"] == {"state": "changed", "folder": str(folder), "detail": ""}
        assert command(path, "verify", "--resident-only") == (
            0,
            f"{generation_id} {name}: sound, 3 segment(s) checked\n",
        )
        (report,) = json.loads(command(path, "verify", "--resident-only", "--json")[1])
        assert report["checkpoint"] is None
        (folder / "model.safetensors").unlink()
        code, text = command(path, "verify")
        looked = model if model.startswith("/") else folder
        assert (code, text) == (0, f"{sound}not found ({looked})\n")


def test_a_checkpoint_with_weights_in_folders_below(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/model.safetensors").write_bytes(b"dense")
    with running_vault(tmp_path) as (path, _):
        publish(path, folder, "org/name")
        code, text = command(path, "verify")
        assert (code, text.endswith("checkpoint: same\n")) == (0, True), text


def test_changed_bytes_in_memory_still_fail(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        generation, fds = make_generation()
        key = {"content": compute_content(folder, None).digest}
        mapping = mmap.mmap(fds[0], SIZE)
        client.publish(dataclasses.replace(generation, key=key, model=str(folder)), fds)
        mapping[0] ^= 1
        code, text = command(path, "verify")
        assert (code, "CHANGED in segment(s) 0: w0; checkpoint: same" in text) == (1, True)
        mapping.close()
        close_all(fds)


def test_ranks_share_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def compute(folder: Path, cache: Path | None, progress: object) -> object:
        read.append((folder, cache))
        return compute_content(folder, cache)

    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(checkpoint, "compute_content", compute)
    with running_vault(tmp_path) as (path, _):
        for rank in "01":
            publish(path, folder, tp_rank=rank)
        code, text = command(path, "verify")
        assert (code, text.count("checkpoint: same")) == (0, 2)
    assert read == [(folder, None)]  # and no digest that was kept


def test_a_draft_models_files_are_not_those_of_the_launch_key(tmp_path: Path) -> None:
    """The launch key is the engine's, and names the files of its target model."""
    folder = write_model(tmp_path / "model")
    with running_vault(tmp_path) as (path, _):
        publish(path, folder, "org/draft", is_draft="true", content="the draft's")
        code, text = command(path, "verify")
        assert (code, "checkpoint: not found (org/draft)" in text) == (0, True)


def test_a_relative_model_is_not_looked_up_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "org" / "name")
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        generation, fds = make_generation()
        key = {"content": "another folder's"}
        client.publish(dataclasses.replace(generation, key=key, model="org/name"), fds)
        close_all(fds)
        code, text = command(path, "verify")
        assert (code, "checkpoint: not found (org/name)" in text) == (0, True)
        assert folder.is_dir()


def test_without_a_content_there_is_nothing_to_compare(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with running_vault(tmp_path) as (path, _):
        publish(path, folder, content="")
        code, text = command(path, "verify")
        assert (code, "checkpoint: unknown" in text) == (0, True)


def test_a_checkpoint_that_cannot_be_read_is_not_called_the_same(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with running_vault(tmp_path) as (path, _):
        publish(path, folder)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").mkdir()  # a file that cannot be read, for root too
        code, text = command(path, "verify")
        assert (code, "checkpoint: UNREADABLE (cannot read" in text) == (1, True)


def test_without_blake3_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model")
    with running_vault(tmp_path) as (path, _):
        publish(path, folder)
        monkeypatch.setitem(sys.modules, "blake3", None)
        code, text = command(path, "verify")
        assert (code, text.startswith("error: wcache.unsupported: ")) == (1, True)
        assert "blake3" in text and "--resident-only" in text
        assert command(path, "verify", "--resident-only")[0] == 0


def test_progress_is_one_line_that_goes(capsys: pytest.CaptureFixture[str]) -> None:
    for done in (1, 2, 4):
        cli._show_progress(done, 4)
    assert capsys.readouterr().err == (
        "\rreading the checkpoint: 25 %\r\rreading the checkpoint: 50 %\r\r" + " " * 29 + "\r"
    )
