# SPDX-License-Identifier: Apache-2.0
"""Which GPUs there are, asked of a driver without a GPU."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_cuda import build_fake_cuda
from warmhold_entrypoint.gpus import gpu, gpu_probe
from warmhold_entrypoint.gpus.gpu import Gpu, Gpus, find_gpu_fault, parse, read_gpus

UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"
H200 = Gpu(UUID, 141 << 30, "9.0", "NVIDIA H200")
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Nov 3 01:02:03 UTC 2026\n"
OPEN = MODULE.replace("x86_64 Kernel Module", "Open Kernel Module for x86_64")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_cuda(tmp_path_factory.mktemp("cuda")).parent


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel module's version; the device file is another one."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    version = tmp_path / "version"
    version.write_text(MODULE)
    return version


def read(version: Path) -> Gpus:
    return read_gpus("0.33.0", version.with_name("none"), version, version)


def test_a_gpu(driver: Path) -> None:
    found = read(driver)
    assert found == Gpus("580.159.04", True, (H200,), "", 12040)
    assert not found.all[0].is_slice


def test_nothing_is_asked_without_a_driver_or_where_vllm_is_for_cpus(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", run)
    assert read_gpus("0.33.0", driver.parent, driver.with_name("none"), driver) == Gpus()
    assert read_gpus("0.32.0+cpu", driver.parent, driver, driver) == Gpus()


def test_a_driver_is_asked_once_in_a_container(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: asked.append(a) or run(*a, **k))

    def look() -> Gpus:
        return read_gpus("0.33.0", tmp_path, driver, driver)

    first = look()
    assert look() == first and first.all and len(asked) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert look() == first and len(asked) == 2
    driver.write_text(OPEN.replace("580.159.04", "590.1"))
    assert look().driver == "590.1" and len(asked) == 3
    (tmp_path / gpu.FILE_NAME).write_text("no JSON")
    assert look().all and len(asked) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("FAKE_CUDA_ABSENT", "1")
    assert look().error and look().error and len(asked) == 6, "what failed is asked again"


def test_several_and_slices(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_COUNT", "2")
    monkeypatch.setenv("FAKE_CUDA_NAME", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    found = read(driver)
    assert len({item.uuid for item in found.all}) == 2
    assert all(item.is_slice for item in found.all)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"FAKE_CUDA_ABSENT": "1"}, "shows no GPU"),
        ({"FAKE_CUDA_BROKEN": "1"}, "cuInit: CUDA_ERROR_INVALID_VALUE (1)"),
        ({"LD_LIBRARY_PATH": "/nowhere"}, "libcuda.so.1"),
    ],
)
def test_a_driver_that_does_not_work(
    driver: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, str], said: str
) -> None:
    for name, value in fault.items():
        monkeypatch.setenv(name, value)
    found = read(driver)
    assert found.all == () and said in found.error
    (told,) = find_gpu_fault(found, "0.33.0", ())
    assert (told.code, told.detail) == ("gpu.absent", found.error)


def test_a_driver_that_does_not_answer(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = driver.with_name("sleeper.py")
    sleeper.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu, "_PROBE", sleeper)
    monkeypatch.setattr(gpu, "_LIMIT_S", 0.2)
    assert "does not answer" in read(driver).error
    sleeper.write_text("raise SystemExit('broken')\n")
    monkeypatch.setattr(gpu, "_LIMIT_S", 20.0)
    assert read(driver).error == "the NVIDIA driver cannot be asked: broken"


def test_a_driver_that_is_too_old_for_checkpoints(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_fake_cuda(tmp_path, "NO_CHECKPOINT")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = read(driver)
    assert found.all and not found.can_checkpoint


@pytest.mark.parametrize(
    ("text", "version"), [(MODULE, "580.159.04"), (OPEN, "580.159.04"), ("what?", "")]
)
def test_the_drivers_version(driver: Path, text: str, version: str) -> None:
    driver.write_text(text)
    assert read(driver).driver == version


def test_compiled_code_has_a_folder_for_each_kind_of_gpu_and_driver() -> None:
    found = Gpus("580.1", True, (H200,))
    others = [
        Gpus("570.2", True, (H200,)),
        Gpus("580.1", True, (Gpu(UUID, 1, "9.0", "NVIDIA H100"),)),
    ]
    assert found.device.startswith("cuda-sm90-")
    assert len({found.device, *(other.device for other in others)}) == 3
    assert Gpus("580.1", True, (Gpu("x", 1, "9.0", H200.name),)).device == found.device


def test_what_is_asked_for_and_not_there_is_a_fault() -> None:
    built = ("torch-2.14.0", "nvidia_cuda_runtime-13.0.96")
    (told,) = find_gpu_fault(Gpus(), "0.33.0", built)
    assert told.code == "gpu.absent" and "/dev/nvidiactl" in told.detail
    assert find_gpu_fault(Gpus(), "0.32.0+cpu", built) == []
    assert find_gpu_fault(Gpus(), "none", ("torch-2.14.0",)) == []
    assert find_gpu_fault(Gpus("580.1", True, (H200,)), "0.33.0", built) == []


@pytest.mark.parametrize("package", ["nvidia_cuda_runtime-13.0.96", "nvidia_cuda_runtime_cu12-12"])
def test_a_driver_too_old_for_what_is_built(driver: Path, package: str) -> None:
    """The fake driver runs CUDA 12.4; minor versions do not count."""
    found = find_gpu_fault(read(driver), "0.33.0", ("torch-2.14.0", package))
    if "cu12" in package:
        assert found == []
        return
    assert [fault.code for fault in found] == ["gpu.driver"]
    assert "CUDA 13.0.96, and the driver 580.159.04 runs CUDA 12.4" in found[0].detail


def test_a_name_with_spaces() -> None:
    text = f"version 13000\ncheckpoint 1\ngpu {UUID} 5 12.0 NVIDIA RTX PRO 6000\n"
    assert parse(text, "").all == (Gpu(UUID, 5, "12.0", "NVIDIA RTX PRO 6000"),)


def test_the_probe_imports_little(driver: Path) -> None:
    """It stands before every start on a GPU."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-IS", "-X", "importtime", gpu_probe.__file__],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.startswith("version 12040\n")
    for name in ("json", "re", "subprocess", "dataclasses", "pathlib"):
        assert not any(line.endswith(f" {name}") for line in done.stderr.splitlines()), name
    assert time.monotonic() - began < 5
