# SPDX-License-Identifier: Apache-2.0
"""The launch key: what counts, what does not, and how fast it is."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import warmhold_wcache
from warmhold_wcache.content import Content, FileVersion
from warmhold_wcache.key import build_launch_key, compare, normalise_arguments, read_launch_key

VERSION = FileVersion("/models/a/model.safetensors", 10, 1, 2, 3)
CONTENT = Content("c0ffee", (VERSION,))


def _key(
    *argv: str, environ: dict[str, str] | None = None, content: Content = CONTENT, **more: str
) -> dict[str, str]:
    versions = {"vllm": more.get("vllm", "0.32.0")}
    return build_launch_key(
        argv, environ or {}, content, versions=versions, cpu_linear=more.get("cpu_linear", "shared")
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["m", "--max-model-len", "100"], ["m", "--max-model-len=100"]),
        (["m", "--max_model_len=100"], ["m", "--max-model-len=100"]),
        (["m", "--dtype", "half", "--tp", "2"], ["m", "--tp", "2", "--dtype", "half"]),
        (["m", "-tp", "2"], ["m", "--tensor-parallel-size", "2"]),
        (["m", "--hf-overrides", '{"a":1,"b":2}'], ["m", "--hf-overrides", '{"b": 2, "a": 1}']),
        (["m", "--port", "1"], ["m", "--port", "2"]),
        (["m", "--api-key", "old"], ["m", "--api-key", "new"]),
        (["m", "--dtype", "half", "--dtype", "float"], ["m", "--dtype", "float"]),
    ],
)
def test_arguments_that_mean_the_same(one: list[str], other: list[str]) -> None:
    if "--tp" in one:
        assert normalise_arguments(one) == normalise_arguments(other)
    else:
        assert not compare(_key(*one), _key(*other))


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        (["m"], ["n"], "argument.positional-0"),
        (["m", "--dtype", "half"], ["m", "--dtype", "float"], "argument.dtype"),
        (["m"], ["m", "--enable-lora"], "argument.enable-lora"),
        (["m", "-tp", "1"], ["m", "-tp", "2"], "argument.tensor-parallel-size"),
    ],
)
def test_a_difference_has_its_field(one: list[str], other: list[str], field: str) -> None:
    assert list(compare(_key(*one), _key(*other))) == [field]


def test_the_environment_counts_where_it_is_vllms() -> None:
    plain = _key("m")
    assert not compare(plain, _key("m", environ={"HOME": "/x", "VLLM_API_KEY": "secret"}))
    assert list(compare(plain, _key("m", environ={"VLLM_USE_V2_MODEL_RUNNER": "1"}))) == [
        "variable.VLLM_USE_V2_MODEL_RUNNER"
    ]


def test_versions_and_path_count() -> None:
    assert list(compare(_key("m"), _key("m", vllm="0.33.0"))) == ["version.vllm"]
    assert compare(_key("m"), _key("m", cpu_linear="packed")) == {
        "cpu_linear": ("shared", "packed")
    }


def test_no_secret_enters() -> None:
    environ = {"VLLM_API_KEY": "s3cret", "HF_TOKEN": "s3cret"}
    assert "s3cret" not in str(
        _key("m", "--api-key", "s3cret", "--hf-token=s3cret", environ=environ)
        | _key("m", "--api-k", "s3cret", "s3cret", "--hf_tok=s3cret")
    )


def test_known_content_outweighs_the_version_of_files() -> None:
    touched = FileVersion("/models/a/model.safetensors", 10, 1, 99, 3)
    assert not compare(_key("m"), _key("m", content=Content("c0ffee", (touched,))))
    assert list(compare(_key("m"), _key("m", content=Content("beef", (touched,))))) == [
        "content",
        "files",
    ]
    # Nothing has read the present version: it may be another content.
    assert list(compare(_key("m"), _key("m", content=Content("", (touched,))))) == ["files"]
    assert not compare(_key("m"), _key("m", content=Content("", (VERSION,))))
    # Published before anything had read it.
    assert not compare(_key("m", content=Content("", (VERSION,))), _key("m"))


def test_it_takes_milliseconds(tmp_path: Path) -> None:
    for index in range(200):
        (tmp_path / f"model-{index:05}.safetensors").touch()
    began = time.monotonic()
    key = read_launch_key(["m"], {}, tmp_path, tmp_path, versions={}, cpu_linear="shared")
    assert time.monotonic() - began < 0.1
    assert key["content"] == ""


def test_neither_torch_nor_vllm_nor_blake3_is_imported() -> None:
    code = (
        "import sys, warmhold_wcache.key, warmhold_wcache.content;"
        "print([n for n in ('torch', 'vllm', 'blake3', 'numpy') if n in sys.modules])"
    )
    root = Path(warmhold_wcache.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert done.stdout.strip() == "[]"
