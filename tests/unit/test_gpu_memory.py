# SPDX-License-Identifier: Apache-2.0
"""GPU memory before a start: what has to be free, who holds it, and the wait for it."""

import os
import threading
from pathlib import Path

import pytest
from fake_cuda import build_fake_nvml
from warmhold_entrypoint.arguments import EngineArguments
from warmhold_entrypoint.gpus import gpu_memory
from warmhold_entrypoint.gpus.gpu import Gpu
from warmhold_entrypoint.gpus.gpu_memory import (
    Need,
    build_need,
    describe_holders,
    find_missing,
    is_device,
    read_free,
    wait_for_memory,
)
from warmhold_entrypoint.running import tree

UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"
GIB = 1 << 30
H200 = Gpu(UUID, 100 * GIB, "9.0", "NVIDIA H200")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def free(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the free bytes of the GPU."""
    path = tmp_path / "free"
    path.write_text(str(90 * GIB))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_NVML_FREE", str(path))
    return path


def test_what_an_engine_asks_for() -> None:
    def need(*argv: str) -> Need:
        return build_need(EngineArguments(argv), [H200])

    assert need().by_uuid == {UUID: int(0.92 * 100 * GIB)}
    half = need("--gpu-memory-utilization", "0.5")
    assert half.by_uuid == {UUID: 50 * GIB}
    assert half.beside({UUID: 20 * GIB, "another": GIB}).by_uuid == {UUID: 30 * GIB}
    assert half.beside({UUID: 60 * GIB}).by_uuid == {UUID: 0}
    cache = need("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "20G")
    assert cache.by_uuid == cache.beside({UUID: 60 * GIB}).by_uuid == {UUID: 20 * GIB}
    for text in ("half", "nan", "inf", "1e400"):
        assert need("--gpu-memory-utilization", text).by_uuid == {UUID: 0}
    part = Gpu("u", GIB, "8.0", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert build_need(EngineArguments(()), [part]).by_uuid == {}


def test_nvml_tells_free_bytes(free: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_free([UUID]) == {UUID: 90 * GIB}
    assert read_free([]) == {}
    assert read_free(["another"]) == {}
    monkeypatch.delenv("FAKE_NVML_FREE")
    assert read_free([UUID]) == {}
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert read_free([UUID]) == {}


def test_an_unknown_gpu_lacks_nothing() -> None:
    need = Need({"a": 5, "b": 5, "c": 5})
    assert find_missing(need, {"a": 3, "b": 9}) == {"a": 2}


def test_memory_that_is_free_is_not_waited_for(free: Path) -> None:
    assert wait_for_memory(Need({UUID: 90 * GIB}), 600, threading.Event()) == ""


def test_memory_that_comes_back(free: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def read(uuids: list[str]) -> dict[str, int]:
        looks.append(uuids)
        if len(looks) == 3:
            free.write_text(str(95 * GIB))
        return read_free(uuids)

    monkeypatch.setattr(gpu_memory, "read_free", read)
    monkeypatch.setattr(gpu_memory, "_POLL_S", 0.01)
    assert wait_for_memory(Need({UUID: 95 * GIB}), 600, threading.Event()) == ""
    assert len(looks) == 3


def test_the_bound_and_a_stop_end_the_wait(free: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "find_holders", list)
    said = wait_for_memory(Need({UUID: 91 * GIB}), 0, threading.Event())
    assert said.startswith(f"GPU {UUID} lacks 1024 MiB of the {91 * 1024} that")
    assert said.endswith("held by no process of this container")
    stop = threading.Event()
    stop.set()
    assert wait_for_memory(Need({UUID: 91 * GIB}), 600, stop)


def test_who_holds_a_gpu_is_read_off_the_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = ["/dev/nvidia0", "/dev/nvidia12", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/null"]
    assert [mark for mark in marks if is_device(mark)] == marks[:2]
    held = tmp_path / "device"
    with held.open("w"):
        monkeypatch.setattr(gpu_memory, "is_device", lambda link: link == str(held))
        assert f":{os.getpid()}" in describe_holders()
    assert describe_holders() == "no process of this container"


def test_who_keeps_the_driver_awake_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tree.Process(7, 1, 1, "cuda-checkpoint"), tree.Process(8, 1, 1, "python3")]
    monkeypatch.setattr(gpu_memory, "find_holders", lambda: found)
    assert describe_holders() == "python3:8"


def test_what_fits_beside_what_others_have() -> None:
    def exceeds(own: int, others: int, *more: str) -> bool:
        arguments = EngineArguments(("--gpu-memory-utilization", "0.5", *more))
        need = build_need(arguments, [H200])
        return need.exceeds({UUID: own * GIB}, {UUID: others * GIB, "another": 90 * GIB})

    assert not exceeds(30, 49)  # 50 with its own, 1 for the context
    assert exceeds(30, 50)
    cache = ("--kv-cache-memory-bytes", "20G")
    assert not exceeds(10, 68, *cache)  # 30 and two contexts: it asks for no share
    assert exceeds(10, 69, *cache)
    assert not Need({UUID: 500 * GIB}).exceeds({}, {UUID: 1})  # of an unknown size
