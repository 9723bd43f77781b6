# SPDX-License-Identifier: Apache-2.0
"""The program `cuda-checkpoint` on a real driver: what is on the GPU goes to the host and back."""

import os
import statistics
import subprocess
import sys
import time

import pytest
from gpu_stand import ROOT, Child, Vault, say, used_bytes
from warmhold_snapshot import cuda_checkpoint

PROGRAM = [sys.executable, "-IS", cuda_checkpoint.__file__]
PLUGIN_BUFFER = 127


def call(*arguments: str) -> tuple[int, str]:
    """Run it as CRIU's plug-in does; return its exit code and output."""
    began = time.monotonic()
    done = subprocess.run(
        [*PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        cwd=ROOT,
        check=False,
    )
    text = done.stdout.strip()
    shown = " ".join(arguments)
    say(f"{shown}: {done.returncode} {text!r} {time.monotonic() - began:.3f} s")
    return done.returncode, text


def round_trip(pid: int) -> tuple[int, int]:
    """Lock, checkpoint, restore and unlock; return the bytes in use before and in between."""
    target = ("--pid", str(pid))
    before = used_bytes()
    assert call("--get-state", *target) == (0, "running")
    code, tid = call("--get-restore-tid", *target)
    assert code == 0 and os.path.isdir(f"/proc/{pid}/task/{tid}")  # noqa: PTH112
    assert call("--get-state", "--pid", tid) == (0, "running")  # the plug-in asks for the thread
    assert call("--action", "lock", *target, "--timeout", "10000") == (0, "")
    assert call("--get-state", *target) == (0, "locked")
    assert call("--action", "checkpoint", *target) == (0, "")
    assert call("--get-state", *target) == (0, "checkpointed")
    between = used_bytes()
    assert call("--action", "restore", *target) == (0, "")
    assert call("--action", "unlock", *target) == (0, "")
    assert call("--get-state", *target) == (0, "running")
    return before, between


def test_plain_memory(vault: Vault, base: int) -> None:
    with Child("toy_child.py", "plain", str(vault.socket)) as child:
        before, between = round_trip(child.hear()["pid"])
        say(f"in use {before >> 20} MiB, checkpointed {between >> 20} MiB")
        assert before - between >= 1 << 30
        assert child.go_on()["equal"]


def test_a_process_whose_segments_are_unmapped(vault: Vault, base: int) -> None:
    """What a snapshot of an engine rests on."""
    with Child("toy_child.py", "unmapped", str(vault.socket)) as child:
        say(str(child.hear()))
        round_trip(child.go_on()["pid"])
        seen = child.go_on()
        say(str(seen))
        assert seen["equal"] and seen["sound"]


def test_a_process_that_maps_segments(vault: Vault, base: int) -> None:
    """Seen what becomes of it; whichever way, the process goes on."""
    with Child("toy_child.py", "mapped", str(vault.socket)) as child:
        child.hear()
        target = ("--pid", str(child.go_on()["pid"]))
        assert call("--action", "lock", *target)[0] == 0
        code, _ = call("--action", "checkpoint", *target)
        if code == 0:
            call("--action", "restore", *target)
        call("--get-state", *target)
        call("--action", "unlock", *target)
        seen = child.go_on()
        say(f"the checkpoint ended with {code}; afterwards {seen}")
        assert seen["equal"] and seen["sound"]


@pytest.mark.parametrize("pid", [1, os.getpid(), 4_000_000])
def test_a_process_without_cuda(pid: int) -> None:
    for what in (["--get-restore-tid"], ["--get-state"]):
        code, text = call(*what, "--pid", str(pid))
        assert code == 1
        assert len(text) <= PLUGIN_BUFFER


def test_what_a_call_costs() -> None:
    seconds = []
    for _ in range(7):
        began = time.monotonic()
        call("--get-state", "--pid", "1")
        seconds.append(time.monotonic() - began)
    say(f"median {statistics.median(seconds):.3f} s")
    began = time.monotonic()
    for _ in range(7):
        subprocess.run([*PROGRAM, "--help"], stdout=subprocess.DEVNULL, timeout=20, check=True)
    say(f"of which Python {(time.monotonic() - began) / 7:.3f} s")
