# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` within one container, and requests to it, for the checks beside it."""

import http.client
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from stand import MODEL

PORT = 8123
KEY = "k"
START_S = 600.0


class Server:
    """One engine with its control socket and a log file; ends with `stop`."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warmhold-serve-"))
        self.control = self.folder / "control.sock"
        self.log_path = self.folder / "log"
        command = [
            *("vllm", "serve", MODEL, "--enforce-eager", "--api-key", KEY, "--port", str(PORT)),
            *("--kv-cache-memory-bytes", "268435456", "--max-model-len", "512", *arguments),
        ]
        named = {"VLLM_PLUGINS": "warmhold", "WARMHOLD_CONTROL_SOCKET": str(self.control)}
        began = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **named, **(environ or {})}
            )
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() - began > START_S:
                self.stop()
                raise RuntimeError(self.log()[-6000:])
            time.sleep(0.2)
        self.start_s = time.monotonic() - began

    def answers(self) -> bool:
        try:
            return self.http("GET", "/health")[0] == 200
        except OSError:
            return False

    def http(
        self, method: str, path: str, body: object = None, key: str | None = KEY
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, headers in lower case, body."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300)
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            seen = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, seen, answer.read()
        finally:
            connection.close()

    def complete(self, prompt: list[int] | str, count: int, **more: Any) -> tuple[int, Any]:
        """A greedy completion: status, and its tokens with their log-probabilities."""
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 0, **more}
        status, _, data = self.http("POST", "/v1/completions", {"model": MODEL, **body})
        if status != 200:
            return status, data
        logprobs = json.loads(data)["choices"][0]["logprobs"]
        return status, [*zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(120)


def tree(pid: int) -> list[int]:
    """A process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def count_mapped_segments(pid: int) -> int:
    """How many mappings of the vault's weights the processes of a tree have."""
    count = 0
    for each in tree(pid):
        try:
            lines = Path(f"/proc/{each}/maps").read_text().splitlines()
        except OSError:
            continue
        count += sum("memfd:weights" in line or "memfd:warmhold" in line for line in lines)
    return count


def count_sockets(path: Path) -> int:
    """How many sockets of this network namespace are bound to a path: the listening one, and one
    for each connection."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(f" {path}") for line in lines)
