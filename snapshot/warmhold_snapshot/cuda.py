# SPDX-License-Identifier: Apache-2.0
"""What a snapshot of an engine on an NVIDIA GPU needs besides criu, and what such an engine holds.

criu's plug-in `cuda_plugin.so` has the driver move each process's state to the host, through the
program `cuda-checkpoint` on PATH; without either the plug-in does nothing and says so in a line.
The frozen tree is scanned by these rules too.
Sources: plugins/cuda/cuda_plugin.c and criu/files.c of CRIU 4.2.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PLUGIN, PROGRAM = "cuda_plugin.so", "cuda-checkpoint"
# Variables of that program, which a frozen engine is not to wait for.
USERS, SOCKET = "WARMHOLD_CUDA_PIDS", "WARMHOLD_CUDA_SOCKET"
# What the driver brings to the host besides weights and KV cache: contexts, modules, graph pools.
STATE_BYTES = 3 << 30
# Seconds for criu to stop a tree. Each process's CUDA calls end meanwhile, and its state is moved.
FREEZE_S = 60
_UNDO = {"locked": ("unlock",), "checkpointed": ("restore", "unlock")}
# Open in every process that uses CUDA, seen on an H200 with driver 580; the driver closes its own
# when it checkpoints. Others of its files are for what cannot be taken along (memory shared between
# hosts, displays).
_DEVICE = re.compile(r"/dev/nvidia(\d+|ctl|-uvm|-uvm-tools|-caps/nvidia-cap\d+)")
_LEFT = re.compile(r"Can't dump file .*\(chr 195:|/dev/nvidia")
_REFUSED = re.compile(r"(PAUSE|CHECKPOINT)_DEVICES failed with")


def is_device(link: str) -> bool:
    """Given a link, tell whether it is a file that CUDA itself has open or mapped."""
    return _DEVICE.fullmatch(link) is not None


def find_users(pids: Sequence[int], proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Given processes, return those that have a file of the driver open. A checkpointed one has
    none: this is for before a dump."""
    return tuple(pid for pid in pids if any(map(is_device, _read_links(proc / str(pid) / "fd"))))


def name_users(users: Sequence[int] | None) -> dict[str, str]:
    """Given the processes that use a GPU, or None where nobody knows, return the variable by which
    the program `cuda-checkpoint` learns that."""
    return {} if users is None else {USERS: ",".join(map(str, users))}


def find_missing(plugins: Path) -> str:
    """Given the folder of criu's plug-ins, return what is not there, or ""."""
    missing = [] if (plugins / PLUGIN).is_file() else [f"{plugins / PLUGIN}"]
    missing += [] if shutil.which(PROGRAM) else [f"{PROGRAM} on PATH"]
    return " and ".join(missing)


def digest_plugin(plugins: Path) -> str:
    """Given the folder of criu's plug-ins, return a digest of the one for CUDA; raise OSError."""
    return hashlib.sha256((plugins / PLUGIN).read_bytes()).hexdigest()[:16]


def bring_back(users: Sequence[int], holder: Mapping[str, str]) -> None:
    """Given the processes that use a GPU, after a dump that failed, and the variable of who holds
    the driver: have it undo what it was asked for. criu does that itself, unless it was killed.

    What cannot be undone stays: the engine then does not resume, and says so.
    """
    for pid in users:
        state = _ask_program(holder, "--get-state", "--pid", str(pid))
        for action in _UNDO.get(state, ()):
            _ask_program(holder, "--action", action, "--pid", str(pid))


def explain(lines: Sequence[str]) -> str:
    """Given lines of a dump's log, return what a failure most likely comes from, or ""."""
    text = "\n".join(lines)
    if _LEFT.search(text):
        return "a GPU's file is open that CUDA does not close: NVML, or a segment of weights"
    if _REFUSED.search(text):
        return (
            "the driver takes no managed or shared memory along (cudaMallocManaged, CUDA IPC), nor"
            " several ranks of NCCL"
        )
    return ""


def _ask_program(holder: Mapping[str, str], *arguments: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [PROGRAM, *arguments],
            env={**os.environ, **holder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=FREEZE_S,
            check=False,
        )
        return done.stdout.decode().strip()
    return ""


def _read_links(folder: Path) -> Iterator[str]:
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                yield str(path.readlink())
