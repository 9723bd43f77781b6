# SPDX-License-Identifier: Apache-2.0
"""Upstream's `vllm snapshot` under the runner: scope, create, restore, and what follows a failure.

The driver, the GPU, vLLM and criu are stand-ins; supervisord, the runner, orphans, signals and
process ids are real.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import DEVICES, build_fake_cuda
from stack import Stack, eventually, write_model
from warmhold_wcache.client import VaultClient

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISION = ("--revision", COMMIT)
VLLM = ("--backend", "vllm")
# Where the machine has none, an /etc with one.
MACHINE_ID = """
test -e /etc/machine-id || { cp -a /etc "$0/etc"; touch "$0/etc/machine-id"; mount --bind "$0/etc" /etc; }
"""  # noqa: E501
MakeUpstream = Callable[..., Stack]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_cuda(tmp_path_factory.mktemp("cuda")).parent


@pytest.fixture
def make(library: Path, tmp_path: Path) -> Iterator[MakeUpstream]:
    """A stack whose vLLM has `snapshot`, with one GPU and a model of the hub in its cache."""
    made: list[Stack] = []

    def make_upstream(**environment: str) -> Stack:
        folder = Path(tempfile.mkdtemp(prefix="wh-"))
        programs = folder / "programs"
        programs.mkdir()
        for name in ("nvidia-smi", "cuda-checkpoint"):
            (programs / name).write_text("#!/bin/sh\nexit 1\n")
            (programs / name).chmod(0o755)
        (programs / "cuda_plugin.so").touch()
        command = folder / "site" / "vllm" / "entrypoints" / "cli" / "snapshot.py"
        command.parent.mkdir(parents=True)
        command.touch()
        write_model(folder / "models" / "hub" / "models--own--er" / "snapshots" / COMMIT)
        stack = Stack(folder)
        stack.environment |= {
            "LD_LIBRARY_PATH": str(library),
            "PATH": f"{programs}:{stack.environment['PATH']}",
            "PYTHONPATH": f"{stack.environment['PYTHONPATH']}:{folder / 'site'}",
            "CRIU_CUDA_PLUGIN_DIR": str(programs),
            "FAKE_CUDA_COUNT": "1",
            "FAKE_SNAPSHOT_FILE": str(tmp_path / "upstream"),
            "FAKE_CRIU_FILE": str(tmp_path / "criu"),
            "WARMHOLD_MODEL": "own/er",
            **environment,
        }
        stack.wrapper = ("sh", "-c", MACHINE_ID + DEVICES, str(folder))
        made.append(stack)
        return stack

    yield make_upstream
    for stack in made:
        stack.close()
        for name in stack.shm_files():
            Path("/dev/shm", name).unlink()
        shutil.rmtree(stack.folder)


def tell(stack: Stack, variable: str, order: str) -> None:
    """Tell the fake vLLM or criu what is to go wrong; "" for nothing."""
    Path(stack.environment[variable]).write_text(order)


def artifacts(stack: Stack) -> list[str]:
    """Whatever lies in the folder of upstream's artifacts, half made too."""
    folder = stack.folder / "state" / "upstream-snapshots"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def create(stack: Stack, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return stack.run("snapshot-create", *VLLM, "--name", "one", *arguments)


def reasons(status: dict[str, Any]) -> dict[str, str]:
    return {item["mode"]: item["code"] for item in status["rejections"]}


def resident(stack: Stack) -> list[Any]:
    with VaultClient(stack.folder / "run" / "wcache.sock", 5.0) as client:
        return client.stat()


def test_an_engine_is_restored_by_upstream_and_comes_back_by_the_ladder(make: MakeUpstream) -> None:
    stack = make().serve(*REVISION)
    before, first = stack.roles(), stack.wait_ready()["mode"]
    made = create(stack, "--json")
    assert made.returncode == 0, made.stderr + stack.text()[-3000:]
    report = json.loads(made.stdout)
    assert (report["name"], report["mode"], artifacts(stack)) == ("vllm:one", first, ["one"])
    assert report["image_bytes"] > 0 and report["made_s"] > 0
    status = stack.wait_ready(2)
    assert (status["crashes"], status["snapshot"]) == (0, "")
    assert {"stop", "snapshot"} <= set(status["phases"])
    assert not set(stack.roles().values()) & set(before.values())
    assert "snapshot create argv" in stack.text(), "its output is in the container's log"
    runner = stack.runner

    restored = stack.run("snapshot-restore", "one", *VLLM)
    assert restored.returncode == 0 and "restored  vllm:one" in restored.stdout, restored.stderr
    status = stack.wait_ready(3)
    assert (status["mode"], status["snapshot"], status["crashes"]) == ("snapshot", "vllm:one", 0)
    assert "snapshot (vllm:one)" in stack.run("status").stdout
    assert abs(sum(status["phases"].values()) - status["total_s"]) < 1e-6
    assert stack.runner == runner, "the restored tree is its child"
    assert len(stack.tree()) == 3 and len(stack.shm_files()) == 1
    assert stack.complete()["choices"]
    refused = stack.run("snapshot-create")
    assert refused.returncode == 73 and "error: snapshot.backend: vllm:one" in refused.stderr

    os.kill(stack.roles()["core"], signal.SIGKILL)
    status = stack.wait_ready(4)
    assert (status["mode"], status["snapshot"], status["crashes"]) == (first, "", 1)
    assert len(stack.tree()) == 3 and len(stack.shm_files()) == 1

    assert stack.run("snapshot-restore", *VLLM).returncode == 0, "the newest"
    assert stack.wait_ready(5)["snapshot"] == "vllm:one"
    assert stack.stop() == 0
    assert stack.tree() == {} and stack.shm_files() == set()


def test_weights_that_are_resident_are_given_up_for_it(make: MakeUpstream) -> None:
    stack = make().serve(*REVISION)
    (row,) = eventually(lambda: resident(stack), "resident weights")
    assert create(stack).returncode == 0
    assert f"resident weights given up id={row['id']}" in stack.text()
    status = stack.wait_ready(2)
    assert status["mode"] == "disk" and len(resident(stack)) == 1, "published again"
    assert stack.run("snapshot-restore", *VLLM).returncode == 0
    assert resident(stack) == []


def test_what_is_outside_the_scope_costs_nothing(make: MakeUpstream) -> None:
    stack = make(WARMHOLD_API_KEY="hush").serve("--root-path", "/x")
    before = stack.roles()
    for refused in (create(stack), stack.run("snapshot-restore", *VLLM)):
        assert "error: snapshot.upstream-scope: " in refused.stderr
        assert "no --revision of 40 hexadecimal digits; an API key" in refused.stderr
        assert "fix: give the commit as --revision; leave that out" in refused.stderr
    assert (create(stack).returncode, refused.returncode) == (73, 74)
    status = stack.wait_ready()
    assert (stack.roles(), status["starts"], artifacts(stack)) == (before, 1, [])


@pytest.mark.parametrize(
    ("variable", "order", "words"),
    [
        ("FAKE_SNAPSHOT_FILE", "create", "Free memory on device is less than desired"),
        ("FAKE_CRIU_FILE", "dump", "non-zero exit status"),
    ],
)
def test_a_create_that_fails_leaves_nothing_and_the_engine_serves_again(
    make: MakeUpstream, variable: str, order: str, words: str
) -> None:
    stack = make().serve(*REVISION)
    tell(stack, variable, order)
    made = create(stack)
    assert made.returncode == 73, made.stderr
    assert "error: snapshot.upstream: `vllm snapshot create` ended with 1" in made.stderr
    assert words in made.stderr
    status = stack.wait_ready(2)
    assert (status["crashes"], artifacts(stack)) == (0, [])
    assert len(stack.tree()) == 3
    assert stack.run("snapshot-restore", *VLLM).returncode == 74
    assert stack.wait_ready(2)["starts"] == 2


@pytest.mark.parametrize(
    ("variable", "order"), [("FAKE_SNAPSHOT_FILE", "oracle"), ("FAKE_CRIU_FILE", "restore")]
)
def test_a_restore_that_fails_is_followed_by_the_ladder(
    make: MakeUpstream, variable: str, order: str
) -> None:
    stack = make().serve(*REVISION)
    assert create(stack).returncode == 0
    stack.wait_ready(2)
    tell(stack, variable, order)
    restored = stack.run("snapshot-restore", "one", *VLLM)
    assert restored.returncode == 74
    assert "error: snapshot.upstream: `vllm snapshot restore` ended with 1" in restored.stderr
    status = stack.wait_ready(3)
    assert (status["mode"], status["crashes"]) == ("disk", 0)
    assert reasons(status)["snapshot"] == "snapshot.upstream"
    assert len(stack.tree()) == 3 and artifacts(stack) == ["one"]
    tell(stack, variable, "")
    assert stack.run("snapshot-restore", "one", *VLLM).returncode == 0


def begin_and_wait(stack: Stack) -> "subprocess.Popen[str]":
    """Begin a snapshot whose engine never gets ready; return who asked for it."""
    tell(stack, "FAKE_SNAPSHOT_FILE", "wait")
    asking = subprocess.Popen(
        [sys.executable, "-m", "warmhold_entrypoint", "snapshot-create", *VLLM, "--name", "one"],
        env=stack.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = stack.folder / "state" / "upstream-snapshots" / "one" / "child.log"
    eventually(lambda: log.exists() and "fake core" in log.read_text(), "upstream's engine")
    return asking


def test_a_stop_meanwhile_ends_with_0(make: MakeUpstream) -> None:
    stack = make().serve(*REVISION)
    asking = begin_and_wait(stack)
    status = stack.status()
    assert status and "`vllm snapshot create` makes vllm:one" in status["reason"]
    assert stack.stop() == 0
    output, _ = asking.communicate(timeout=60)
    assert asking.returncode == 73 and "snapshot.stopped" in output
    assert stack.tree() == {} and artifacts(stack) == []


def test_one_that_is_never_done_is_ended(make: MakeUpstream) -> None:
    stack = make(WARMHOLD_READY_TIMEOUT_S="10").serve(*REVISION)
    output, _ = begin_and_wait(stack).communicate(timeout=60)
    assert "`vllm snapshot create` was not done within 10 s" in output
    stack.wait_ready(2)
    assert len(stack.tree()) == 3 and artifacts(stack) == []


def test_a_runner_that_is_killed_meanwhile(make: MakeUpstream) -> None:
    stack = make().serve(*REVISION)
    runner, asking = stack.runner, begin_and_wait(stack)
    os.kill(runner, signal.SIGKILL)
    asking.communicate(timeout=60)
    stack.wait_ready(2)
    assert len(stack.tree()) == 3, "what it had started has its mark, and has ended"
    assert "one" in artifacts(stack), "half made"
    tell(stack, "FAKE_SNAPSHOT_FILE", "")
    assert create(stack).returncode == 0, "the half-made folder is no obstacle"
    assert artifacts(stack) == ["one"]


def test_a_runner_that_is_killed_under_a_restored_engine(make: MakeUpstream) -> None:
    stack = make().serve(*REVISION)
    assert create(stack).returncode == 0
    assert stack.run("snapshot-restore", *VLLM).returncode == 0
    before = stack.tree()
    os.kill(stack.runner, signal.SIGKILL)
    status = stack.wait_ready(4)
    assert status["snapshot"] == "" and len(stack.tree()) == 3
    assert not before.keys() & stack.tree().keys()
