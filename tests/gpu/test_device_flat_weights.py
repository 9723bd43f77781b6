# SPDX-License-Identifier: Apache-2.0
"""A GPU's weights between the real vault and a flat file: written while a process has them mapped,
brought back into new memory when all have gone, and given back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpu_stand import SLACK_BYTES, Child, Vault, near, say, used_bytes, wait_for_used
from warmhold_entrypoint.running import tree
from warmhold_entrypoint.snapshot_mode.flat_weights import open_weights, publish_flat, write_flat
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache.client import VaultClient
from warmhold_wcache.verify import check_resident

COUNT, SIZE = 8, 512 << 20
TOTAL = COUNT * SIZE
CODE = "snapshot.weights-absent"
LEFT_BYTES = 64 << 20  # less than a CUDA context takes
HOG = f"""
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - {LEFT_BYTES}, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "snapshots")


@pytest.fixture
def publisher(vault: Vault, base: int) -> Iterator[Child]:
    """A process that has published a pattern and has it mapped, as an engine that serves."""
    with Child("segments_child.py", "publish", str(vault.socket), str(COUNT), str(SIZE)) as child:
        say(f"published {child.hear()}")
        yield child


def write(vault: Vault, store: Store) -> str:
    """Bring what the vault holds into its flat file; return its id."""
    with VaultClient(vault.socket) as client:
        (row,) = client.stat()
    with open_weights(vault.socket, {row["id"]}) as (weights,):
        began = time.monotonic()
        write_flat(vault.socket, store, weights)
        seconds = time.monotonic() - began
    say(f"written in {seconds:.2f} s, {TOTAL / seconds / 1e9:.2f} GB/s with the process's start")
    return str(row["id"])


def write_and_forget(vault: Vault, store: Store, publisher: Child, base: int) -> str:
    """The same, and end all who have it, so that the file alone does."""
    generation_id = write(vault, store)
    publisher.kill()
    vault.drop_all()
    left = wait_for_used(near(base))
    say(f"dropped: {(left - base) >> 20} MiB more than before")
    assert near(base)(left)
    return generation_id


@contextmanager
def full_gpu() -> Iterator[None]:
    """A process that holds nearly all of the GPU's memory, which is given back afterwards."""
    used = used_bytes()
    command = [sys.executable, "-c", HOG]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
        assert hog.stdout is not None and hog.stdout.readline() == b"held\n"
        yield
    wait_for_used(near(used))


def count_segments(pid: int) -> int:
    """How many of the driver's descriptors a process has that could be segments."""
    try:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115
    except OSError:
        return 0
    return sum(link.startswith("/dev/nvidiactl") for link in links)


def test_there_and_back(vault: Vault, store: Store, publisher: Child, base: int) -> None:
    generation_id = write_and_forget(vault, store, publisher, base)
    began = time.monotonic()
    assert publish_flat(store, generation_id, vault.socket) == TOTAL
    seconds = time.monotonic() - began
    say(f"back in {seconds:.2f} s, {TOTAL / seconds / 1e9:.2f} GB/s with the process's start")
    kept = wait_for_used(near(base + TOTAL))
    say(f"no CUDA process is left: {(kept - base) >> 20} MiB more than before")
    assert near(base + TOTAL)(kept)
    maps = Path("/proc/self/maps").read_text()
    assert "libcuda.so" not in maps, "who has it done gets no CUDA"
    with VaultClient(vault.socket) as client:
        (row,) = client.stat()
        assert (row["id"], row["holders"]) == (generation_id, [])
        report = check_resident(client, row)  # against the publisher's own checksums, on the GPU
    say(report.line())
    assert report.sound and report.checked == COUNT
    with Child("segments_child.py", "remap", str(vault.socket)) as child:
        seen = child.hear()
        say(f"mapped {seen}")
    assert seen["sound"] and seen["equal"]
    vault.drop_all()
    left = wait_for_used(near(base))
    say(f"dropped: {(left - base) >> 20} MiB more than before")
    assert left <= base + SLACK_BYTES


def test_a_damaged_byte(vault: Vault, store: Store, publisher: Child, base: int) -> None:
    generation_id = write_and_forget(vault, store, publisher, base)
    with (store.flat.folder / generation_id).open("r+b") as file:
        file.seek(TOTAL - 1)
        (byte,) = file.read(1)
        file.seek(TOTAL - 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, generation_id, vault.socket)
    say(str(caught.value))
    assert caught.value.code == "snapshot.weights-damaged"
    assert near(base)(wait_for_used(near(base)))


def test_a_process_that_is_killed(vault: Vault, store: Store, publisher: Child, base: int) -> None:
    generation_id = write_and_forget(vault, store, publisher, base)
    killed = []

    def kill(done: int, total: int) -> None:
        for process in tree.find_below(os.getpid()):
            if count_segments(process.pid) > COUNT:  # it has its memory, and copies
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)

    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, generation_id, vault.socket, kill)
    say(f"killed {killed}: {caught.value}")
    assert caught.value.code == CODE and "ended with -9" in caught.value.detail
    left = wait_for_used(near(base))
    say(f"{(left - base) >> 20} MiB more than before")
    assert near(base)(left)
    store.flat.verify(generation_id, checksums=True)


def test_a_gpu_without_room(vault: Vault, store: Store, publisher: Child, base: int) -> None:
    with full_gpu():
        with pytest.raises(SnapshotError) as caught:
            write(vault, store)
        say(str(caught.value))
        assert caught.value.code == CODE
    generation_id = write_and_forget(vault, store, publisher, base)
    with full_gpu():
        with pytest.raises(SnapshotError) as caught:
            publish_flat(store, generation_id, vault.socket)
        say(str(caught.value))
        assert caught.value.code == CODE
    assert publish_flat(store, generation_id, vault.socket) == TOTAL
