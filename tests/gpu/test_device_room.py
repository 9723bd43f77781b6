# SPDX-License-Identifier: Apache-2.0
"""The whole product on a GPU that is too small for an engine's weights twice: where an engine on
resident weights does not come up, the start from disk gets their room, and publishes anew. A
snapshot of an engine whose KV cache takes the rest of the GPU.

A random 16 GB Llama, eager, with vLLM's default share of the GPU: a tenth of it is weights.
"""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_stand import CRIU, PATIENCE_S, running_stack, say, used_bytes

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not CRIU, reason="WARMHOLD_GPU_TEST_CRIU names no criu"),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Any]:
    with running_stack("room", "16gb", ["--max-model-len", "1024", "--enforce-eager"]) as made:
        yield made


def test_a_start_from_disk_gets_the_room_of_resident_weights(stack: Any) -> None:
    first, starts = stack.ask_all(), stack.status()["starts"]
    stack.kill_engine()
    deadline = time.monotonic() + PATIENCE_S
    while not is_trying(stack.status(), starts):
        assert time.monotonic() < deadline, stack.status()
        time.sleep(0.05)
    held = used_bytes()
    say(f"an engine begins on resident weights: {held >> 20} MiB in use")
    os.kill(stack.engine_pid(), signal.SIGKILL)
    status = stack.wait_ready(starts + 2, PATIENCE_S)
    say(f"{status['mode']}: {status['rejections']}; weights {status['weights']}")
    assert status["mode"] == "disk" and status["weights"]["published"]
    assert "resident weights given up" in stack.log.read_text(errors="replace")
    assert stack.ask_all() == first


def test_a_snapshot_beside_a_great_kv_cache(stack: Any) -> None:
    first, starts = stack.ask_all(), stack.status()["starts"]
    code, made, error = stack.run("snapshot-create", "--name", "a")
    say(f"create: {made.strip()} {error.strip()[-500:]}")
    assert code == 0
    assert stack.ask_all() == first
    stack.kill_engine()
    status = stack.wait_ready(starts + 1, PATIENCE_S)
    say(f"{status['mode']}: {status['phases']}")
    assert status["mode"] == "snapshot"
    assert stack.ask_all() == first


def test_a_checkpoint_that_changed_replaces_the_one_before(stack: Any) -> None:
    """Both do not fit, and the plan does not know yet that they differ."""
    before, starts = stack.ask_all(), stack.status()["starts"]
    (old,) = resident(stack)
    path = max(Path(stack.model).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(-(1 << 20), os.SEEK_END)
        file.write(bytes(1 << 20))
    time.sleep(2.5)  # so that the digest of its files is kept
    stack.supervise("restart", "engine")
    status = stack.wait_ready(starts + 1, PATIENCE_S)
    say(f"{status['mode']}: {status['rejections']}; weights {status['weights']}")
    (new,) = resident(stack)
    assert status["mode"] == "disk" and status["weights"]["published"] == [new] != [old]
    assert stack.ask_all() != before


def resident(stack: Any) -> list[str]:
    from warmhold_wcache.client import VaultClient

    with VaultClient(stack.run_dir / "wcache.sock") as client:
        return [str(row["id"]) for row in client.stat()]


def is_trying(status: dict[str, Any], starts: int) -> bool:
    """Whether the engine after so many starts begins, on resident weights."""
    return bool(
        status
        and (status["state"], status["mode"]) == ("TRYING", "ipc_cache")
        and status["starts"] > starts
        and status["pid"]
    )
