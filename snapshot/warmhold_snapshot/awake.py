# SPDX-License-Identifier: Apache-2.0
"""Keeps NVIDIA's driver awake while criu dumps or restores: the program `cuda-checkpoint` with
`--hold`, which also does what the plug-in's calls of it ask for."""

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .cuda import PROGRAM, SOCKET

_RELEASE_S = 2.0


@contextmanager
def awake(plugins: Path | None) -> Iterator[dict[str, str]]:
    """Given the folder of criu's plug-ins (None: no GPU is involved), keep the driver awake within,
    which each call of the plug-in's would wake anew while an engine's processes are all
    checkpointed; yield the variable by which the calls find who holds it, and does their work.

    What is only quicker may fail: where the driver cannot be held, nothing is.
    """
    if plugins is None:
        yield {}
        return
    try:
        made = tempfile.TemporaryDirectory(prefix="cuda-", ignore_cleanup_errors=True)
    except OSError:  # a full disk
        yield {}
        return
    with made as folder:
        variable = {SOCKET: f"{folder}/holder.sock"}
        holder = _hold(variable)
        try:
            yield {} if holder is None else variable
        finally:
            if holder is not None:
                _release(holder)


def _hold(variable: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
    try:
        return subprocess.Popen(
            [PROGRAM, "--hold"],
            env={**os.environ, **variable},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def _release(holder: "subprocess.Popen[bytes]") -> None:
    """Let it end. The driver takes its time for that, and a restored engine does not wait."""
    assert holder.stdin is not None
    holder.stdin.close()
    threading.Thread(target=_reap, args=(holder,), name="holder", daemon=True).start()


def _reap(holder: "subprocess.Popen[bytes]") -> None:
    try:
        holder.wait(_RELEASE_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()
