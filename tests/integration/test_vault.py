# SPDX-License-Identifier: Apache-2.0
"""The vault under the real PID 1 and supervisord: it may die at any time, and no weight is lost."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attacker import STORE_VERBS, Attacker
from stack import Stack, eventually, free_port
from vault_process import close_all, connect, make_generation
from warmhold_entrypoint.running import tree
from warmhold_wcache.client import VaultClient
from warmhold_wcache.generation import encode_description
from warmhold_wcache.store import FdStoreClient

MakeStack = Callable[..., Stack]
SEGMENTS, SEGMENT_BYTES = 300, 1 << 14
ROUNDS = 20


def socket_of(stack: Stack) -> Path:
    return stack.folder / "run" / "wcache.sock"


def processes(stack: Stack) -> Iterator[tuple[Path, bytes]]:
    """The stack's processes as seen from outside: folder in /proc and command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            # The vault has next to no environment.
            if str(stack.folder).encode() in (folder / "environ").read_bytes() + command:
                yield folder, command
        except OSError:
            continue


def vault_pid(stack: Stack) -> int:
    def find() -> int:
        found = [
            int(folder.name)
            for folder, command in processes(stack)
            if b"warmhold_wcache.serve\0" in command and b"launcher.py" not in command
        ]
        return found[0] if len(found) == 1 else 0

    return eventually(find, "the one vault")


def fd_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def settled_fds(stack: Stack) -> tuple[int, int]:
    """Descriptors of PID 1 and vault once no client comes or goes: three equal looks in a row."""
    looks: list[tuple[int, int]] = []

    def settled() -> bool:
        looks.append((fd_count(stack.pid), fd_count(vault_pid(stack))))
        return len(looks) > 2 and len(set(looks[-3:])) == 1

    eventually(settled, "a count that stays")
    return looks[-1]


def memfd_bytes(stack: Stack) -> int:
    """The bytes of all memfds that any process of the stack has open or mapped."""
    sizes: dict[str, int] = {}
    for folder, _ in processes(stack):
        try:
            for link in (folder / "fd").iterdir():
                if str(link.readlink()).startswith("/memfd:"):
                    status = link.stat()
                    sizes[str(status.st_ino)] = status.st_size
            for line in (folder / "maps").read_text().splitlines():
                if "/memfd:" in line:
                    first, _, last = line.split()[0].partition("-")
                    sizes.setdefault(line.split()[4], int(last, 16) - int(first, 16))
        except OSError:
            continue
    return sum(sizes.values())


def stat(stack: Stack) -> list[dict[str, Any]]:
    with VaultClient(socket_of(stack), timeout_s=30, wait_s=30) as client:
        rows = client.stat()
    for row in rows:
        del row["last_use"]
    return rows


def kill(stack: Stack) -> None:
    os.kill(vault_pid(stack), signal.SIGKILL)


def restart(stack: Stack) -> None:
    result = stack.supervisorctl("restart", "wcache")
    assert result.returncode == 0, result.stdout + result.stderr


def serve(make_stack: MakeStack) -> Stack:
    stack = make_stack()
    stack.serve()
    eventually(lambda: stat(stack), "the generation")
    return stack


def reasons(status: dict[str, Any]) -> dict[str, str]:
    return {item["mode"]: item["code"] for item in status["rejections"]}


def plan_of(stack: Stack) -> str:
    """What a start would do, once the vault is no longer a starting one."""

    def ask() -> str:
        text = stack.run("plan").stdout
        return "" if "ipc_cache.loading" in text else text

    return eventually(ask, "a vault that has started")


def test_the_second_engine_finds_what_the_first_one_published(make_stack: MakeStack) -> None:
    stack = serve(make_stack)
    first = stack.wait_ready()
    assert (first["mode"], first["weights"]["published"]) == ("disk", [stat(stack)[0]["id"]])
    assert reasons(first)["ipc_cache"] == "ipc_cache.absent"
    assert "try ipc_cache" in plan_of(stack)
    os.kill(stack.roles()["worker"], signal.SIGKILL)
    second = stack.wait_ready(starts=2)
    assert (second["mode"], second["weights"]["published"]) == ("ipc_cache", [])
    assert "ipc_cache" not in reasons(second)
    assert "mapped from the vault" in stack.run("status").stdout
    assert "READY mode=ipc_cache" in stack.text()
    assert stack.stop() == 0


def test_weights_on_which_no_engine_comes_up_are_published_anew(make_stack: MakeStack) -> None:
    """Neither does the start from disk have a second copy, nor the next engine the same trouble."""
    stack = make_stack(FAKE_VLLM_HIT_FAILS="1").serve()
    stack.wait_ready()
    (first,) = eventually(lambda: stat(stack), "the generation")
    os.kill(stack.roles()["worker"], signal.SIGKILL)
    status = stack.wait_ready(starts=3)
    assert (status["mode"], reasons(status)["ipc_cache"]) == ("disk", "ipc_cache.failed")
    assert status["weights"]["published"] == [first["id"]]
    assert "resident weights given up" in stack.text()
    (second,) = stat(stack)
    assert second != first  # but for its content
    assert memfd_bytes(stack) < 2 * SEGMENTS * SEGMENT_BYTES  # descriptions besides
    assert stack.stop() == 0


def test_a_hit_that_was_not_expected_is_told_as_one(make_stack: MakeStack) -> None:
    """The files look changed, so that the plan expects a miss; the loader compares more."""
    stack = serve(make_stack)
    for file in (stack.folder / "model").glob("*.safetensors"):
        os.utime(file, (1, 1))
    plan = plan_of(stack)
    assert "not ipc_cache: ipc_cache.key-mismatch" in plan
    assert "files" in plan
    assert stack.supervisorctl("restart", "engine").returncode == 0
    status = stack.wait_ready(starts=2)
    assert (status["mode"], reasons(status).get("ipc_cache")) == ("ipc_cache", None)


def test_a_hung_vault_costs_no_start(make_stack: MakeStack) -> None:
    stack = serve(make_stack)
    vault = vault_pid(stack)
    os.kill(vault, signal.SIGSTOP)
    try:
        assert "ipc_cache.hung" in plan_of(stack)
        os.kill(stack.roles()["front"], signal.SIGKILL)
        status = stack.wait_ready(starts=2)
    finally:
        os.kill(vault, signal.SIGCONT)
    assert status["mode"] == "disk"
    assert "hung" in status["weights"]["not_published"]
    assert "supervisorctl status wcache" in status["rejections"][1]["remedy"]


def test_without_a_vault_every_start_is_from_disk(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_WCACHE="off").serve()
    status = stack.wait_ready()
    assert (status["mode"], reasons(status)["ipc_cache"]) == ("disk", "ipc_cache.off")
    assert not socket_of(stack).exists()


def test_the_vaults_health_over_http(make_stack: MakeStack) -> None:
    port = free_port()
    stack = make_stack(WARMHOLD_WCACHE_HEALTH_PORT=str(port)).serve()

    def ask() -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    eventually(lambda: ask() == 200, "the vault's health")
    assert stack.supervisorctl("stop", "wcache").returncode == 0
    assert ask() == 503
    assert stack.supervisorctl("start", "wcache").returncode == 0
    eventually(lambda: ask() == 200, "the vault's health")


@pytest.mark.parametrize("held", [True, False], ids=["held", "unheld"])
@pytest.mark.parametrize("end", [kill, restart])
def test_no_generation_is_lost(
    make_stack: MakeStack, end: Callable[[Stack], None], held: bool
) -> None:
    stack = serve(make_stack)
    if not held:
        assert stack.supervisorctl("stop", "engine").returncode == 0
        eventually(lambda: stat(stack)[0]["holders"] == [], "the end of the lease")
    rows = stat(stack)
    assert [(row["bytes"], len(row["holders"])) for row in rows] == [
        (SEGMENTS * SEGMENT_BYTES, 1 if held else 0)
    ]
    pid = vault_pid(stack)
    restart(stack)  # what a vault took back counts as the normal state
    assert vault_pid(stack) != pid
    assert stat(stack) == rows
    size, counts = memfd_bytes(stack), settled_fds(stack)
    assert min(counts) > SEGMENTS
    for _ in range(ROUNDS):
        pid = vault_pid(stack)
        end(stack)
        assert stat(stack) == rows
        assert vault_pid(stack) != pid
        if held:
            assert stack.complete()["choices"]
    assert settled_fds(stack) == counts
    assert memfd_bytes(stack) == size
    # The next engine maps what the first one published.
    assert stack.supervisorctl("restart", "engine").returncode == 0
    assert stack.text().count("weights published") == 1
    assert f"weights mapped {rows[0]['id']}" in stack.text()
    eventually(lambda: memfd_bytes(stack) == size, "one generation in memory")
    assert stack.stop() == 0


def test_every_engine_finds_the_weights_and_a_dead_one_holds_nothing(make_stack: MakeStack) -> None:
    stack = serve(make_stack)
    size = memfd_bytes(stack)
    for start in range(3):
        holders = stat(stack)[0]["holders"]
        assert len(holders) == 1
        os.kill(stack.roles()["front"], signal.SIGKILL)
        stack.wait_ready(starts=start + 2)
        assert eventually(lambda: stat(stack)[0]["holders"], "the new holder") != holders
    assert stack.text().count("weights published") == 1
    assert stack.text().count("weights mapped") == 3
    assert eventually(lambda: memfd_bytes(stack) == size, "one generation in memory")


def wcache(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmhold_wcache.cli", "--socket", str(socket_of(stack))]
    return stack._run([*command, *arguments])


def test_commands(make_stack: MakeStack) -> None:
    stack = serve(make_stack)
    (row,) = json.loads(wcache(stack, "status", "--json").stdout)
    assert row["model"] == "fake"
    assert row["id"] in wcache(stack, "status").stdout
    assert wcache(stack, "health").returncode == 0
    refused = wcache(stack, "drop", row["id"])
    assert refused.returncode == 1
    assert "wcache.in-use" in refused.stderr
    assert stat(stack)[0]["id"] == row["id"]
    assert stack.supervisorctl("stop", "engine").returncode == 0
    fds = fd_count(stack.pid)
    assert wcache(stack, "drop", row["id"]).returncode == 0
    assert stat(stack) == []
    assert memfd_bytes(stack) == 0
    assert fd_count(stack.pid) == fds - SEGMENTS - 1
    restart(stack)
    assert stat(stack) == []
    os.kill(vault_pid(stack), signal.SIGSTOP)
    try:
        hung = wcache(stack, "--timeout", "0.5", "health")
        assert hung.returncode == 69
        assert "wcache.hung" in hung.stderr
    finally:
        os.kill(vault_pid(stack), signal.SIGCONT)
    assert stack.supervisorctl("stop", "wcache").returncode == 0
    dead = wcache(stack, "status")
    assert dead.returncode == 69
    assert "wcache.dead-socket" in dead.stderr


def test_the_vault_is_without_rights_and_outside_the_engines_tree(make_stack: MakeStack) -> None:
    stack = serve(make_stack)
    status = Path(f"/proc/{vault_pid(stack)}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert str(tree.ENGINE_GROUP) not in fields["Groups"].split()
    assert socket_of(stack).stat().st_mode & 0o777 == 0o600
    assert (stack.folder / "run" / "fdstore.sock").stat().st_mode & 0o777 == 0o600
    assert b"warmhold_wcache" in Path(f"/proc/{vault_pid(stack)}/cmdline").read_bytes()


def test_the_vault_ends_after_the_engine(make_stack: MakeStack) -> None:
    stack = serve(make_stack)
    vault = vault_pid(stack)
    os.kill(stack.roles()["core"], signal.SIGSTOP)
    os.kill(stack.pid, signal.SIGTERM)
    eventually(lambda: "STOPPING" in stack.text(), "the engine's stop")
    while stack.tree():
        alive = Path(f"/proc/{vault}").exists()
        assert alive or not stack.tree()
    assert stack.wait() == 0


def test_pid_1_outlives_hostile_clients_of_its_store(make_stack: MakeStack) -> None:
    stack = serve(make_stack)
    counts, rows = settled_fds(stack), stat(stack)
    path = stack.folder / "run" / "fdstore.sock"
    silent = [connect(path) for _ in range(40)]
    for sock in silent[::2]:
        # With so many clients the store may have dropped this one for another already.
        with suppress(OSError):
            sock.send(b"\0")
    generation, fds = make_generation()
    attacker = Attacker(path, 3, STORE_VERBS, encode_description(generation))
    while attacker.sent < 2000:
        attacker.session()
    attacker.close()
    close_all(fds)
    store = FdStoreClient(path)
    for entry in store.entries():
        if entry.name.startswith("x."):
            store.drop(entry.name)
    for sock in silent:
        sock.close()
    # It still reaps, supervises, keeps what it kept, and stops.
    os.kill(stack.roles()["front"], signal.SIGKILL)
    stack.wait_ready(starts=2)
    kill(stack)
    assert [row["id"] for row in stat(stack)] == [row["id"] for row in rows]
    eventually(lambda: settled_fds(stack) == counts, f"{counts} descriptors")
    assert "met a bug" not in stack.text()
    assert stack.stop() == 0
