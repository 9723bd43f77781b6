# SPDX-License-Identifier: Apache-2.0
"""A container under test: its commands, its log, its status, its processes."""

import io
import json
import re
import ssl
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.models.containers import Container
from stack import eventually
from testcontainers.compose import DockerCompose

from docker import DockerClient

PATIENCE_S = 600.0
EAGER = ["--enforce-eager", "--max-model-len", "512"]
# Starts of the real engine by stack, once the stack has been taken down.
REAL_STARTS: dict[str, int] = {}


@dataclass(frozen=True)
class Kill:
    """One kill that was survived: who, the restart in seconds, private memory in MiB."""

    kind: str
    total_s: float
    before: int
    after: int


KILLS: list[Kill] = []
PROMPTS = (
    *("The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time"),
    *("The three primary colours are", "In 1969 the first", "SELECT name FROM", "Dear Sir or"),
    *("My favourite food is", "The opposite of cold is", "To be or not to be,", "A triangle has"),
    *("The largest planet is", "import numpy as", "One, two, three,", "Bonjour, je"),
    *("She opened the door and", "HTTP status 404 means", "Gold is", "The sun rises in the"),
)
# The tree's members and their rights, read inside, where PIDs mean the same as in the log.
_TREE = """
import json, pathlib
found = {}
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        lines = (folder / "status").read_text().splitlines()
        status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
        command = (folder / "cmdline").read_bytes().replace(b"\\0", b" ").decode().strip()
    except (OSError, ValueError):
        continue
    if "30631" in status["Groups"].split() and not status["State"].startswith("Z"):
        found[folder.name] = {**status, "command": command}
print(json.dumps(found))
"""


class Box:
    """One container."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def run(self, *argv: str, user: str = "") -> tuple[int, str]:
        """Execute in the container as `docker exec` does; return exit code and output."""
        result = self.container.exec_run(list(argv), user=user)
        return int(result.exit_code), result.output.decode(errors="replace")

    def log(self) -> str:
        return str(self.container.logs().decode(errors="replace"))

    def status(self) -> dict[str, Any] | None:
        code, text = self.run("warmhold", "status", "--json")
        # Docker waits 2 s for the last words of a command; on a busy machine they can be lost.
        return json.loads(text) if code == 0 and text else None

    def wait_ready(self, starts: int = 1) -> dict[str, Any]:
        def ready() -> dict[str, Any] | None:
            self.container.reload()
            assert self.container.status == "running", self.log()[-4000:]
            status = self.status()
            return status if status and status["ready"] and status["starts"] >= starts else None

        return eventually(ready, f"ready after start {starts}", PATIENCE_S)

    def wait_end(self) -> int:
        """Wait until the container has ended for good; return its exit code."""

        def ended() -> bool:
            self.container.reload()
            return self.container.status == "exited"

        eventually(ended, "the container's end", PATIENCE_S)
        return int(self.container.attrs["State"]["ExitCode"])

    def tree(self) -> dict[int, dict[str, str]]:
        """The engine's processes by PID: the fields of /proc/PID/status, and the command line."""
        code, text = self.run("python3", "-c", _TREE)
        assert code == 0, text
        return {int(pid): fields for pid, fields in json.loads(text).items()}

    def mappings(self, word: str) -> set[tuple[str, str]]:
        """Rights and names of what the engine's processes map, where the name holds a word."""
        script = "cat " + " ".join(f"/proc/{pid}/maps" for pid in self.tree())
        code, text = self.run("sh", "-c", script)
        assert code == 0, text
        lines = [line.split(None, 5) for line in text.splitlines() if word in line]
        return {(fields[1], fields[5]) for fields in lines}

    def vault(self) -> list[dict[str, Any]]:
        """What the vault holds, by its own command; one that is being restarted is waited for."""

        def ask() -> str:
            code, text = self.run("wcache", "status", "--json")
            return text if code == 0 else ""

        return list(json.loads(eventually(ask, "the vault's answer")))

    def shm_files(self) -> list[str]:
        return self.run("ls", "/dev/shm")[1].split()

    def anonymous_bytes(self) -> int:
        """Private memory of the whole container, as its cgroup counts it."""
        stats = self.container.stats(stream=False)["memory_stats"]["stats"]
        return int(stats["anon"] if "anon" in stats else stats["total_rss"])

    def state(self) -> dict[str, Any]:
        self.container.reload()
        return dict(self.container.attrs["State"])

    def bad_lines(self) -> list[str]:
        """Our own warnings and errors, and vLLM's errors. What vLLM warns of is upstream's."""
        ours = re.compile(r"^\S+Z (WARNING|ERROR) |^error:|^Traceback|CRIT ", re.MULTILINE)
        theirs = re.compile(r"\) ERROR ")
        return [
            line for line in self.log().splitlines() if ours.search(line) or theirs.search(line)
        ]


class Server(Box):
    """A container whose engine answers on a port of this machine."""

    port: int

    def ask(
        self, path: str, body: dict[str, Any] | None = None, key: str = "", tls: bool = False
    ) -> dict[str, Any]:
        """Ask the engine over its published port; return the JSON answer."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        data = json.dumps(body).encode() if body is not None else None
        url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}{path}"
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(
            request, timeout=120, context=context if tls else None
        ) as answer:
            return dict(json.load(answer))

    def complete(self, tokens: int = 16, **options: Any) -> str:
        body = {
            "model": "demo",
            "prompt": "The capital of France is",
            "max_tokens": tokens,
            "temperature": 0,
            **options,
        }
        return str(self.ask("/v1/completions", body)["choices"][0]["text"])

    def stream(self, tokens: int) -> Iterator[str]:
        """The pieces of an answer of exactly so many tokens, as they come; fails if it is cut."""
        body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": tokens}
        options = {"temperature": 0, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({**body, **options}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield str(json.loads(data)["choices"][0]["text"])
        raise AssertionError("the stream ended without [DONE]")

    def answers(self, path: str = "", model: str = "demo", **options: Any) -> list[Any]:
        """Tokens and log-probabilities of 20 fixed prompts, asked one after the other."""
        body = {"max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        found = []
        for prompt in PROMPTS:
            question = {"model": model, "prompt": prompt, **body}
            answer = self.ask(f"{path}/v1/completions", question, **options)
            found.append(answer["choices"][0]["logprobs"])
        return found

    def complete_many(self, count: int, at_once: int) -> list[list[str]]:
        """The tokens of many short answers, asked so many at a time, in the order of prompts."""
        body = {"model": "demo", "max_tokens": 4, "temperature": 0, "logprobs": 0}

        def ask(number: int) -> list[str]:
            prompt = f"{number}. {PROMPTS[number % len(PROMPTS)]}"
            answer = self.ask("/v1/completions", {**body, "prompt": prompt, "ignore_eos": True})
            return list(answer["choices"][0]["logprobs"]["tokens"])

        with ThreadPoolExecutor(at_once) as clients:
            return list(clients.map(ask, range(count)))


class Copy(Server):
    """A further container like another one."""

    def __init__(self, container: Container) -> None:
        super().__init__(container)
        container.reload()
        self.port = int(container.ports["8000/tcp"][0]["HostPort"])


class RealStack(Server):
    """A compose stack with the real engine."""

    def __init__(self, compose: DockerCompose, engine: DockerClient, port: int) -> None:
        self._compose = compose
        self._engine = engine
        self.port = port

    @property
    def container(self) -> Container:  # type: ignore[override]
        identity = self._compose.get_container("warmhold", include_all=True).ID
        return self._engine.containers.get(str(identity))

    @contextmanager
    def copied(
        self, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> Iterator[Copy]:
        """A new container with this one's image, rights, environment and volumes; this one has to
        be stopped, or two engines would share them."""
        config, host = self.container.attrs["Config"], self.container.attrs["HostConfig"]
        before = dict(item.split("=", 1) for item in config["Env"] if "=" in item)
        given = {
            "cap_add": host["CapAdd"],
            "security_opt": host["SecurityOpt"],
            "shm_size": host["ShmSize"],
            "ports": {"8000/tcp": ("127.0.0.1", None)},
            "volumes": {
                mount["Name"]: {"bind": mount["Destination"], "mode": "rw"}
                for mount in self.container.attrs["Mounts"]
                if mount["Type"] == "volume"
            },
            "tmpfs": host["Tmpfs"],
            "environment": {**before, **environment},
        }
        container = self._engine.containers.run(
            config["Image"], list(command), detach=True, **{**given, **options}
        )
        try:
            yield Copy(container)
        finally:
            container.remove(force=True)

    @staticmethod
    def write_guarded_override(folder: Path) -> Path:
        """A compose override with a certificate, a path prefix and eager mode."""
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test"),
                *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
            ],
            check=True,
            capture_output=True,
        )
        (folder / "key.pem").chmod(0o644)
        command = ["--enforce-eager", "--max-model-len", "512", "--root-path", "/llm"]
        command += ["--ssl-certfile", "/tls/cert.pem", "--ssl-keyfile", "/tls/key.pem"]
        service = {"command": command, "volumes": [f"{folder}:/tls:ro"]}
        override = folder / "override.yaml"
        override.write_text(json.dumps({"services": {"warmhold": service}}))
        folder.chmod(0o755)
        return override

    @staticmethod
    def copy_demo_to_hub_cache(engine: DockerClient, image: str, folder: Path) -> Path:
        """The demo model laid out as the hub's client would have cached it, without its `hub`."""
        source = engine.containers.create(image)
        try:
            chunks, _ = source.get_archive("/opt/warmhold/demo")
            archive = io.BytesIO(b"".join(chunks))
        finally:
            source.remove()
        cached = folder / "models" / "models--warmhold--demo"
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(cached / "snapshots")  # noqa: S202 - of our own image; 3.11.2 has no filter
        (cached / "snapshots" / "demo").rename(cached / "snapshots" / "c0ffee")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("c0ffee")
        for path in [folder.parent, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        return folder / "models"
