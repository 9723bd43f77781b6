# SPDX-License-Identifier: Apache-2.0
"""A GPU's weights on their way to a flat file or back: by a process of its own, within a limit.

Only a process with CUDA reads and writes such memory, and CUDA stays with a process to its end: the
maker and the runner have none. `gpu_weights_program` is that process. It has ended before anything
else is done, so that no dump and no restore meets it.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from warmhold_snapshot.checksum import Progress
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache.generation import Generation

BACKEND = "cuda-vmm"
WRITE, PUBLISH = "write", "publish"  # from the vault into the flat file, and the other way
ABSENT = "snapshot.weights-absent"
# A driver that nobody uses takes seconds to wake up. A disk that is slower than this is no help.
_START_S = 60.0
_BYTES_PER_S = 50 << 20
_POLL_S = 0.1
_END_S = 10.0


def run(
    act: str, generation: Generation, folder: Path, vault: Path, progress: Progress | None = None
) -> None:
    """Given what is to be done, a generation, the folder of snapshots and the vault's socket, have
    it done. `progress` is called every 0.1 s, to end it; what is done is not known.

    Raise SnapshotError: what the process met, `snapshot.weights-absent` where it ended without a
    word or outlasted its limit, or what `progress` raises. It has ended then.
    """
    command = [sys.executable, "-m", "warmhold_entrypoint.gpus.gpu_weights_program"]
    limit_s = _START_S + generation.size_bytes / _BYTES_PER_S
    deadline = time.monotonic() + limit_s
    process = subprocess.Popen(
        [*command, act, str(folder), generation.id, str(vault)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": f"GPU-{generation.device.partition(':')[2]}"},
        stdin=subprocess.PIPE,  # which it follows: it ends with this process
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(0, generation.size_bytes)
                if time.monotonic() > deadline:
                    raise _failed(generation, f"it took longer than {limit_s:.0f} s")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # in the kernel, with gigabytes to write
                process.wait(_END_S)
        try:
            said = json.loads(process.stdout.read())
        except ValueError:
            raise _failed(generation, f"its process ended with {process.returncode}") from None
    if not said["ok"]:
        raise SnapshotError(said["code"], said["detail"], said["remedy"])


def _failed(generation: Generation, detail: str) -> SnapshotError:
    detail = f"{generation.id} between GPU and flat file: {detail}"
    return SnapshotError(ABSENT, detail, "see the container's log")
