# SPDX-License-Identifier: Apache-2.0
"""`warmhold bench` in a whole product around the fake engine: what counts, and what does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from stack import ROOT, Stack

MakeStack = Callable[..., Stack]


@pytest.fixture
def stack(make_stack: MakeStack, tmp_path: Path) -> Stack:
    (tmp_path / "criu").write_text("")
    return make_stack(FAKE_CRIU_FILE=str(tmp_path / "criu")).serve()


def measure(stack: Stack, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run it; return its exit code, its result, and what it said."""
    out = stack.folder / "out"
    done = stack.run("bench", "--rounds", "1", "--out", str(out), "--json", *options)
    assert (out / "bench.json").exists(), done.stderr
    result = json.loads(done.stdout)
    assert json.loads((out / "bench.json").read_text()) == result
    schema = json.loads((ROOT / "bench" / "schema.json").read_text())
    jsonschema.validate(result, schema["bench"])
    assert {path.name for path in out.iterdir()} == {"bench.json", "bench.svg", "bench.png"}
    return done.returncode, result, done.stderr


def test_every_mode_is_measured_and_proved(stack: Stack) -> None:
    code, result, said = measure(stack)
    assert code == 0, said
    assert [row["name"] for row in result["rows"]] == ["disk", "ipc_cache", "snapshot"]
    for start in result["starts"]:
        assert start["proof"]["mode"] == start["name"] and start["faults"] == []
        assert sum(start["phases"].values()) == pytest.approx(start["first_token_s"])
    assert result["snapshot"]["image_bytes"] > 0
    assert "3/3" in said
    assert stack.wait_ready()["state"] == "SERVING", "it serves again"
    assert not list((stack.folder / "state" / "snapshots").glob("bench*")), "its own is removed"


def test_a_restore_that_is_none_is_no_time(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "criu").write_text("nonce")
    code, result, said = measure(stack)
    assert code == 1
    row = result["rows"][2]
    assert (row["name"], row["median_s"], row["failed"]) == ("snapshot", None, 1)
    assert "snapshot.canary" in row["faults"][0] and row["faults"][0] in said
    assert result["rows"][1]["median_s"] is not None, "the others count"
    assert stack.wait_ready()["mode"] == "ipc_cache"


def test_plain_vllm_beside_it(stack: Stack) -> None:
    code, result, said = measure(stack, "--modes", "disk", "--peer", "1", "--cold", "1")
    assert code == 0, said
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["disk, empty compile caches", "disk", "vllm serve"]
    assert rows["vllm serve"]["median_s"] > 0
    (peer,) = (start for start in result["starts"] if start["name"] == "vllm serve")
    assert peer["proof"] == {"answers_equal": True}
    assert stack.wait_ready()["ready"], "ours serves again"


def test_plain_vllm_that_does_not_serve(stack: Stack) -> None:
    stack.engine_exit.with_name("plain-exit").write_text("3")
    code, result, said = measure(stack, "--modes", "disk", "--peer", "1")
    assert code == 1
    assert "it never served" in result["rows"][1]["faults"][0] and "it never served" in said
    assert result["rows"][1]["median_s"] is None
    assert stack.wait_ready()["ready"]


def test_what_cannot_be_measured_is_said(stack: Stack) -> None:
    done = stack.run("bench", "--modes", "snapshot")
    assert done.returncode == 2 and "disk has to be among the modes" in done.stderr
    assert stack.run("bench", "--page-cache", "lukewarm").returncode == 2
    assert stack.wait_ready()["starts"] == 1, "nothing was restarted"
    assert stack.stop() == 0
    done = stack.run("bench")
    assert done.returncode == 75 and "ready.no-runner" in done.stderr
