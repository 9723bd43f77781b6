# SPDX-License-Identifier: Apache-2.0
"""The whole product on a GPU machine, and what goes wrong with CUDA: weights that a flat file alone
has, a restore for which the GPU has no memory, a criu that is killed while it dumps. The engine
serves in the end, with the same answers.

One stack without a container (bench/gpu_stack.py), a random 1 GB Llama, eager. It needs criu with
its plug-in: WARMHOLD_GPU_TEST_CRIU names the folder (tests/gpu/README.md).
"""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_stand import CRIU, PATIENCE_S, running_stack, say, used_bytes

ARGUMENTS = ["--max-model-len", "1024", "--enforce-eager", "--gpu-memory-utilization", "0.2"]
LEFT_BYTES = 300 << 20  # less than a CUDA context takes
HOG = f"""
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - {LEFT_BYTES}, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not CRIU, reason="WARMHOLD_GPU_TEST_CRIU names no criu"),
]


def eventually(question: Callable[[], Any], what: str, poll_s: float = 0.05) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := question()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(poll_s)
    return answer


@pytest.fixture(scope="module")
def stack() -> Iterator[Any]:
    with running_stack("failures", "1gb", ARGUMENTS) as made:
        yield made


@contextmanager
def full_gpu() -> Iterator[Callable[[], None]]:
    """A process that holds nearly all of the GPU's memory; yield what ends it."""
    command = [sys.executable, "-c", HOG]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
        assert hog.stdout is not None and hog.stdout.readline() == b"held\n"
        yield lambda: hog.communicate() and None
        hog.kill()


def logged(stack: Any, text: str, since: int) -> bool:
    return text in stack.log.read_text(errors="replace")[since:]


def test_a_vault_that_has_lost_the_weights(stack: Any) -> None:
    """As after the host's reboot: they come out of the flat file."""
    from warmhold_wcache.client import VaultClient

    first = stack.ask_all()
    code, made, error = stack.run("snapshot-create", "--name", "flat")
    assert code == 0, error
    say(made)
    stack.supervise("stop", "engine")
    with VaultClient(stack.run_dir / "wcache.sock") as client:
        for row in client.stat():
            client.drop(row["id"], force=True)
    say(f"{used_bytes() >> 20} MiB in use")
    stack.supervise("start", "engine")
    status = stack.wait_ready(0, PATIENCE_S)
    say(f"{status['mode']}, {status['phases']}")
    assert (status["mode"], status["weights"]["mode"]) == ("snapshot", "flat")
    assert stack.ask_all() == first


def test_a_restore_for_which_the_gpu_has_no_memory(stack: Any) -> None:
    first = stack.ask_all()
    code, _, error = stack.run("snapshot-create", "--name", "a")
    assert code == 0, error
    stack.supervise("stop", "engine")
    since = len(stack.log.read_text(errors="replace"))
    with full_gpu() as release:
        say(f"{used_bytes() >> 20} MiB in use")
        starting = threading.Thread(target=stack.supervise, args=("start", "engine"))
        starting.start()
        eventually(lambda: logged(stack, "restore failed", since), "a restore that fails")
        release()
    starting.join(PATIENCE_S)
    status = stack.wait_ready(0, PATIENCE_S)
    told = {item["mode"]: item for item in status["rejections"]}
    say(f"{status['mode']}: {told['snapshot']['code']}: {told['snapshot']['detail']}")
    assert status["mode"] == "ipc_cache" and told["snapshot"]["code"] == "snapshot.gpu-memory"
    assert stack.ask_all() == first


def test_a_criu_that_is_killed_while_it_dumps(stack: Any) -> None:
    first = stack.ask_all()
    folder = Path(stack.environment["WARMHOLD_STATE_DIR"]) / "snapshots"
    done: list[tuple[int, str, str]] = []
    making = threading.Thread(
        target=lambda: done.append(stack.run("snapshot-create", "--name", "b", limit_s=PATIENCE_S))
    )
    making.start()

    def copying() -> bool:
        logs = [path.read_text(errors="replace") for path in folder.glob(".*/dump.log")]
        return any("Checkpointing CUDA devices" in text for text in logs)

    eventually(copying, "a dump that checkpoints CUDA", 0.01)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dump" in argv and any(word.endswith(b"/criu.bin") for word in argv):
            os.kill(int(process.name), 9)
            say(f"killed criu, process {process.name}")
    making.join(PATIENCE_S)
    code, _, error = done[0]
    say(f"create: {code} {error.strip()[-500:]}")
    assert code == 73
    status = stack.wait_ready(0, PATIENCE_S)
    say(f"{status['mode']}, {status['starts']} starts")
    assert stack.ask_all() == first
    assert not (folder / "b").exists()
