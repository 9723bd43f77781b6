# SPDX-License-Identifier: Apache-2.0
"""A GPU's weights between a vault and a flat file, by a process of its own, over a driver without a
GPU, whose memory can be read here."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cuda import build_fake_cuda
from vault_process import open_fds, running_vault
from warmhold_entrypoint.gpus import gpu_weights
from warmhold_entrypoint.running import tree
from warmhold_entrypoint.snapshot_mode.flat_weights import open_weights, publish_flat, write_flat
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.cuda_driver import Driver
from warmhold_wcache.cuda_segments import CudaSegments
from warmhold_wcache.generation import Generation, Segment

CODE = "snapshot.weights-absent"
KEY = {"model": "m"}
DEVICE = "cuda:00010203-0405-0607-0809-0a0b0c0d0e0f"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
UNIT = 2 << 20
# Less than a piece of a checksum, and more than one.
SIZES = (UNIT, 9 * UNIT, 2 * UNIT)
CONTENT = [os.urandom(size) for size in SIZES]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(autouse=True)
def stand(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process finds the driver and our code, and a vault takes memfds for the driver's. What it
    was started for has ended afterwards."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    paths = [str(ROOT / name) for name in ("entrypoint", "snapshot", "wcache")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setitem(segments._CHECKS, "cuda-vmm", lambda index, fd, size: fd)
    before = open_fds()
    yield
    assert open_fds() == before
    assert [process.pid for process in tree.find_below(os.getpid())] == []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "snapshots")


@pytest.fixture
def vault(tmp_path: Path, library: Path) -> Iterator[Path]:
    """A vault with a generation on the GPU."""
    memory = CudaSegments(0, Driver(str(library)))
    fds = []
    for content in CONTENT:
        fd, address = memory.allocate(len(content))
        memory.write(address, memoryview(bytearray(content)))
        memory.unmap(address, len(content))
        fds.append(fd)
    made = tuple(Segment(size, 4096, "c0") for size in SIZES)
    generation = Generation(KEY, {}, "cuda-vmm", DEVICE, "m", made, (), {}, {})
    with running_vault(tmp_path) as (path, _):
        with VaultClient(path) as client:
            client.publish(generation, fds)
            client.release(generation.id)
        for fd in fds:
            os.close(fd)
        yield path


@pytest.fixture
def written(vault: Path, store: Store) -> str:
    """The id of that generation, which is in a flat file; the vault has dropped it."""
    with VaultClient(vault) as client:
        (row,) = client.stat()
        write(vault, store)
        client.release(row["id"])
        client.drop(row["id"])
    return str(row["id"])


def write(vault: Path, store: Store) -> None:
    """As a maker does it, whose end removes what no artifact needs."""
    with VaultClient(vault) as client:
        (row,) = client.stat()
    with open_weights(vault, {row["id"]}) as (weights,):
        write_flat(vault, store, weights)


def write_in_vain(vault: Path, store: Store) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught, store.draft("one"):
        write(vault, store)
    left = list(store.flat.folder.iterdir()) if store.flat.folder.exists() else []
    assert left == [], "a process that is killed leaves nothing"
    return caught.value


def publish_in_vain(vault: Path, store: Store, generation_id: str) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, generation_id, vault)
    with VaultClient(vault) as client:
        assert client.stat() == []
    return caught.value


def test_there_and_back(vault: Path, store: Store, written: str) -> None:
    place = store.flat.folder / written
    assert place.read_bytes()[: sum(SIZES)] == b"".join(CONTENT)
    assert publish_flat(store, written, vault) == sum(SIZES)
    with VaultClient(vault) as client:
        (row,) = client.stat()
        assert (row["id"], row["holders"]) == (written, []), "no process holds it"
        found, fds = client.fetch(KEY)
        client.release(written)
    assert (found.backend, found.device) == ("cuda-vmm", DEVICE)
    assert found.segments == tuple(Segment(size, 0, "c0") for size in SIZES)
    for fd, content in zip(fds, CONTENT, strict=True):
        assert os.pread(fd, len(content), 0) == content
        os.close(fd)


def test_it_is_written_once(
    vault: Path, store: Store, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_flat(store, written, vault)
    monkeypatch.setenv("FAKE_CUDA_ABSENT", "1")  # the GPU is not even looked at
    write(vault, store)
    store.flat.remove(written)
    with pytest.raises(SnapshotError):
        write(vault, store)


@pytest.mark.parametrize(
    ("name", "value", "detail"),
    [
        ("FAKE_CUDA_NO_CONTEXT", "1", "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("FAKE_CUDA_ABSENT", "1", "cuInit: error (100)"),
        ("LD_LIBRARY_PATH", "/nowhere", "wcache.unsupported: the CUDA driver"),
        ("FAKE_CUDA_NO_ACCESS", "1", "cuMemSetAccess"),
        ("FAKE_CUDA_COPY", "killed", "its process ended with -9"),
    ],
)
def test_what_cannot_be_read(
    vault: Path, store: Store, monkeypatch: pytest.MonkeyPatch, name: str, value: str, detail: str
) -> None:
    monkeypatch.setenv(name, value)
    error = write_in_vain(vault, store)
    assert error.code == CODE and detail in error.detail


@pytest.mark.parametrize(
    ("name", "value", "detail"),
    [
        ("FAKE_CUDA_FULL", "2", "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("FAKE_CUDA_NO_CONTEXT", "1", "cuDevicePrimaryCtxRetain"),
        ("FAKE_CUDA_COPY", "killed", "its process ended with -9"),
    ],
)
def test_what_cannot_be_brought_back(
    vault: Path,
    store: Store,
    written: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    detail: str,
) -> None:
    monkeypatch.setenv(name, value)
    error = publish_in_vain(vault, store, written)
    assert error.code == CODE and detail in error.detail
    store.flat.verify(written, checksums=True)


def test_too_little_time(vault: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_COPY", "hangs")
    monkeypatch.setattr(gpu_weights, "_START_S", 0.5)
    error = write_in_vain(vault, store)
    assert error.code == CODE and "it took longer than" in error.detail


def test_a_stop_ends_it(
    vault: Path, store: Store, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_COPY", "hangs")
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 3:
            raise SnapshotError("snapshot.stopped", "a stop")

    with pytest.raises(SnapshotError) as caught:
        publish_flat(store, written, vault, stop)
    assert caught.value.code == "snapshot.stopped" and set(calls) == {(0, sum(SIZES))}
    store.flat.verify(written, checksums=True)


@pytest.mark.parametrize("place", [0, UNIT, sum(SIZES) - 1])
def test_a_damaged_byte(vault: Path, store: Store, written: str, place: int) -> None:
    with (store.flat.folder / written).open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    error = publish_in_vain(vault, store, written)
    assert error.code == "snapshot.weights-damaged" and "other bytes" in error.detail
    assert publish_in_vain(vault, store, written).code == CODE, "it was removed"


@pytest.mark.parametrize("room", [0, UNIT, sum(SIZES) + 10])
def test_no_room(vault: Path, store: Store, room: int) -> None:
    kept, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        error = write_in_vain(vault, store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kept, hard))
    assert error.code == "snapshot.disk"


def test_weights_of_another_gpu(vault: Path, store: Store) -> None:
    """Identity rejects such a snapshot; here the driver shows none of that UUID."""
    device = "cuda:ffffffff-0405-0607-0809-0a0b0c0d0e0f"
    with VaultClient(vault) as client:
        (row,) = client.stat()
    with open_weights(vault, {row["id"]}) as (weights,):
        other = weights.description.replace(DEVICE.encode(), device.encode())
        with pytest.raises(SnapshotError) as caught:
            write_flat(vault, store, replace(weights, description=other))
    assert caught.value.code == CODE and "cuInit: error (100)" in caught.value.detail


def test_it_ends_with_whom_it_works_for(
    vault: Path, store: Store, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_COPY", "hangs")
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "warmhold_entrypoint.gpus.gpu_weights_program", "publish"),
            *(str(store.folder), written, str(vault)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 1
        assert process.stdout.read() == b"", "it had nothing to say yet"
