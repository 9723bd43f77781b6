# SPDX-License-Identifier: Apache-2.0
"""A vault, child processes and readings of GPU memory, for the tests on a GPU machine."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
CHILDREN = ROOT / "tests" / "gpu"
MIB = 1 << 20
# What a reading of GPU memory may be off by: contexts come and go in pieces.
SLACK_BYTES = 96 * MIB
# One GPU is used, by its index; nvidia-smi does not know CUDA's variable.
GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
CRIU = os.environ.get("WARMHOLD_GPU_TEST_CRIU", "")
PATIENCE_S = 240.0


def say(text: str) -> None:
    """Print what was seen, at once: the run's output is its report."""
    print(f"     {text}", flush=True)


def used_bytes() -> int:
    """Bytes of the GPU's memory that are in use, by whomever."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", GPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return int(done.stdout) * MIB


def wait_for_used(right: Callable[[int], bool], limit_s: float = 15.0) -> int:
    """Wait until the bytes in use are right, or the limit; return them."""
    deadline = time.monotonic() + limit_s
    while not right(used := used_bytes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return used


def near(wanted: int) -> Callable[[int], bool]:
    """What `wait_for_used` waits for: as many bytes as wanted."""
    return lambda used: abs(used - wanted) <= SLACK_BYTES


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: our packages, and their entry points for vLLM."""
    ours = [str(ROOT / name) for name in ("entrypoint", "snapshot", "wcache", "tests")]
    paths = [*ours, str(_entry_points()), *os.environ.get("PYTHONPATH", "").split(":")]
    paths = list(dict.fromkeys(filter(None, paths)))
    return {**os.environ, "PYTHONPATH": ":".join(paths), "PYTHONFAULTHANDLER": "1", **more}


class Child:
    """A script beside the tests, which says a JSON line at each stage and waits for an order."""

    def __init__(self, script: str, *arguments: str, **more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILDREN / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**more),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("SAYS "):
                self._lines.put(line[5:])
            else:
                print(f"     | {line}", end="", flush=True)
        self._lines.put("")

    def hear(self, limit_s: float = 90.0) -> Any:
        """What it says next; fail where it says nothing in time, or has ended."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.process.send_signal(signal.SIGABRT)  # it says where it is
            self.process.wait(10)
            raise AssertionError(f"nothing was said within {limit_s} s") from None
        assert line, f"the child ended with {self.process.wait(10)}"
        return json.loads(line)

    def go_on(self, limit_s: float = 90.0) -> Any:
        """Let it take its next step, and return what it says then."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear(limit_s)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)


class Vault:
    """The real vault in a process of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warmhold-gpu-"))
        self.socket = self.folder / "wcache.sock"
        command = [sys.executable, "-m", "warmhold_wcache.serve", "--socket", str(self.socket)]
        self.process = subprocess.Popen(command, env=environment())
        deadline = time.monotonic() + 20
        while not self.socket.exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def stop(self) -> None:
        """SIGTERM."""
        self.process.terminate()
        self.process.wait(20)

    def drop_all(self) -> None:
        """Give up whatever is resident."""
        from warmhold_wcache.client import VaultClient

        with VaultClient(self.socket) as client:
            for row in client.stat():
                client.drop(row["id"], force=True)


@contextmanager
def running_stack(name: str, size: str, arguments: list[str]) -> Iterator[Any]:
    """The whole product without a container (bench/gpu_stack.py), whose engine serves a random
    model of that size, with the criu that WARMHOLD_GPU_TEST_CRIU names."""
    sys.path[:0] = [str(ROOT / part) for part in ("bench", "entrypoint", "snapshot", "wcache")]
    import gpu_machine
    import gpu_stack

    folder, criu = Path(f"/tmp/warmhold-{name}"), Path(CRIU).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    model, script = folder / "model", ROOT / "bench" / "gpu_model.py"
    subprocess.run([sys.executable, str(script), str(model), size], check=True, timeout=200)
    tools = gpu_machine.prepare_tools(folder / "tools", criu)
    gpu_machine.describe_machine(tools, criu)  # where a right is missing it makes do
    more = {"CRIU_CUDA_PLUGIN_DIR": str(criu / "plugins"), "CUDA_VISIBLE_DEVICES": GPU}
    more |= {"WARMHOLD_GPU_WAIT_S": "10"}
    environment = gpu_stack.build_environment(folder, str(model), tools, **more)
    made = gpu_stack.Stack(environment, folder / "log", 8125)
    try:
        made.start(arguments)
        made.wait_ready(1, PATIENCE_S)
        yield made
    finally:
        made.stop()
        if os.environ.get("OUT"):
            shutil.copy(made.log, Path(os.environ["OUT"]) / f"{name}.log")
        shutil.rmtree(folder, ignore_errors=True)


def tell(value: object) -> None:
    """In a child: say a stage's result."""
    print("SAYS " + json.dumps(value), flush=True)


def tell_and_wait(value: object) -> None:
    """In a child: say it, and wait for the order to go on."""
    tell(value)
    sys.stdin.readline()


def _entry_points() -> Path:
    """A folder where vLLM finds the plug-in as if it were installed."""
    folder = Path(tempfile.gettempdir()) / "warmhold-gpu-entry-points"
    record = folder / "warmhold-0.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: warmhold\nVersion: 0\n")
    (record / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwarmhold = warmhold_wcache.vllm_plugin:register\n"
    )
    return folder
