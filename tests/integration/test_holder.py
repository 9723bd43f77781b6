# SPDX-License-Identifier: Apache-2.0
"""Upstream's `vllm preload` as the holder of weights: the engine may die, the holder may not.

The driver, the GPUs and vLLM are stand-ins; supervisord, the runner, signals and sockets are real.
"""

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_cuda import DEVICES, build_fake_cuda, build_fake_nvml
from stack import Stack, eventually

TWO = ("--tensor-parallel-size", "2")
MakeHolder = Callable[..., Stack]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the driver's library."""
    return build_fake_cuda(tmp_path_factory.mktemp("cuda")).parent


@pytest.fixture
def make(library: Path, tmp_path: Path) -> Iterator[MakeHolder]:
    """A stack that sees two GPUs. Its folder's name is short: the sockets' names are long."""
    made: list[Stack] = []

    def make_holder(**environment: str) -> Stack:
        variables = {
            "LD_LIBRARY_PATH": str(library),
            "FAKE_CUDA_COUNT": "2",
            "FAKE_PRELOAD_EXIT_FILE": str(tmp_path / "preload-exit"),
            "WARMHOLD_WCACHE": "auto",
        }
        folder = Path(tempfile.mkdtemp(prefix="wh-"))
        stack = Stack(folder, **{**variables, **environment})
        made.append(stack)
        stack.wrapper = ("sh", "-c", DEVICES, str(folder))
        return stack

    yield make_holder
    for stack in made:
        stack.close()
        for name in stack.shm_files():
            Path("/dev/shm", name).unlink()
        shutil.rmtree(stack.folder)


def ranks(stack: Stack) -> set[int]:
    """PIDs of the holder's processes, from outside, the launcher too; told by the holder's mark."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue
        if "\nGroups:\t30632 \n" in status and str(stack.folder).encode() in environ:
            found.add(int(folder.name))
    return found


def launcher(stack: Stack) -> int:
    """The holder's first process, from outside: the parent of the others."""
    pids = ranks(stack)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids}
    return next(iter(set(parents.values()) & pids))


def kill_engine(stack: Stack) -> None:
    os.kill(stack.roles()["front"], signal.SIGKILL)


def codes(stack: Stack) -> dict[str, str]:
    """Why the other modes are not used."""
    return {item["mode"]: item["code"] for item in (stack.status() or {})["rejections"]}


def test_the_engine_dies_and_maps_from_the_same_holder(make: MakeHolder) -> None:
    stack = make(WARMHOLD_API_KEY="hush").serve(*TWO, "--max-model-len", "64")
    status = stack.wait_ready()
    assert (status["mode"], status["degraded"]) == ("ipc_cache", "")
    assert status["weights"]["bytes"] == 2 * (3 << 20) and status["weights"]["loads"] == 2
    assert codes(stack) == {"snapshot": "snapshot.backend"}
    assert "mapped from `vllm preload`" in stack.run("status").stdout
    refused = stack.run("snapshot-create")
    assert refused.returncode == 73 and "snapshot.backend" in refused.stderr
    held = ranks(stack)
    assert len(held) == 3
    kill_engine(stack)
    status = stack.wait_ready(starts=2)
    assert status["mode"] == "ipc_cache" and status["crashes"] == 1
    assert ranks(stack) == held
    assert stack.supervisorctl("restart", "engine").returncode == 0
    assert ranks(stack) == held
    text = stack.text()
    assert text.count("preload argv") == 1 and "preload key none" in text and "key set" in text
    assert "program:wcache]" not in (stack.folder / "run" / "supervisord.conf").read_text()
    assert stack.stop() == 0
    assert ranks(stack) == set()


def test_the_arguments_of_both(make: MakeHolder) -> None:
    stack = make(
        WARMHOLD_PRELOAD_ARGS="--weight-cache-master-port 29600",
        WARMHOLD_ENGINE_ARGS='--model-loader-extra-config \'{"threads": 2, "state_timeout_s": 9}\'',
    ).serve(*TWO, "--note", "server", "--load-format", "safetensors", "--note", "x")
    # `--note` is the fake server's own, and upstream's preload would refuse what is a server's.
    assert "ended with 2 before it was ready" in stack.text()
    status = stack.wait_ready()
    assert status["mode"] == "disk" and codes(stack)["ipc_cache"] == "ipc_cache.holder"
    argv = re.findall(r"^argv (.*)$", stack.text(), re.M)
    words = json.loads(argv[-1])
    assert words[words.index("--load-format") + 1] == "safetensors"
    assert json.loads(words[words.index("--model-loader-extra-config") + 1]) == {"threads": 2}


def test_an_engine_waits_for_every_process_of_the_holder(make: MakeHolder, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stack = make(FAKE_PRELOAD_GATE=str(gate)).boot(*TWO)
    eventually(lambda: "preload argv" in stack.text(), "the holder")
    eventually(lambda: (stack.status() or {}).get("state") == "TRYING", "an answer meanwhile")
    assert "engine starting" not in stack.text()
    gate.touch()
    assert stack.wait_ready()["mode"] == "ipc_cache"
    text = stack.text()
    assert text.index("weights held processes=2") < text.index("engine starting")


def test_a_holder_that_dies_is_started_again_only_with_the_engine(make: MakeHolder) -> None:
    stack = make().serve(*TWO)
    engine, held = stack.tree(), ranks(stack)
    victim = max(held - {launcher(stack)})
    os.kill(victim, signal.SIGKILL)
    status = eventually(
        lambda: (found := stack.status()) and found["degraded"] and found, "degraded"
    )
    assert status["ready"] and status["state"] == "SERVING"
    assert "holds weights" in status["degraded"] or "refused" in status["degraded"]
    assert "degraded " in stack.run("status").stdout
    assert "warmhold_engine_degraded 1.0" in stack.run("metrics").stdout
    assert stack.run("healthcheck").returncode == 0
    # Whoever starts it by hand gets a refusal: the engine has the weights mapped.
    stack.supervisorctl("restart", "preload")
    eventually(lambda: "did not order it" in stack.text(), "the refusal")
    assert set(stack.tree()) == set(engine) and stack.text().count("preload argv") == 1
    kill_engine(stack)
    status = stack.wait_ready(starts=2)
    assert (status["mode"], status["degraded"]) == ("ipc_cache", "")
    assert len(ranks(stack)) == 3 and not ranks(stack) & held
    assert stack.text().count("preload argv") == 2


def test_a_process_that_hangs_is_told_until_it_goes_on(make: MakeHolder) -> None:
    stack = make().serve(*TWO)
    victim = max(ranks(stack) - {launcher(stack)})
    os.kill(victim, signal.SIGSTOP)
    eventually(lambda: (stack.status() or {})["degraded"], "degraded")
    os.kill(victim, signal.SIGCONT)
    eventually(lambda: not (stack.status() or {})["degraded"], "held again")
    assert "weights are held again" in stack.text()
    assert stack.text().count("preload argv") == 1


def test_processes_without_their_launcher_still_hold_and_end_with_the_container(
    make: MakeHolder,
) -> None:
    stack = make().serve(*TWO)
    first = launcher(stack)
    os.kill(first, signal.SIGKILL)
    kill_engine(stack)
    assert stack.wait_ready(starts=2)["mode"] == "ipc_cache"
    assert len(ranks(stack)) == 2 and stack.text().count("preload argv") == 1
    assert stack.stop() == 0
    assert ranks(stack) == set()


def test_another_checkpoint_of_the_same_shape_restarts_the_holder(make: MakeHolder) -> None:
    stack = make().serve(*TWO)
    held = ranks(stack)
    file = stack.folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
    kill_engine(stack)
    assert stack.wait_ready(starts=2)["mode"] == "ipc_cache"
    assert not ranks(stack) & held and len(ranks(stack)) == 3


def test_without_a_holder_the_disk_is_next_and_nothing_of_it_is_left(
    make: MakeHolder, tmp_path: Path
) -> None:
    (tmp_path / "preload-exit").write_text("7")
    stack = make().serve(*TWO)
    status = stack.wait_ready()
    assert status["mode"] == "disk" and codes(stack)["ipc_cache"] == "ipc_cache.holder"
    assert "`vllm preload` ended with 7 before it was ready" in stack.text()
    assert ranks(stack) == set()
    (tmp_path / "preload-exit").unlink()
    kill_engine(stack)
    assert stack.wait_ready(starts=2)["mode"] == "ipc_cache"


def test_a_mode_that_is_named_ends_with_its_code(make: MakeHolder, tmp_path: Path) -> None:
    (tmp_path / "preload-exit").write_text("7")
    stack = make(WARMHOLD_MODE="ipc_cache", WARMHOLD_MAX_FAILURES="2").boot(*TWO)
    assert stack.wait() == 69
    text = stack.text()
    assert text.count("preload argv") == 2 and "engine starting" not in text
    assert "code=engine.failed" in text and "ipc_cache.holder" in text


def test_a_draft_model_has_processes_of_its_own(make: MakeHolder) -> None:
    draft = json.dumps({"model": "d", "method": "eagle", "num_speculative_tokens": 2})
    stack = make().serve("--speculative-config", draft)
    assert stack.wait_ready()["weights"]["loads"] == 2
    assert "mapped from the holder: 2" in stack.text()


def test_an_engine_that_cannot_map_starts_from_disk_without_a_holder_beside_it(
    make: MakeHolder,
) -> None:
    stack = make(FAKE_VLLM_IPC_FAILS="1").serve(*TWO)
    status = stack.wait_ready()
    assert status["mode"] == "disk" and codes(stack)["ipc_cache"] == "ipc_cache.failed"
    assert ranks(stack) == set() and stack.text().count("preload argv") == 1


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_start_waits_for_gpu_memory(
    make: MakeHolder, library: Path, tmp_path: Path, comes_back: bool
) -> None:
    build_fake_nvml(library)
    free = tmp_path / "free"
    free.write_text("0")
    stack = make(
        WARMHOLD_WCACHE="vllm",
        WARMHOLD_GPU_WAIT_S="600" if comes_back else "1",
        FAKE_CUDA_COUNT="1",
        FAKE_NVML_FREE=str(free),
    ).boot()
    eventually(lambda: "waiting for GPU memory" in stack.text(), "the wait")
    if comes_back:
        assert "preload argv" not in stack.text()
        free.write_text(str(200 << 30))
    assert stack.wait_ready()["mode"] == "ipc_cache"
    assert ("GPU memory came back" in stack.text()) == comes_back
    assert ("code=gpu.memory" in stack.text()) != comes_back


def test_one_gpu_keeps_the_vault(make: MakeHolder) -> None:
    stack = make(FAKE_CUDA_COUNT="1").boot("--max-model-len", "64")
    conf = stack.folder / "run" / "supervisord.conf"
    eventually(lambda: conf.exists(), "the configuration")
    assert "program:wcache]" in conf.read_text() and "program:preload]" not in conf.read_text()
