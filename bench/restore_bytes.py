# SPDX-License-Identifier: Apache-2.0
r"""How long a restore takes for growing images, beside the machine's own rates, in one run.

    docker run --rm --shm-size 1g --cap-add SYS_ADMIN --cap-add SYS_PTRACE --cap-add NET_ADMIN \
        --cap-add SYS_TIME --security-opt seccomp=unconfined -v "$PWD/bench:/bench:ro" \
        --entrypoint python warmhold:cpu /bench/restore_bytes.py [MB ...]

For each size a Python process with so many random bytes is snapshotted by the product's own code
and restored: with the image in the page cache, and dropped from it. The floors are plain reads of
that image, by one thread: out of the page cache (memory) and from the disk. JSON comes last.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import warmhold_entrypoint
from warmhold_entrypoint.bench import page_cache
from warmhold_entrypoint.running import tree
from warmhold_snapshot import pids
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.create import create
from warmhold_snapshot.restore import restore

SIZES_MB = (100, 400, 800, 1600)
ROUNDS = 3
LAUNCHER = Path(warmhold_entrypoint.__file__).with_name("launcher.py")
PROCESS = """
import os, sys, time
held = os.urandom(int(sys.argv[1]))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


class Quiet:
    """An engine that serves nobody: nothing has to be held."""

    def hold(self) -> None:
        """Nothing comes in."""

    def canary(self) -> str:
        """Nothing is asked."""
        return ""

    def quiesce(self) -> None:
        """Nothing is mapped."""

    def resume(self) -> None:
        """Nothing is held."""


def start(size_bytes: int) -> int:
    """Start the process as the runner starts an engine; return its PID once it holds its bytes."""
    reader, writer = os.pipe()
    argv = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getuid()), str(tree.ENGINE_GROUP)]
    argv += [sys.executable, "-I", "-c", PROCESS, str(size_bytes)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer)
    os.close(writer)
    if b"ready" not in os.read(reader, 4096):
        raise RuntimeError("the process did not start")
    return process.pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    tree.reap_adopted()


def bring_back(store: Store) -> dict[str, float]:
    """Restore, end it again; return the seconds, in all and by phase."""
    reader, writer = os.pipe()
    began = time.monotonic()
    restored = restore(store, "one", writer)
    seconds = time.monotonic() - began
    os.close(restored.pidfd)
    end(restored.pid)
    os.close(reader)
    os.close(writer)
    return {"seconds": seconds, **restored.phases}


def read_s(files: list[Path], fresh: bool) -> float:
    """Seconds of reading the files once, out of the page cache or (fresh) from the disk."""
    if fresh:
        page_cache.drop(files)
    else:
        page_cache.fill(files)
    began = time.monotonic()
    page_cache.fill(files)
    return time.monotonic() - began


def measure(size_bytes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir="/var/lib/warmhold") as folder:
        store = Store(Path(folder) / "snapshots")
        pid = start(size_bytes)
        made = create(pid, Quiet(), store, "one", {})
        end(pid)
        os.sync()  # pages that are not on the disk yet cannot be dropped
        files = [path for path in store.path("one").rglob("*") if path.is_file()]
        warm, cold = [], []
        for _ in range(ROUNDS):
            page_cache.fill(files)
            warm.append(bring_back(store))
            page_cache.drop(files)
            cold.append(bring_back(store))
        best, best_cold = (min(rows, key=lambda row: row["seconds"]) for rows in (warm, cold))
        row = {
            "image_bytes": made.image_bytes,
            "warm_s": best["seconds"],
            "warm_verify_s": best["verify"],
            "warm_criu_s": best["criu"],
            "cold_s": best_cold["seconds"],
            "memory_read_s": min(read_s(files, fresh=False) for _ in range(ROUNDS)),
            "disk_read_s": min(read_s(files, fresh=True) for _ in range(ROUNDS)),
        }
    print({name: round(value, 3) for name, value in row.items()}, file=sys.stderr, flush=True)
    return row


def main() -> None:
    tree.become_subreaper()
    pids.raise_cursor(1000)
    sizes = [int(size) for size in sys.argv[1:]] or SIZES_MB
    print(json.dumps([measure(size * 1_000_000) for size in sizes]))


if __name__ == "__main__":
    main()
