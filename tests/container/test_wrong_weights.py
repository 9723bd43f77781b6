# SPDX-License-Identifier: Apache-2.0
"""Wrong weights are never served: a checkpoint that changed is read again, and the field named.

Starts the real engine four times, eagerly. Tests share one container and run in this order.
"""

import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from box import Box, RealStack
from stack import free_port

from docker import DockerClient

pytestmark = [pytest.mark.container, pytest.mark.full]
ANSWERS: list[str] = []


class Served(Box):
    """The engine on a copy of the demo model that the test may change."""

    def __init__(self, engine: DockerClient, image: str, folder: Path) -> None:
        cached = RealStack.copy_demo_to_hub_cache(engine, image, folder)
        self.weights = cached / "models--warmhold--demo/snapshots/c0ffee/model.safetensors"
        shutil.copy(self.weights, folder / "original")
        self.original = folder / "original"
        self.port = free_port()
        container = engine.containers.run(
            image,
            ["--enforce-eager", "--max-model-len", "512"],
            detach=True,
            shm_size="1g",
            ports={"8000/tcp": ("127.0.0.1", self.port)},
            volumes={str(cached): {"bind": "/models", "mode": "ro"}},
            environment={
                "WARMHOLD_MODEL": "warmhold/demo",
                "WARMHOLD_KV_CACHE_GIB": "0.5",
                "WARMHOLD_MAX_FAILURES": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )
        super().__init__(container)

    def complete(self) -> str:
        import json

        body = {"model": "warmhold/demo", "prompt": "The capital of France is", "max_tokens": 8}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({**body, "temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def restart(self, starts: int) -> dict[str, Any]:
        code, text = self.run("supervisorctl", "restart", "engine")
        assert code == 0, text
        return self.wait_ready(starts=starts)


@pytest.fixture(scope="module")
def served(engine: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    image = os.environ.get("WARMHOLD_IMAGE", "warmhold:cpu")
    box = Served(engine, image, tmp_path_factory.mktemp("served"))
    yield box
    box.container.remove(force=True, v=True)


def change(path: Path, how: Callable[[bytearray], None]) -> None:
    """Change a file in place and put its old times back, as far as a program can."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    how(content)
    with path.open("r+b") as file:
        file.write(content)
        file.truncate(len(content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip_one_bit(content: bytearray) -> None:
    content[-1001] ^= 1


def negate_a_tail(content: bytearray) -> None:
    """Other weights of the same shapes: the sign of every bf16 in the last megabytes is turned."""
    start = len(content) - (8 << 20)
    content[start + 1 :: 2] = bytes(byte ^ 0x80 for byte in content[start + 1 :: 2])


def test_the_first_start_is_from_disk(served: Served) -> None:
    assert served.wait_ready()["mode"] == "disk"
    ANSWERS.append(served.complete())
    assert "Paris" in ANSWERS[0]


@pytest.mark.parametrize("how", [flip_one_bit, negate_a_tail])
def test_a_file_that_changed_in_place_is_read_again(
    served: Served, how: Callable[[bytearray], None]
) -> None:
    starts = 2 + [flip_one_bit, negate_a_tail].index(how)
    change(served.weights, how)
    plan = served.run("warmhold", "plan")[1]
    assert "not ipc_cache: ipc_cache.key-mismatch" in plan
    assert "files" in plan
    status = served.restart(starts)
    assert (status["mode"], status["weights"]["fields"]) == ("disk", ["content"])
    assert status["weights"]["published"]
    (reason,) = [item for item in status["rejections"] if item["mode"] == "ipc_cache"]
    assert reason["code"] == "ipc_cache.key-mismatch"
    assert "content" in reason["detail"]
    if how is negate_a_tail:
        assert served.complete() != ANSWERS[0]


def test_a_truncated_file_is_refused(served: Served) -> None:
    change(served.weights, lambda content: content.__delitem__(slice(-4096, None)))
    served.run("supervisorctl", "restart", "engine")
    assert served.wait_end() != 0
    assert served.log().count("READY mode=ipc_cache") == 0
