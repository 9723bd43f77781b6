# SPDX-License-Identifier: Apache-2.0
"""Bad input: a clear error at once, all faults together, no traceback, nothing started."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stack import Stack

MakeStack = Callable[..., Stack]


def refuse(stack: Stack, *arguments: str) -> str:
    """Boot; return what was said. Nothing may have been started."""
    stack.boot(*arguments)
    assert stack.wait() in (69, 77, 78)
    text = stack.text()
    assert "Traceback" not in text
    assert "engine starting" not in text
    assert text.count("error: ") == text.count("fix: ") > 0
    return text


def test_all_faults_come_at_once(make_stack: MakeStack) -> None:
    stack = make_stack(
        WARMHOLD_MODE="fast", WARMHOLD_MODEL="/models/absent", WARMHOLD_DRAIN_S="soon"
    )
    text = refuse(stack, "--speculative-config", '{"model": }')
    for code in ("settings.mode", "settings.drain-s", "arguments.json", "model.missing"):
        assert f"error: {code}: " in text
    assert "line 1 column 11" in text
    assert "/models/absent (no such folder)" in text


@pytest.mark.parametrize(
    ("mode", "code"), [("snapshot", "snapshot.absent"), ("ipc_cache", "ipc_cache.absent")]
)
def test_a_named_mode_that_is_unavailable(make_stack: MakeStack, mode: str, code: str) -> None:
    stack = make_stack(WARMHOLD_MODE=mode)
    stack.boot()
    assert stack.wait() == 69
    assert f"error: mode.unavailable: {mode}: {code}: " in stack.text()


def test_a_taken_port_names_its_holder(make_stack: MakeStack) -> None:
    stack = make_stack()
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", stack.port))
        holder.listen()
        text = refuse(stack)
    assert f"error: port.taken: port {stack.port} is held by" in text
    result = None
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", stack.port))
        holder.listen()
        result = stack.run("plan", "--", "--port", str(stack.port))
    assert result.returncode == 78
    assert "(PID " in result.stderr


def test_an_unwritable_volume_names_path_and_uid(make_stack: MakeStack, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(volume)], check=True)
    try:
        text = refuse(make_stack(WARMHOLD_STATE_DIR=str(volume)))
    finally:
        subprocess.run(["umount", str(volume)], check=True)
    assert f"error: rights.not-writable: {volume}" in text
    assert "uid 0" in text


def test_a_volume_of_another_user_that_only_capabilities_could_write(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    cache = tmp_path / "state" / "cache"
    cache.mkdir(parents=True)
    cache.chmod(0o700)
    import os

    os.chown(cache, 12345, 12345)
    text = refuse(make_stack(WARMHOLD_STATE_DIR=str(tmp_path / "state")))
    assert (
        f"{cache} is not reachable for uid 0 without capabilities (owner 12345, mode 0700)" in text
    )


def test_a_small_shm(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    mount = "mount -t tmpfs -o size=64m none /dev/shm"
    command = f"{mount} && exec {sys.executable} -m warmhold_entrypoint plan"
    result = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command],
        env=stack.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 78
    assert "error: shm.too-small: /dev/shm has 64 MiB free of 64" in result.stderr


def test_plan_and_settings_start_nothing(make_stack: MakeStack) -> None:
    stack = make_stack()
    assert stack.run("plan", "--", "--port", str(stack.port)).returncode == 0
    assert stack.run("settings").returncode == 0
    assert not (stack.folder / "run").exists()
    assert not (stack.folder / "state").exists()


def test_other_commands_are_executed_as_given(make_stack: MakeStack) -> None:
    stack = make_stack()
    result = stack.run("sh", "-c", 'printf "%s" "$1"; exit 7', "sh", "a b")
    assert (result.returncode, result.stdout) == (7, "a b")
    absent = stack.run("no-such-program")
    assert absent.returncode == 127
    assert "error: usage.command: no-such-program" in absent.stderr
    meant = stack.run("Qwen/Qwen3-0.6B")
    assert "WARMHOLD_MODEL=Qwen/Qwen3-0.6B" in meant.stderr
