# SPDX-License-Identifier: Apache-2.0
"""What of the measurements on a GPU machine can be wrong without one: the table that goes on where
it was left, the checkpoint that is written by hand, the comparison of answers."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.usefixtures("bench")
def test_a_table_goes_on_where_it_was_left(tmp_path: Path) -> None:
    table_of = load("gpu_table").Table
    path = tmp_path / "table.json"
    table_of(path).fill("row", 2, lambda: {"first_token_s": 1.5})
    asked: list[int] = []
    again = table_of(path)
    again.fill("row", 3, lambda: asked.append(1) or {"first_token_s": 2.5})
    assert len(asked) == 1 and again.lacks("row", 3) == 0
    assert table_of(path).rows == {"row": [{"first_token_s": 1.5}] * 2 + [{"first_token_s": 2.5}]}


@pytest.mark.usefixtures("bench")
def test_what_fails_ends_its_row_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = load("gpu_table").Table(tmp_path / "table.json")
    asked: list[int] = []
    table.fill("bad", 2, lambda: asked.append(1) or 1 / 0)
    table.fill("good", 1, lambda: 7)
    assert len(asked) == 1 and table.rows == {"good": [7]}
    assert "ZeroDivisionError" in capsys.readouterr().out
    late = load("gpu_table").Table(tmp_path / "table.json", limit_s=0.0)
    late.fill("late", 1, lambda: 7)
    assert late.rows == {"good": [7]}


@pytest.mark.usefixtures("bench")
def test_a_files_header_is_that_of_safetensors(tmp_path: Path) -> None:
    model = load("gpu_model")
    shape = model.Shape(8, 16, 2, 1, 10, 1)
    total = 0
    for layer in (-1, 0):
        tensors = shape.tensors_of(layer)
        size = sum(2 * model.count(item) for item in tensors.values())
        path = tmp_path / "one.safetensors"
        path.write_bytes(model.build_header(tensors) + bytes(size))
        with safe_open(path, "np") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in tensors}
        assert found == tensors
        total += size
    assert total == shape.size_bytes


@pytest.mark.usefixtures("bench")
def test_answers_are_compared() -> None:
    client = load("gpu_client")
    first = [[["a", -1.0]], [["b", -2.0]]]
    assert client.compare(first, first) == {"of": 2, "tokens": 2, "logprobs": 2}
    now = [[["a", -1.5]], [["c", -2.0]]]
    assert client.compare(now, first) == {"of": 2, "tokens": 1, "logprobs": 0}


@pytest.mark.usefixtures("bench")
def test_a_table_becomes_a_benchmarks_result() -> None:
    machine = {"kernel": "6", "cores": 16, "gpus": ["G"]}
    ours = [
        {"first_token_s": 2.0 + n, "phases": {"image": 1.5, "unaccounted": 0.1}} for n in (0, 1, 2)
    ]
    rows = {
        "machine": [machine],
        "1gb snapshot": ours,
        "1gb upstream ipc_cache": [{"first_token_s": 60.0}],
    }
    found = {"date": "d", "command": "c OUT, warm", "vllm": "v", "runs": {"r": rows}}
    result = load("gpu_chart").build_result(found, "r", "1gb")
    upstream, snapshot = result.rows
    assert (upstream.name, upstream.median_s, upstream.speedup) == ("vLLM's ipc_cache", 60.0, 1.0)
    assert (snapshot.median_s, snapshot.speedup, snapshot.count) == (3.0, 20.0, 3)
    assert snapshot.phases == {"image": 1.5, "unaccounted": 1.5}
    assert (result.command, result.model) == ("c OUT", "1 GB")
