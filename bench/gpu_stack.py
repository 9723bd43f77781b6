# SPDX-License-Identifier: Apache-2.0
"""The whole product outside a container, for a machine that has no Docker: `warmhold boot` in a PID
namespace of its own, so that PID 1, supervisord, vault and runner are the real ones."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_client import KEY, Answer, ask_all, wait_answer
from gpu_machine import PACKAGES, wait_until

PORT = 8123


def build_environment(folder: Path, model: str, tools: list[str], **more: str) -> dict[str, str]:
    """Given the folder of everything, the model, the tools and more variables, return the product's
    environment."""
    programs, points = tools
    paths = [*PACKAGES, points, *os.environ.get("PYTHONPATH", "").split(":")]
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
        "WARMHOLD_READY_TIMEOUT_S": "400",
        "WARMHOLD_MAX_FAILURES": "2",
        "WARMHOLD_LOG_LEVEL": "debug",
        **more,
    }


class Stack:
    """One running product with its log; it answers on `port`."""

    def __init__(self, environment: dict[str, str], log: Path, port: int = PORT) -> None:
        self.environment, self.log, self.port = environment, log, port
        self.model = environment["WARMHOLD_MODEL"]
        self.run_dir = Path(environment["WARMHOLD_RUN_DIR"])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: list[str]) -> None:
        """Given vLLM's arguments, boot; nothing is waited for."""
        for name in ("RUN", "STATE", "MODELS"):
            Path(self.environment[f"WARMHOLD_{name}_DIR"]).mkdir(parents=True, exist_ok=True)
        wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = [*wrapper, sys.executable, "-m", "warmhold_entrypoint"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """Ask it to stop, and end it where it does not."""
        if self._process is None:
            return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with suppress(OSError):
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGTERM)
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._process = None

    def run(self, *arguments: str, limit_s: float = 200.0) -> tuple[int, str, str]:
        """Run a command of `warmhold`: status, stdout, stderr."""
        return self._call("warmhold_entrypoint", *arguments, limit_s=limit_s)

    def supervise(self, *arguments: str, limit_s: float = 500.0) -> None:
        """Run a command of supervisorctl, as `start engine`; raise where it fails."""
        conf = str(self.run_dir / "supervisord.conf")
        name = "supervisor.supervisorctl"
        code, out, error = self._call(name, "-c", conf, *arguments, limit_s=limit_s)
        if code:
            raise RuntimeError(f"supervisorctl {arguments}: {code} {out} {error} {self.tail()}")

    def start_engine(self) -> tuple[float, dict[str, Any]]:
        """Start the stopped engine; return the seconds from the call of supervisorctl to the first
        token over HTTP, and the status."""
        starts = self.status().get("starts", 0)
        began = time.monotonic()
        conf = str(self.run_dir / "supervisord.conf")
        command = [sys.executable, "-m", "supervisor.supervisorctl", "-c", conf, "start", "engine"]
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL):
            answered = self.wait_answer()
        return answered - began, self.wait_ready(starts, 60)

    def wait_answer(self) -> float:
        """Return when the first token came over HTTP (monotonic)."""
        answered = wait_answer(self.port, self.model, 400, lambda: self.is_running)
        if answered is None:
            raise RuntimeError(f"no answer: {self.status()} {self.tail()}")
        return answered

    def ask_all(self) -> list[Answer]:
        """The answers to all prompts."""
        return ask_all(self.port, self.model)

    @property
    def is_running(self) -> bool:
        """Whether it was booted, and goes on."""
        return self._process is not None and self._process.poll() is None

    def status(self) -> dict[str, Any]:
        """The runner's status, {} where it does not answer."""
        from warmhold_entrypoint.reporting.status import ask_status

        return ask_status(self.run_dir, 5.0) or {}

    def wait_ready(self, starts: int, limit_s: float) -> dict[str, Any]:
        """Wait for so many starts and readiness; raise where it does not come."""

        def ready() -> dict[str, Any] | None:
            if self._process is not None and self._process.poll() is not None:
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
        wanted = str(self.status()["pid"])
        namespace = self._namespace()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if str((folder / "ns/pid").readlink()) != namespace:
                    continue
                status = (folder / "status").read_text(errors="replace")
            except OSError:
                continue
            numbers = status.partition("\nNSpid:")[2].partition("\n")[0].split()
            if len(numbers) > 1 and numbers[-1] == wanted:
                return int(folder.name)
        raise RuntimeError(f"no process {wanted} in the namespace")

    def tail(self, count: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def _namespace(self) -> str:
        assert self._process is not None
        return str(Path(f"/proc/{self._process.pid}/ns/pid_for_children").readlink())

    def _call(self, module: str, *arguments: str, limit_s: float) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr
