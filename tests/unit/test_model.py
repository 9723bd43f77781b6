# SPDX-License-Identifier: Apache-2.0
"""Where a model is looked for, what counts as complete, and what is said where it is not."""

import json
from pathlib import Path

import pytest
from warmhold_entrypoint.errors import Fault
from warmhold_entrypoint.model import Model, find_model

ID = "owner/name"
FOLDER = "models--owner--name"


def put_model(directory: Path, weights: int = 100) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(weights))
    return directory


def put_shards(directory: Path, wanted: int, present: int) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    names = [f"model-{index:05}-of-{wanted:05}.safetensors" for index in range(1, wanted + 1)]
    index = {"weight_map": {f"layer{place}": name for place, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names[:present]:
        (directory / name).write_bytes(bytes(10))
    return directory


def put_cached(cache: Path, commit: str, reference: str | None = "main") -> Path:
    if reference:
        refs = cache / FOLDER / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        (refs / reference).write_text(commit)
    return put_model(cache / FOLDER / "snapshots" / commit)


def find(
    name: str, models_dir: Path, *, revision: str | None = None, offline: bool = True
) -> tuple[Model, list[Fault]]:
    return find_model(name, revision, models_dir, offline, demo_dir=models_dir / "the-demo")


def assert_found(found: tuple[Model, list[Fault]], directory: Path, weights: int = 100) -> None:
    model, faults = found
    assert faults == []
    assert (model.directory, model.weight_bytes) == (str(directory), weights)


def assert_missing(found: tuple[Model, list[Fault]], *words: str) -> None:
    model, (fault,) = found
    assert (model.directory, model.weight_bytes) == (None, 0)
    assert fault.code == "model.missing"
    assert [word for word in words if word not in fault.lines()] == []


def test_demo(tmp_path: Path) -> None:
    assert_missing(find("demo", tmp_path, offline=False), "the-demo (no such folder)")
    directory = put_model(tmp_path / "the-demo")
    assert_found(find("demo", tmp_path), directory)


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = put_model(tmp_path / "here")
    assert_found(find(str(directory), tmp_path / "elsewhere"), directory)
    monkeypatch.chdir(tmp_path)
    assert_found(find("./here", tmp_path / "elsewhere"), Path("here"))


@pytest.mark.parametrize("depth", ["hub", "."], ids=["mounted-above", "mounted-at"])
class TestCacheOfEitherDepth:
    def test_main(self, tmp_path: Path, depth: str) -> None:
        put_cached(tmp_path / depth, "old", reference=None)
        directory = put_cached(tmp_path / depth, "new")
        assert_found(find(ID, tmp_path), directory)

    def test_without_a_reference(self, tmp_path: Path, depth: str) -> None:
        directory = put_cached(tmp_path / depth, "abc", reference=None)
        assert_found(find(ID, tmp_path), directory)

    def test_revision(self, tmp_path: Path, depth: str) -> None:
        put_cached(tmp_path / depth, "aaa")
        branch = put_cached(tmp_path / depth, "bbb", reference="v1")
        assert_found(find(ID, tmp_path, revision="v1"), branch)
        assert_found(find(ID, tmp_path, revision="bbb"), branch)
        assert_missing(find(ID, tmp_path, revision="v2"), "snapshots/v2 (no such folder)")

    def test_a_broken_snapshot_is_named(self, tmp_path: Path, depth: str) -> None:
        directory = put_cached(tmp_path / depth, "abc")
        (directory / "config.json").unlink()
        assert_missing(find(ID, tmp_path), f"{directory} (no config.json)")


@pytest.mark.parametrize("folder", ["owner/name", "name"])
def test_a_plain_folder(tmp_path: Path, folder: str) -> None:
    directory = put_model(tmp_path / folder)
    assert_found(find(ID, tmp_path), directory)
    assert_missing(find(ID, tmp_path, revision="v1"))


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    directory = put_shards(tmp_path / "m", wanted=3, present=1)
    assert_missing(
        find(str(directory), tmp_path),
        f"{directory} (2 of 3 shards missing: model-00002-of-00003.safetensors)",
    )


def test_all_shards(tmp_path: Path) -> None:
    directory = put_shards(tmp_path / "m", wanted=3, present=3)
    assert_found(find(str(directory), tmp_path), directory, weights=30)


@pytest.mark.parametrize("extra", ["consolidated.safetensors", "pytorch_model.bin"])
def test_weights_that_lie_there_twice_count_once(tmp_path: Path, extra: str) -> None:
    directory = put_shards(tmp_path / "m", wanted=3, present=3)
    (directory / extra).write_bytes(bytes(30))
    assert_found(find(str(directory), tmp_path), directory, weights=30)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, "no weight files"),
        ({"config.json": "{}", "model.safetensors.index.json": "{"}, "unreadable: "),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "unreadable: "),
        ({"config.json": "{}", "model.safetensors.index.json": "[]"}, "unreadable: "),
    ],
    ids=["empty", "no-weights", "index-cut", "index-empty", "index-list"],
)
def test_what_is_wrong_with_a_folder(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert_missing(find(str(tmp_path), tmp_path), f"{tmp_path} ({problem}")


def test_weights_whose_blob_is_gone_are_no_weights(tmp_path: Path) -> None:
    directory = put_cached(tmp_path, "abc")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("../../blobs/gone")
    assert_missing(find(ID, tmp_path), f"{directory} (no weight files)")


def test_a_gguf_file_needs_no_config(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(bytes(5))
    assert_found(find(str(tmp_path), tmp_path), tmp_path, weights=5)


def test_offline_names_every_place(tmp_path: Path) -> None:
    places = [f"hub/{FOLDER}", FOLDER, "owner/name", "name"]
    wanted = [f"{tmp_path / place} (no such folder)" for place in places]
    assert_missing(find(ID, tmp_path, offline=True), *wanted, "HF_HUB_OFFLINE")


def test_online_a_missing_or_broken_model_is_to_be_downloaded(tmp_path: Path) -> None:
    for _ in range(2):
        model, faults = find(ID, tmp_path, offline=False)
        assert (model.directory, faults) == (None, [])
        (put_cached(tmp_path, "abc") / "model.safetensors").unlink()


@pytest.mark.parametrize("name", ["name", "a/b/c", "own er/name", "owner/", "/no/where", "./x"])
def test_what_is_no_id_is_missing_even_online(tmp_path: Path, name: str) -> None:
    assert_missing(find(name, tmp_path, offline=False), repr(name))
