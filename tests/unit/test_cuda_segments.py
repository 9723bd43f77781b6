# SPDX-License-Identifier: Apache-2.0
"""CUDA segments over a driver without a GPU, whose device addresses can be read here."""

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_cuda import build_fake_cuda
from vault_process import open_fds
from warmhold_wcache.cuda_driver import CudaError, Driver
from warmhold_wcache.cuda_segments import READ_WRITE, CudaSegments
from warmhold_wcache.errors import WcacheError

SIZE = 2 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def memory(library: Path) -> Iterator[CudaSegments]:
    """Segments of which no handle and no descriptor is left."""
    before = open_fds()
    yield CudaSegments(0, Driver(str(library)))
    assert open_fds() == before
    assert ctypes.CDLL(str(library)).fake_open_handles() == 0


def rights(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line.split()[1]
    return "none"


def read(address: int) -> bytes:
    return ctypes.string_at(address, 4)


def filled(memory: CudaSegments, content: bytes = b"abcd") -> tuple[int, int]:
    fd, address = memory.allocate(SIZE)
    ctypes.memmove(address, content, 4)
    return fd, address


def test_a_descriptor_alone_keeps_the_memory(memory: CudaSegments) -> None:
    assert memory.granularity_bytes == SIZE
    fd, address = filled(memory)
    assert not os.get_inheritable(fd)
    memory.unmap(address, SIZE)
    again = memory.map(fd, SIZE)
    os.close(fd)
    assert (read(again), rights(again)) == (b"abcd", "r--s")
    memory.unmap(again, SIZE)


def test_two_mappings_are_one_memory(memory: CudaSegments) -> None:
    fd, address = filled(memory)
    other = memory.map(fd, SIZE)
    ctypes.memmove(address, b"more", 4)
    assert read(other) == b"more"
    os.close(fd)
    memory.unmap(address, SIZE)
    memory.unmap(other, SIZE)


def test_writing_ends(memory: CudaSegments) -> None:
    fd, address = filled(memory)
    assert rights(address) == "rw-s"
    memory.forbid_writing(address, SIZE)
    assert (rights(address), read(address)) == ("r--s", b"abcd")
    os.close(fd)
    memory.unmap(address, SIZE)


def test_a_segment_comes_back_at_its_address(memory: CudaSegments) -> None:
    fd, address = filled(memory)
    memory.unmap_keep_address(address, SIZE)
    memory.unmap_keep_address(address, SIZE)  # again is fine
    assert rights(address) == "---p"
    for _ in range(2):  # the second time over what is mapped there
        assert memory.map(fd, SIZE, address) == address
        assert (read(address), rights(address)) == (b"abcd", "r--s")
    os.close(fd)
    memory.unmap(address, SIZE)
    assert rights(address) == "none"


def test_the_hosts_memory_goes_there_and_back_in_any_thread(memory: CudaSegments) -> None:
    fd, address = filled(memory)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(memory.write, address + 2, memoryview(bytearray(b"host"))).result()
    found = memoryview(bytearray(b"." * 8))
    memory.read(address, found[1:7])
    assert (bytes(found), read(address)) == (b".abhost.", b"abho")
    os.close(fd)
    memory.unmap(address, SIZE)


def test_a_private_copy_is_nobody_elses(memory: CudaSegments) -> None:
    fd, address = filled(memory)
    mine = memory.map(fd, SIZE)
    memory.make_private(mine, SIZE)
    assert (read(mine), rights(mine)) == (b"abcd", "rw-s")
    ctypes.memmove(mine, b"mine", 4)
    assert (read(address), read(mine)) == (b"abcd", b"mine")
    os.close(fd)
    memory.unmap(address, SIZE)
    memory.unmap(mine, SIZE)


def test_a_driver_that_cannot_forbid_writing(
    memory: CudaSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_NO_READ_ONLY", "1")
    fd, address = filled(memory)
    mine = memory.map(fd, SIZE)
    assert rights(mine) == "rw-s"
    assert not memory.can_forbid_writing
    os.close(fd)
    memory.unmap(address, SIZE)
    memory.unmap(mine, SIZE)


def test_no_memory(memory: CudaSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_FULL", "0")
    with pytest.raises(CudaError, match=r"cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught:
        memory.allocate(SIZE)
    assert (caught.value.code, caught.value.result) == ("wcache.cuda", 2)


def test_what_fails_halfway_leaves_nothing(
    memory: CudaSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, address = filled(memory)
    monkeypatch.setenv("FAKE_CUDA_NO_ACCESS", "1")
    with pytest.raises(CudaError, match="cuMemSetAccess"):
        memory.allocate(SIZE)
    with pytest.raises(CudaError, match="cuMemSetAccess"):
        memory.map(fd, SIZE, rights=READ_WRITE)
    with pytest.raises(CudaError, match="cuMemSetAccess"):
        memory.map(fd, SIZE, address)
    monkeypatch.delenv("FAKE_CUDA_NO_ACCESS")
    assert memory.map(fd, SIZE, address) == address  # its range is reserved still
    os.close(fd)
    memory.unmap(address, SIZE)


@pytest.mark.parametrize("size", [0, 1, SIZE + 4096, 2 * SIZE])
def test_a_wrong_size_is_refused(memory: CudaSegments, size: int) -> None:
    """What a description says of a size is compared by the driver alone."""
    fd, address = filled(memory)
    with pytest.raises(CudaError):
        memory.map(fd, size)
    os.close(fd)
    memory.unmap(address, SIZE)


def test_the_stack_of_the_device_s_threads(memory: CudaSegments) -> None:
    assert memory.exchange_stack_limit(0) == 1024
    with ThreadPoolExecutor(1) as pool:  # one that has no context yet
        assert pool.submit(memory.exchange_stack_limit, 6000).result() == 0
    assert memory.exchange_stack_limit(1024) == 6000


def test_a_descriptor_that_is_none(memory: CudaSegments) -> None:
    with pytest.raises(CudaError, match="cuMemImportFromShareableHandle"):
        memory.map(-1, SIZE)


def test_a_device_that_is_not_there(library: Path) -> None:
    with pytest.raises(CudaError, match="cuDeviceGet"):
        CudaSegments(1, Driver(str(library)))


def test_without_a_driver() -> None:
    with pytest.raises(WcacheError, match=r"wcache\.unsupported: the CUDA driver: .*nowhere"):
        Driver("/nowhere/libcuda.so.1")


def test_a_library_that_is_no_driver() -> None:
    with pytest.raises(WcacheError, match="cuInit"):
        Driver("libc.so.6")
