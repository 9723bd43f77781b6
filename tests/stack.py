# SPDX-License-Identifier: Apache-2.0
"""The real PID 1, supervisord and runner around the fake engine, in their own PID namespace."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
FAKES = ROOT / "tests" / "fakes"
PATIENCE_S = 60.0
T = TypeVar("T")


def eventually(question: Callable[[], T | None], what: str, patience_s: float = PATIENCE_S) -> T:
    """Ask until the answer is true; fail with what was waited for."""
    deadline = time.monotonic() + patience_s
    while not (answer := question()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never came: {what}")
        time.sleep(0.05)
    return answer


def write_model(folder: Path) -> Path:
    """A folder that passes for a model: a configuration and one safetensors file of a number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stack:
    """One `warmhold boot` with its folders; every process in it ends with the test."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log"
        self.engine_exit = folder / "engine-exit"
        self.environment = {
            "PATH": f"{FAKES}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(
                str(ROOT / name) for name in ("entrypoint", "snapshot", "wcache")
            ),
            "WARMHOLD_MODEL": str(write_model(folder / "model")),
            "WARMHOLD_STATE_DIR": str(folder / "state"),
            "WARMHOLD_RUN_DIR": str(folder / "run"),
            "WARMHOLD_MODELS_DIR": str(folder / "models"),
            "WARMHOLD_CANARY_INTERVAL_S": "1",
            "WARMHOLD_CANARY_TIMEOUT_S": "2",
            "WARMHOLD_DRAIN_S": "5",
            "WARMHOLD_SNAPSHOT": "manual",
            "FAKE_VLLM_EXIT_FILE": str(self.engine_exit),
            "FAKE_VLLM_TAG": str(self.port),
            **environment,
        }
        self.wrapper: tuple[str, ...] = ()  # what becomes PID 1, to take something from it first
        self._process: subprocess.Popen[bytes] | None = None

    def boot(self, *arguments: str) -> "Stack":
        namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = [
            *self.wrapper,
            sys.executable,
            "-m",
            "warmhold_entrypoint",
            "--port",
            str(self.port),
            *arguments,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*namespace, *command], env=self.environment, stdout=log, stderr=log
            )
        return self

    def serve(self, *arguments: str) -> "Stack":
        self.boot(*arguments)
        self.wait_ready()
        return self

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `warmhold` command beside the stack."""
        return self._run([sys.executable, "-m", "warmhold_entrypoint", *arguments])

    def supervisorctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).with_name("supervisorctl"))
        conf = str(self.folder / "run" / "supervisord.conf")
        return self._run([program, "-c", conf, *arguments])

    def _run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=2 * PATIENCE_S
        )

    @property
    def pid(self) -> int:
        """PID 1 of the stack, as seen from outside."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(eventually(lambda: children.read_text().split(), "PID 1")[0])

    def stop(self) -> int:
        """Ask PID 1 to stop, as `docker stop` does; return the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def status(self) -> dict[str, Any] | None:
        result = self.run("status", "--json")
        return json.loads(result.stdout) if result.returncode == 0 else None

    def wait_ready(self, starts: int = 1) -> dict[str, Any]:
        def ready() -> dict[str, Any] | None:
            if not self.alive():
                raise AssertionError(f"the stack has ended:\n{self.text()[-4000:]}")
            status = self.status()
            return status if status and status["ready"] and status["starts"] >= starts else None

        return eventually(ready, f"ready after {starts} start(s):\n{self.text()[-4000:]}")

    def tree(self) -> dict[int, str]:
        """The engine's processes by PID (seen from outside), told by the engine's group."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                status = (folder / "status").read_text()
                environ = (folder / "environ").read_bytes()
            except OSError:
                continue
            marked = "\nGroups:\t30631 \n" in status and "\nState:\tZ" not in status
            if marked and str(self.folder).encode() in environ:
                found[int(folder.name)] = status
        return found

    def roles(self) -> dict[str, int]:
        """PIDs of front, core and worker, from outside: each is the child of the one before."""
        parents = {pid: _parent(status) for pid, status in self.tree().items()}
        front = next(pid for pid, parent in parents.items() if parent not in parents)
        core = next(pid for pid, parent in parents.items() if parent == front)
        worker = next(pid for pid, parent in parents.items() if parent == core)
        return {"front": front, "core": core, "worker": worker}

    @property
    def runner(self) -> int:
        """PID of the runner, from outside: the parent of the engine's front."""
        return _parent(Path(f"/proc/{self.roles()['front']}/status").read_text())

    def shm_files(self) -> set[str]:
        """This stack's files in /dev/shm, which all stacks of the machine share."""
        return {path.name for path in Path("/dev/shm").glob(f"psm_fake_{self.port}_*")}

    def complete(self) -> Mapping[str, Any]:
        """One completion by plain HTTP."""
        import urllib.request

        body = json.dumps({"model": self.environment["WARMHOLD_MODEL"], "prompt": "x"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return dict(json.load(answer))


def _parent(status: str) -> int:
    return int(status.split("\nPPid:\t")[1].split("\n")[0])


def can_unshare() -> bool:
    return shutil.which("unshare") is not None and os.geteuid() == 0
