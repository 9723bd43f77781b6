# SPDX-License-Identifier: Apache-2.0
"""Files that an engine reads: each kind is found, and a change of one is seen."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stack import write_model
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode import inputs
from warmhold_entrypoint.snapshot_mode.inputs import read_inputs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def settings(tmp_path: Path, *command: str, **variables: str) -> Settings:
    environ = {"WARMHOLD_MODELS_DIR": str(tmp_path / "models"), **variables}
    made, faults, _ = read_settings(environ, command)
    assert faults == []
    return made


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(b"w" * 100)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer_config.json", "generation_config.json"),
        *("chat_template.jinja", "modeling_own.py", "1_Pooling/config.json"),
    ],
)
def test_every_small_file_of_the_model_counts(tmp_path: Path, model: Path, name: str) -> None:
    wanted = settings(tmp_path)
    before = read_inputs(wanted, str(model))
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"other": 1}')
    after = read_inputs(wanted, str(model))
    assert set(before) == set(after) == {"model"}
    assert {key for key in after["model"] if before["model"].get(key) != after["model"][key]} == {
        name
    }
    path.unlink()
    assert name not in read_inputs(wanted, str(model)).get("model", {})


def test_weight_files_are_left_to_the_key(tmp_path: Path, model: Path) -> None:
    assert set(read_inputs(settings(tmp_path), str(model))["model"]) == {"config.json"}


def test_a_model_that_is_not_there_yet_has_no_files(tmp_path: Path) -> None:
    assert read_inputs(settings(tmp_path), None) == {}


@pytest.mark.parametrize(
    "option",
    [
        *("--chat-template", "--tool-parser-plugin", "--reasoning-parser-plugin"),
        *("--io-processor-plugin", "--log-config-file"),
    ],
)
@pytest.mark.parametrize("joined", [True, False])
def test_a_file_that_an_option_names(tmp_path: Path, option: str, joined: bool) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    command = [f"{option}={path}"] if joined else [option, str(path)]
    wanted = settings(tmp_path, *command)
    before = read_inputs(wanted, None)
    assert {name: list(files) for name, files in before.items()} == {
        option.removeprefix("--"): [str(path)]
    }
    status = path.stat()
    path.write_text("two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert read_inputs(wanted, None) != before


def test_the_text_of_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("max-model-len: 100\n")
    before = read_inputs(settings(tmp_path, "--config", str(path)), None)
    path.write_text("max-model-len: 200\n")
    after = read_inputs(settings(tmp_path, "--config", str(path)), None)
    assert before.keys() == after.keys() == {"config"} and before != after


def build_lora(path: Path) -> list[str]:
    return ["--lora-modules", f"a={path}"]


def build_lora_json(path: Path) -> list[str]:
    return ["--lora-modules", json.dumps({"name": "a", "path": str(path)})]


def build_draft(path: Path) -> list[str]:
    return ["--speculative-config", json.dumps({"model": str(path), "method": "eagle"})]


def build_dotted_draft(path: Path) -> list[str]:
    return ["-sc.model", str(path)]


def build_tokenizer(path: Path) -> list[str]:
    return ["--tokenizer", str(path)]


@pytest.mark.parametrize(
    "build", [build_lora, build_lora_json, build_draft, build_dotted_draft, build_tokenizer]
)
def test_a_folder_that_an_option_names(
    tmp_path: Path, build: Callable[[Path], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "adapter")
    wanted = settings(tmp_path, *build(folder))
    ((_, before),) = read_inputs(wanted, None).items()
    assert {Path(name).name for name in before} == {path.name for path in folder.iterdir()}
    (folder / "adapter_config.json").write_text('{"r": 9}')
    ((_, after),) = read_inputs(wanted, None).items()
    assert [name for name in after if after[name] != before[name]] == [
        str(folder / "adapter_config.json")
    ]
    monkeypatch.setattr(inputs, "_SMALL_BYTES", 99)
    ((_, before),) = read_inputs(wanted, None).items()
    (folder / "adapter_model.safetensors").write_bytes(b"v" * 101)
    ((_, after),) = read_inputs(wanted, None).items()
    assert before != after


def test_what_is_nested_in_a_config_file(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "draft")
    path = tmp_path / "engine.yaml"
    path.write_text(f"speculative-config:\n  model: {folder}\n  num_speculative_tokens: 3\n")
    wanted = settings(tmp_path, "--config", str(path))
    assert wanted.arguments.config == (
        "--speculative-config",
        json.dumps({"model": str(folder), "num_speculative_tokens": 3}),
    )
    assert set(read_inputs(wanted, None)) == {"config", "speculative-config"}


def test_what_lies_in_the_hugging_face_cache(tmp_path: Path) -> None:
    cached = tmp_path / "models" / "hub" / "models--own--er"
    adapter(cached / "snapshots" / "c1")
    adapter(cached / "snapshots" / "c2")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c1")
    wanted = settings(tmp_path, "--lora-modules", "a=own/er")
    before = read_inputs(wanted, None)
    assert all("/snapshots/c1/" in name for name in before["lora-modules"])
    (cached / "refs" / "main").write_text("c2")
    assert read_inputs(wanted, None) != before


def test_a_file_that_a_variable_of_vllm_names(tmp_path: Path) -> None:
    path = tmp_path / "logging.json"
    path.write_text("{}")
    wanted = settings(tmp_path, VLLM_LOGGING_CONFIG_PATH=str(path), VLLM_CACHE_ROOT=str(tmp_path))
    before = read_inputs(wanted, None)
    assert set(before) == {"environment.VLLM_LOGGING_CONFIG_PATH"}
    path.write_text('{"a": 1}')
    assert read_inputs(wanted, None) != before


def test_a_new_container_with_the_same_volume_sees_the_same(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other inodes and ctimes, as of a copied volume or an image that was pulled again."""
    monkeypatch.setattr(inputs, "_SMALL_BYTES", 50)
    (model / "tokenizer.json").write_text("t" * 100)
    wanted = settings(tmp_path, "--chat-template", str(model / "tokenizer.json"))
    before = read_inputs(wanted, str(model))
    assert before["model"]["tokenizer.json"].startswith("stat ")
    model.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", model)
    assert (model / "tokenizer.json").stat().st_ino != (
        tmp_path / "old/tokenizer.json"
    ).stat().st_ino
    assert read_inputs(wanted, str(model)) == before
    os.utime(model / "tokenizer.json", (1, 1))
    assert read_inputs(wanted, str(model)) != before


def test_many_files_are_not_all_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_ALL_BYTES", 250)
    for number in range(4):
        (model / f"part{number}.py").write_text("p" * 100)
    versions = read_inputs(settings(tmp_path), str(model))["model"]
    assert sorted(text.partition(" ")[0] for text in versions.values()) == [
        *("sha256", "sha256", "sha256"),
        *("stat", "stat"),
    ]


def test_what_is_no_file_is_left_alone(tmp_path: Path, model: Path) -> None:
    os.mkfifo(model / "pipe")  # opening it would wait for a writer
    (model / "nowhere").symlink_to("/nonexistent")
    (model / "1" / "2" / "3").mkdir(parents=True)
    (model / "1" / "2" / "3" / "deep.json").write_text("{}")
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").write_text("x")
    command = ["--root-path", "/", "--chat-template", "{{ messages }}\n" + "x" * 5000]
    command += ["--download-dir", str(model), "--middleware", "a.b", "--note", "x" * 300 + "/y"]
    command += ["--any-folder", "/", "--uds", str(model / "pipe"), "--empty", ""]
    assert set(read_inputs(settings(tmp_path, *command), str(model))) == {"model"}
    assert set(read_inputs(settings(tmp_path, *command), str(model))["model"]) == {"config.json"}


def test_a_file_that_cannot_be_read_is_a_version_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "template"
    path.write_text("one")
    wanted = settings(tmp_path, "--chat-template", str(path))
    before = read_inputs(wanted, None)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    after = read_inputs(wanted, None)
    assert after == {"chat-template": {str(path): "unreadable: Permission denied"}} != before
