# SPDX-License-Identifier: Apache-2.0
"""The whole product outside a container, for a machine that has no Docker: `warmhold boot` in a PID
namespace of its own, or the vault and the runner beside each other in this one.

The image's programs (vllm, criu, cuda-checkpoint) are put on PATH where the machine has none.
"""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEY = "secret"
PORT = 8123
MIB = 1 << 20
PROMPTS = [[(7 * i + j) % 1000 + 3 for j in range(8)] for i in range(20)]


def used_mib() -> int:
    """MiB of the GPU that are in use, by whomever; 0 without a GPU."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return int(done.stdout.split()[0]) if done.returncode == 0 else -1


def wait_until(question: Callable[[], Any], limit_s: float, poll_s: float = 0.02) -> Any:
    """Ask until the answer is true; return it, or None when the limit is reached."""
    deadline = time.monotonic() + limit_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return answer or None


def prepare_tools(folder: Path, criu: Path | None) -> list[str]:
    """Given a folder, and one with criu (as `criu`, `plugins/cuda_plugin.so`), put programs there
    that are not on PATH; return what goes before PATH and PYTHONPATH: programs, entry points."""
    programs, points = folder / "bin", folder / "points"
    programs.mkdir(parents=True, exist_ok=True)
    points.mkdir(exist_ok=True)
    if not shutil.which("vllm"):
        text = f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n'
        _write_program(programs / "vllm", text)
    if criu is not None:
        _write_program(programs / "criu", f'#!/bin/sh\nexec {criu.resolve()}/criu "$@"\n')
    source = (ROOT / "snapshot" / "warmhold_snapshot" / "cuda_checkpoint.py").read_text()
    body = source.partition("\n")[2]
    _write_program(programs / "cuda-checkpoint", f"#!{sys.executable} -IS\n{body}")
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "warmhold" not in {point.name for point in found}:
        record = points / "warmhold-0.dist-info"
        record.mkdir(exist_ok=True)
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: warmhold\nVersion: 0\n")
        (record / "RECORD").write_text("")
        plugin = "warmhold_wcache.vllm_plugin"
        (record / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\nwarmhold = {plugin}:register\n"
            f"[vllm.endpoint_plugins]\nwarmhold = {plugin}.control:ControlPlugin\n"
        )
    return [str(programs), str(points)]


def build_environment(folder: Path, model: str, tools: list[str], **more: str) -> dict[str, str]:
    """Given the folder of everything, the model and the tools, return the product's environment."""
    programs, points = tools
    ours = [str(ROOT / name) for name in ("entrypoint", "snapshot", "wcache")]
    paths = [*ours, points, *os.environ.get("PYTHONPATH", "").split(":")]
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "WARMHOLD_MODEL": model,
        "WARMHOLD_STATE_DIR": str(folder / "state"),
        "WARMHOLD_RUN_DIR": str(folder / "run"),
        "WARMHOLD_MODELS_DIR": str(folder / "models"),
        "WARMHOLD_API_KEY": KEY,
        "WARMHOLD_SNAPSHOT": "manual",
        "WARMHOLD_DRAIN_S": "5",
        "WARMHOLD_READY_TIMEOUT_S": "150",
        "WARMHOLD_MAX_FAILURES": "2",
        "WARMHOLD_LOG_LEVEL": "debug",
        **more,
    }


class Stack:
    """One running product with its log. `model` is the name that clients ask for."""

    def __init__(self, environment: dict[str, str], log: Path, namespace: bool) -> None:
        self.environment, self.log = environment, log
        self.model = environment["WARMHOLD_MODEL"]
        self.run_dir = Path(environment["WARMHOLD_RUN_DIR"])
        self._namespace = namespace
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: list[str]) -> None:
        """Given vLLM's arguments, boot; nothing is waited for but the vault."""
        for name in ("RUN", "STATE", "MODELS"):
            Path(self.environment[f"WARMHOLD_{name}_DIR"]).mkdir(parents=True, exist_ok=True)
        arguments = ["--port", str(PORT), *arguments]
        if self._namespace:
            wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
            self._spawn([*wrapper, sys.executable, "-m", "warmhold_entrypoint", *arguments])
            return
        socket = self.run_dir / "wcache.sock"
        self._spawn([sys.executable, "-m", "warmhold_wcache.serve", "--socket", str(socket)])
        wait_until(socket.exists, 20)
        (self.run_dir / "command.json").write_text(json.dumps({"command": arguments}))
        code = (
            "import os; from pathlib import Path; from warmhold_snapshot.artifact import Store; "
            "Store(Path(os.environ['WARMHOLD_STATE_DIR']) / 'snapshots')"
        )
        subprocess.run([sys.executable, "-c", code], env=self.environment, check=False, timeout=30)
        self._spawn([sys.executable, "-m", "warmhold_entrypoint.engine"])

    def stop(self) -> None:
        """Ask it to stop, and end it where it does not."""
        for process in reversed(self._processes):
            if self._namespace:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                with suppress(OSError):
                    for pid in children.read_text().split():
                        os.kill(int(pid), signal.SIGTERM)
            else:
                process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
        self._processes.clear()

    def run(self, *arguments: str, limit_s: float = 150.0) -> tuple[int, str, str]:
        """Run a command of `warmhold`: status, stdout, stderr."""
        command = [sys.executable, "-m", "warmhold_entrypoint", *arguments]
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def status(self) -> dict[str, Any]:
        """The runner's status, {} where it does not answer."""
        from warmhold_entrypoint.status import ask_status

        return ask_status(self.run_dir, 5.0) or {}

    def wait_ready(self, starts: int, limit_s: float) -> dict[str, Any]:
        """Wait for so many starts and readiness; raise where it does not come."""

        def ready() -> dict[str, Any] | None:
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"the stack has ended: {self.tail()}")
            status = self.status()
            return status if status and status["ready"] and status["starts"] >= starts else None

        found = wait_until(ready, limit_s, 0.1)
        if found is None:
            raise RuntimeError(f"not ready within {limit_s} s: {self.status()} {self.tail()}")
        return dict(found)

    def kill_engine(self) -> None:
        """SIGKILL the engine's first process."""
        os.kill(self.engine_pid(), signal.SIGKILL)

    def engine_pid(self) -> int:
        """The engine's first process, as this process sees it."""
        return self._outside(int(self.status()["pid"]))

    def tail(self, count: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def ask(self, prompt: list[int], count: int, limit_s: float = 60.0) -> list[list[Any]]:
        """A greedy completion over HTTP, with the key: tokens with their log-probabilities."""
        body = {
            **{"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0},
            **{"logprobs": 0, "ignore_eos": True, "return_tokens_as_token_ids": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310
            found = json.load(answer)["choices"][0]["logprobs"]
        pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
        return [[token, logprob] for token, logprob in pairs]

    def ask_all(self) -> list[list[list[Any]]]:
        """Every prompt, one after the other, 16 tokens each."""
        return [self.ask(prompt, 16) for prompt in PROMPTS]

    def wait_answer(self, limit_s: float) -> float | None:
        """Ask for one token until it comes; return when that was (monotonic)."""

        def answered() -> float | None:
            try:
                self.ask(PROMPTS[0], 1, 10.0)
            except (OSError, urllib.error.URLError, ValueError):
                return None
            return time.monotonic()

        found = wait_until(answered, limit_s, 0.01)
        return None if found is None else float(found)

    def _spawn(self, command: list[str]) -> None:
        with self.log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _outside(self, pid: int) -> int:
        """A PID of the stack as this process sees it."""
        if not self._namespace:
            return pid
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                status = (folder / "status").read_text(errors="replace")
            except OSError:
                continue
            numbers = status.partition("\nNSpid:")[2].partition("\n")[0].split()
            if len(numbers) > 1 and numbers[-1] == str(pid):
                return int(folder.name)
        raise RuntimeError(f"no process {pid} in the namespace")


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
