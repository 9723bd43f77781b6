# SPDX-License-Identifier: Apache-2.0
"""vLLM alone, as its users start it: `vllm serve`, from disk or with `--load-format ipc_cache` on
the weights of `vllm preload`, and `vllm snapshot create`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from shlex import join
from typing import Any

from gpu_client import KEY, Answer, ask_all, wait_answer
from gpu_machine import used_mib, wait_until

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
# `vllm snapshot create` wants its processes gone when they have ended, and their numbers are to be
# free for the restore: a PID namespace whose first process, a shell, reaps.
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
REVISION = "0123456789abcdef0123456789abcdef01234567"


class Upstream:
    """vLLM's programs for one model on one GPU; each ends with `stop`, or with the block."""

    def __init__(self, folder: Path, model: str, gpu: int, port: int) -> None:
        self.model, self.gpu, self.port = model, gpu, port
        self.sockets = folder / "sockets"
        self.sockets.mkdir(parents=True, exist_ok=True)
        self.log = folder / "upstream.log"
        self._running: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        }

    @property
    def is_warm(self) -> bool:
        """Whether its compile caches are filled."""
        return any(Path(self.environment["VLLM_CACHE_ROOT"]).glob("torch_compile_cache/*"))

    def serve(self, arguments: list[str], cached: bool = False) -> float:
        """Given vLLM's arguments, serve, from the weights of `preload` where `cached`; return the
        seconds from the process's start to its first token over HTTP. It goes on running."""
        command = [*VLLM, "serve", self.model, "--port", str(self.port), "--api-key", KEY]
        if cached:
            extra = {"socket_dir": str(self.sockets), "fallback": False}
            command += ["--load-format", "ipc_cache"]
            command += ["--model-loader-extra-config", json.dumps(extra)]
        began = time.monotonic()
        process = self._spawn([*command, *arguments])
        answered = wait_answer(self.port, self.model, 400, lambda: process.poll() is None)
        if answered is None:
            raise RuntimeError(f"no answer: {self.tail()}")
        return answered - began

    def preload(self, arguments: list[str]) -> float:
        """Given vLLM's arguments, hold the weights; return the seconds until they are there."""
        port = self.port + 1000
        address = f"http://127.0.0.1:{port}/health"
        command = [*VLLM, "preload", "--model", self.model, *arguments]
        command += ["--weight-cache-socket-dir", str(self.sockets)]
        command += ["--weight-cache-health-host", "127.0.0.1"]
        command += ["--weight-cache-health-port", str(port)]
        began = time.monotonic()
        process = self._spawn(command)

        def healthy() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"it ended: {self.tail()}")
            try:
                with urllib.request.urlopen(address, timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        if not wait_until(healthy, 300, 0.1):
            raise RuntimeError(f"not healthy: {self.tail()}")
        return time.monotonic() - began

    def snapshot(self, folder: Path, arguments: list[str], plugins: Path) -> dict[str, Any]:
        """Given a folder and vLLM's arguments, let vLLM make a snapshot of the model, which it
        takes only as one of the hub with a revision, and restore it. Return its exit code, what it
        said last, and where it came so far, seconds: `create_s`, and `first_token_s` from the
        restore's start to the first token over HTTP."""
        hub, artifact = folder / "hub" / "models--bench--model", folder / "artifact"
        place = hub / "snapshots" / REVISION
        folder.mkdir(mode=0o700)  # upstream wants that of an artifact's folder
        place.mkdir(parents=True)
        for path in Path(self.model).iterdir():
            (place / path.name).symlink_to(path)
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text(REVISION)
        more = {"HF_HUB_CACHE": str(folder / "hub"), "CRIU_CUDA_PLUGIN_DIR": str(plugins)}
        self.environment |= {**more, "UV_USE_IO_URING": "0"}  # rings cannot be dumped
        create = [*VLLM, "snapshot", "create", "bench/model", "--revision", REVISION]
        create += ["--snapshot-dir", str(artifact), *arguments]
        restore = [*VLLM, "snapshot", "restore", str(artifact), "--port", str(self.port)]
        code = folder / "code"
        text = f"{join(create)}; c=$?; echo $c >{code}.new; mv {code}.new {code}; "
        text += f"[ $c = 0 ] || exit $c; {join(restore)}; exit $?"
        since = self.log.stat().st_size if self.log.exists() else 0
        began = time.monotonic()
        process = self._spawn([*NAMESPACE, text])
        wait_until(lambda: code.exists() or process.poll() is not None, 240)
        if not code.exists():
            raise RuntimeError(f"no snapshot: {self.tail()}")
        created = time.monotonic()
        found: dict[str, Any] = {"code": int(code.read_text()), "create_s": created - began}
        if found["code"] == 0:
            sizes = [path.stat().st_size for path in artifact.rglob("*") if path.is_file()]
            found["artifact_bytes"] = sum(sizes)
            answered = wait_answer(self.port, "bench/model", 100, lambda: process.poll() is None)
            if answered is not None:
                found["first_token_s"] = round(answered - created, 3)
        found["said"] = self.log.read_bytes()[since:].decode(errors="replace").splitlines()[-6:]
        return found

    def answers(self) -> list[Answer]:
        """The answers to all prompts."""
        return ask_all(self.port, self.model)

    def stop(self, keep: int = 0) -> None:
        """End all programs but the first `keep`, and wait until the GPU has their memory back."""
        while len(self._running) > keep:
            process = self._running.pop()
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(15)
                    break
                except subprocess.TimeoutExpired:
                    continue
                except ProcessLookupError:
                    break
        last = -1
        while (now := used_mib(self.gpu)) != last:  # until it does not fall any more
            last = now
            time.sleep(0.5)

    def tail(self, count: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def _spawn(self, command: list[str]) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.append(process)
        return process
