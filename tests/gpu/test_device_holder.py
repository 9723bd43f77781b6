# SPDX-License-Identifier: Apache-2.0
"""The whole product on one GPU or two, outside a container: upstream's `vllm preload` holds the
weights.

Tensor parallel over the GPUs that there are, two at most, a random 1 GB Llama, eager. The tests
share one stack and follow each other: it serves, its engine is killed and comes back from the same
holder, its holder is killed and comes back with the next engine, it ends and leaves nothing. What
fails prints the log's ends.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_stand import MIB, ROOT, say

START_S, RESTART_S, LOOK_S, TELL_S = 330.0, 200.0, 60.0, 5.0
SLACK_MIB = 512
# NVLink multicast can put a host's GPUs out of service, which others share: never used here.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
HOLDER_MARK = "30632"


def used_mib() -> list[int]:
    """MiB in use on each GPU, of two at most, by whomever; [] without any."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [int(word) for word in done.stdout.split()[:2]] if done.returncode == 0 else []


GPUS = len(used_mib())
ARGUMENTS = [
    *("--tensor-parallel-size", str(GPUS), "--max-model-len", "1024", "--enforce-eager"),
    *("--gpu-memory-utilization", "0.2", "--disable-custom-all-reduce"),
]
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
# What one test saw, for those after it.
seen: dict[str, Any] = {}


class Held:
    """The running stack, with its folder and what its tests ask."""

    def __init__(self, folder: Path) -> None:
        sys.path[:0] = [str(ROOT / name) for name in ("bench", "entrypoint", "snapshot", "wcache")]
        import gpu_machine
        import gpu_stack

        model = folder / "model"
        began = time.monotonic()
        script = ROOT / "bench" / "gpu_model.py"
        subprocess.run([sys.executable, str(script), str(model), "1gb"], check=True, timeout=200)
        files = sum(path.stat().st_size for path in model.iterdir())
        say(f"model of {files // MIB} MiB in {time.monotonic() - began:.1f} s")
        self.weights_bytes = files
        environment = gpu_stack.build_environment(
            folder,
            str(model),
            gpu_machine.prepare_tools(folder / "tools", None),
            WARMHOLD_WCACHE="auto" if GPUS > 1 else "vllm",
            CUDA_VISIBLE_DEVICES=",".join(map(str, range(GPUS))),
            WARMHOLD_READY_TIMEOUT_S=str(START_S),
            WARMHOLD_MAX_FAILURES="1",
            WARMHOLD_CANARY_INTERVAL_S="3",
            WARMHOLD_GPU_WAIT_S="30",
            **NO_MULTICAST,
        )
        self.folder, self.log = folder, folder / "stack.log"
        self.log.touch()
        self.stack = gpu_stack.Stack(environment, self.log)
        self.sockets = folder / "run" / "holder"

    def holder(self) -> dict[int, str]:
        """The holder's processes by PID, told by their mark."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                for line in (entry / "status").read_text().splitlines():
                    if line.startswith("Groups:") and HOLDER_MARK in line.split():
                        found[int(entry.name)] = (entry / "comm").read_text().strip()
        return found

    def wait(
        self, question: Callable[[dict[str, Any]], Any], what: str, limit_s: float
    ) -> dict[str, Any]:
        """Ask the status until the answer is true, and say how it goes; fail after the limit, or as
        soon as the stack has ended or its holder was given up."""
        began, said, shown = time.monotonic(), -TELL_S, ""
        while True:
            status = self.stack.status()
            now = time.monotonic() - began
            line = f"{status.get('state')} {status.get('phase') or ''} {status.get('reason')}"
            if line != shown or now - said > 4 * TELL_S:
                say(f"[{now:5.1f}] {line}; holder {len(self.holder())}; used {used_mib()} MiB")
                said, shown = now, line
            if status and question(status):
                return status
            codes = [item["code"] for item in status.get("rejections", [])]
            assert not any(code.startswith("ipc_cache.") for code in codes), status["rejections"]
            assert self.stack.is_running, "the stack ended"
            assert now < limit_s, f"not within {limit_s:.0f} s: {what}: {status}"
            time.sleep(0.5)

    def wait_ready(self, starts: int, limit_s: float) -> dict[str, Any]:
        """Wait for so many starts and readiness."""
        return self.wait(
            lambda status: status["ready"] and status["starts"] >= starts,
            f"ready after {starts} start(s)",
            limit_s,
        )

    def held_bytes(self) -> list[int | None]:
        """What each process of the holder says that it holds."""
        from warmhold_entrypoint.weight_cache.ranks import ask_ranks

        return list(ask_ranks(self.sockets, GPUS, 10.0).by_socket.values())

    def tell(self) -> None:
        """Print the ends of the log: warmhold's and supervisord's own lines, the holder's, all."""
        lines = self.log.read_text(errors="replace").splitlines()
        ours = [line for line in lines if " warmhold." in line or "WARN" in line[:40]]
        loud = [line for line in lines if "ERROR" in line or "Error" in line or "Traceback" in line]
        holder = [line for line in lines if "eight cache" in line or "weight_cache" in line]
        parts = {"warmhold and supervisord": ours[-50:], "errors": loud[-40:]}
        parts |= {"holder": holder[-30:], "everything": lines[-150:]}
        for name, part in parts.items():
            print(f"==== {name}", flush=True)
            for line in part:
                print(f"   | {line[:400]}", flush=True)
        print("==== status", self.stack.status(), flush=True)
        print("==== holder", self.holder(), "used", used_mib(), flush=True)


@pytest.fixture(scope="module")
def stand() -> Iterator[Held]:
    folder = Path("/tmp/wh2")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made = Held(folder)
    yield made
    made.stack.stop()
    out = os.environ.get("OUT")
    if out:
        shutil.copy(made.log, Path(out) / "holder.log")


@pytest.fixture
def told(stand: Held) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """A context in which a failure prints the log's ends."""

    @contextlib.contextmanager
    def telling() -> Iterator[None]:
        try:
            yield
        except BaseException:
            stand.tell()
            raise

    yield telling


def test_it_serves_from_the_holder(stand: Held, told: Any) -> None:
    seen["before"] = used_mib()
    with told():
        began = time.monotonic()
        stand.stack.start(ARGUMENTS)
        status = stand.wait_ready(1, START_S)
        say(f"ready after {time.monotonic() - began:.1f} s: {status['phases']}")
        say(f"weights {status['weights']}")
        assert status["mode"] == "ipc_cache", status["rejections"]
        held = stand.held_bytes()
        say(f"held {held}, holder {stand.holder()}, used {used_mib()} MiB")
        assert len(held) == GPUS and all(held)
        # Of two each has its half; norms and such are whole on both.
        assert (
            0.9 * stand.weights_bytes < sum(size or 0 for size in held) < 1.3 * stand.weights_bytes
        )
        seen["answers"] = stand.stack.ask_all()
        seen["holder"], seen["held"] = set(stand.holder()), held
        seen["used"] = used_mib()
        assert len(seen["holder"]) >= GPUS


def test_snapshots_say_why_they_do_not_apply(stand: Held, told: Any) -> None:
    assert "answers" in seen, "it does not serve"
    with told():
        against = {item["mode"]: item["code"] for item in stand.stack.status()["rejections"]}
        assert against == {"snapshot": "snapshot.backend"}
        code, out, error = stand.stack.run("snapshot-create", limit_s=60)
        say(f"snapshot-create ended with {code}: {(out + error).strip()}")
        assert code == 73 and "snapshot.backend" in error
        assert stand.stack.status()["ready"]


def test_a_killed_engine_comes_back_from_the_same_holder(stand: Held, told: Any) -> None:
    assert "answers" in seen, "it does not serve"
    with told():
        say(f"in /dev/shm {shared_files()}")
        began = time.monotonic()
        stand.stack.kill_engine()
        lows = used_mib()
        while time.monotonic() - began < 6.0:  # a new engine imports for longer than that
            lows = [min(pair) for pair in zip(lows, used_mib(), strict=True)]
            time.sleep(0.25)
        say(f"used {seen['before']} before all, {seen['used']} serving, {lows} without an engine")
        say(f"in /dev/shm {shared_files()}")
        for before, low, size in zip(seen["before"], lows, seen["held"], strict=True):
            assert low - before >= size // MIB, "the holder has its weights"
        status = stand.wait_ready(2, RESTART_S)
        say(f"answered again after {time.monotonic() - began:.1f} s: {status['phases']}")
        assert status["mode"] == "ipc_cache" and status["degraded"] == ""
        assert set(stand.holder()) == seen["holder"] and stand.held_bytes() == seen["held"]
        answers = stand.stack.ask_all()
        equal = sum(now == then for now, then in zip(answers, seen["answers"], strict=True))
        say(f"{equal} of {len(answers)} answers equal with their log-probabilities")
        tokens = [[token for token, _ in answer] for answer in answers]
        assert tokens == [[token for token, _ in answer] for answer in seen["answers"]]
        now = used_mib()
        say(f"used {seen['used']} MiB at the first engine, {now} at the second")
        for first, second in zip(seen["used"], now, strict=True):
            assert second < first + SLACK_MIB, "nothing is there twice"
        seen["again"] = True


def test_a_holder_that_dies_comes_back_with_the_engine(stand: Held, told: Any) -> None:
    assert "again" in seen, "it did not come back"
    with told():
        pids = [pid for pid in seen["holder"] if is_rank(pid, stand.sockets)]
        say(f"ranks {pids} of {stand.holder()}")
        assert len(pids) == GPUS
        engine = stand.stack.status()["pid"]
        os.kill(pids[-1], signal.SIGKILL)
        status = stand.wait(lambda status: status["degraded"], "degraded", LOOK_S)
        say(f"degraded: {status['degraded']}")
        assert status["ready"] and status["pid"] == engine
        assert stand.stack.ask_all() == stand.stack.ask_all()
        stand.stack.kill_engine()
        status = stand.wait_ready(3, START_S)
        assert status["mode"] == "ipc_cache" and status["degraded"] == ""
        assert not set(stand.holder()) & seen["holder"]
        now = used_mib()
        say(f"used {seen['used']} MiB at the first engine, {now} with a new holder")
        for first, second in zip(seen["used"], now, strict=True):
            assert second < first + SLACK_MIB, "nothing is there twice"


def test_it_ends_and_leaves_nothing(stand: Held, told: Any) -> None:
    assert "answers" in seen, "it does not serve"
    with told():
        stand.stack.stop()
        deadline = time.monotonic() + 30
        while stand.holder() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert stand.holder() == {}
        limits = [before + 64 for before in seen["before"]]
        now = used_mib()
        while not fits(now, limits) and time.monotonic() < deadline:
            time.sleep(0.5)
            now = used_mib()
        say(f"used {seen['before']} MiB before all, {now} after")
        assert fits(now, limits)


def shared_files() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").iterdir())


def fits(used: list[int], limits: list[int]) -> bool:
    return all(now <= limit for now, limit in zip(used, limits, strict=True))


def is_rank(pid: int, sockets: Path) -> bool:
    """Whether a process holds the lock beside one of the holder's sockets."""
    with contextlib.suppress(OSError):
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return any(link.startswith(str(sockets)) and link.endswith(".lock") for link in links)
    return False
