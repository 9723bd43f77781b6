# SPDX-License-Identifier: Apache-2.0
"""What differs for an engine on a GPU: descriptors, criu's argv, a point, and why a dump failed."""

import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from warmhold_snapshot import awake, check, criu, cuda, cuda_checkpoint, identity
from warmhold_snapshot.check import Found
from warmhold_snapshot.fds import Descriptor, FileStatus, Held, Mapping
from warmhold_snapshot.pids import Process
from warmhold_snapshot.scan import Scan, judge
from warmhold_snapshot.sockets import Sockets

DEVICE = FileStatus(0, 1, stat.S_IFCHR | 0o666, 1, 5)
FOUND = Found((1 << 40) - 1, 0, "4.2.1", "", 1 << 40, "/", 1 << 22)
CUDA = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia15", "/dev/nvidia-uvm"]
CUDA += ["/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"]
OTHERS = ["/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia-caps/other"]
OTHERS += ["/dev/nvidia-modeset", "/dev/infiniband/uverbs0", "/dev/gdrdrv"]


def look(link: str, on_gpu: bool, mapped: bool = False) -> Scan:
    items = () if mapped else (Descriptor(3, link, "", DEVICE),)
    mappings = (Mapping("7f00-7f01", link, 5, DEVICE),) if mapped else ()
    tree = [Process(10, 1, 10, 10, "engine", 1, (10,))]
    return judge(tree, [Held(10, items, mappings)], Sockets(), {}, 1 << 20, on_gpu)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("link", CUDA)
def test_what_cuda_has_open_goes_along_on_a_gpu_alone(link: str, mapped: bool) -> None:
    assert look(link, True, mapped).offenders == ()
    (offender,) = look(link, False, mapped).offenders
    assert offender.kind == "cuda" and link in offender.detail


@pytest.mark.parametrize("link", OTHERS)
def test_other_devices_do_not(link: str) -> None:
    for on_gpu in (False, True):
        (offender,) = look(link, on_gpu).offenders
        assert (offender.kind, offender.detail) == ("device", link)


def test_criu_is_told_where_its_plugins_are() -> None:
    folders = (Path("/i"), Path("/w"))
    dump = [criu.build_dump_argv(1, *folders, Path("/h"), 1, plugins) for plugins in PLACES]
    restore = [criu.build_restore_argv(*folders, Path("/p"), {}, plugins) for plugins in PLACES]
    for without, given in (dump, restore):
        assert "--libdir" not in without and given[given.index("--libdir") + 1] == "/plug"
    assert "--timeout" not in dump[0] and "--timeout" not in restore[1]
    assert dump[1][dump[1].index("--timeout") + 1] == str(cuda.FREEZE_S)


PLACES = (None, Path("/plug"))


def test_what_criu_says_of_processes_without_cuda_is_no_reason() -> None:
    log = (
        "(00.1) Error (cuda_plugin.c:139): cuda_plugin: Failed to launch cuda-checkpoint to"
        " retrieve restore tid: 3 initialization error\n"
        "(00.2) Error (criu/files.c:1): Can't dump file 33 of that type [20666] (chr 195:255)\n"
    )
    lines = criu.key_lines(log)
    assert criu.find_reason(lines).startswith("Can't dump file 33")
    assert "NVML" in cuda.explain(lines)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cuda_plugin: CHECKPOINT_DEVICES failed with CUDA_ERROR_NOT_SUPPORTED", "cudaMallocManag"),
        ("cuda_plugin: PAUSE_DEVICES failed with x", "NCCL"),
        ("unix: External socket is used", ""),
    ],
)
def test_why_a_dump_failed(line: str, said: str) -> None:
    found = cuda.explain(["(00.1) Error (a.c:1): something", line])
    assert said in found and bool(found) == bool(said)


def test_the_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    name = "criu for CUDA"
    assert name not in {point.name for point in check.conclude(FOUND)}
    (bad,) = [point for point in check.conclude(FOUND, plugins=tmp_path) if not point.ok]
    assert bad.name == name and cuda.PLUGIN in bad.detail and cuda.PROGRAM in bad.detail
    (tmp_path / cuda.PLUGIN).write_bytes(b"")
    program = tmp_path / cuda.PROGRAM
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert all(point.ok for point in check.conclude(FOUND, plugins=tmp_path))
    assert not all(point.ok for point in check.conclude(replace(FOUND, free_bytes=0)))


def test_an_identity_tells_a_gpu() -> None:
    assert identity.is_on_gpu({"gpu.uuid": "u", "kernel": "k"})
    assert not identity.is_on_gpu({"kernel": "k", "version.gpu": "x"})


def write_program(folder: Path, text: str) -> None:
    program = folder / cuda.PROGRAM
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def wait_for_the_holders_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "holder":
            thread.join()


def test_the_driver_is_kept_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    text = f'echo "$@" ${cuda_checkpoint.SOCKET} >{tmp_path}/began; cat; touch {tmp_path}/ended'
    write_program(tmp_path, text)
    with awake.awake(None) as variable:
        assert variable == {}
    assert not (tmp_path / "began").exists()
    with pytest.raises(KeyError), awake.awake(tmp_path) as variable:
        while not (tmp_path / "began").exists() or not (tmp_path / "began").read_text():
            time.sleep(0.01)
        assert not (tmp_path / "ended").exists()
        raise KeyError
    assert (tmp_path / "began").read_text() == f"--hold {variable[cuda_checkpoint.SOCKET]}\n"
    assert not Path(variable[cuda_checkpoint.SOCKET]).parent.exists()
    wait_for_the_holders_end()
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("text", ["exit 2", "exec sleep 60", None])
def test_a_driver_that_cannot_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(awake, "_RELEASE_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if text is not None:
        write_program(tmp_path, text)
    with awake.awake(tmp_path):
        pass
    wait_for_the_holders_end()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize(
    ("state", "acts"),
    [("running", []), ("locked", ["unlock"]), ("checkpointed", ["restore", "unlock"])],
)
def test_what_the_driver_was_asked_for_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, acts: list[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    text = f'echo "$@" ${cuda.SOCKET} >>{tmp_path}/asked; [ $1 = --action ] || echo {state}'
    write_program(tmp_path, text)
    cuda.bring_back((7, 12), {cuda.SOCKET: "S"})
    wanted = []
    for pid in (7, 12):
        wanted += [f"--get-state --pid {pid} S"]
        wanted += [f"--action {act} --pid {pid} S" for act in acts]
    assert (tmp_path / "asked").read_text().splitlines() == wanted


def test_a_driver_that_undoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cuda.bring_back((7,), {})


def test_without_a_temporary_folder_nothing_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with awake.awake(tmp_path) as variable:
        assert variable == {}


def test_who_has_a_gpus_file_open(tmp_path: Path) -> None:
    for pid, link in ((7, "/dev/nvidiactl"), (8, "/dev/null"), (9, "pipe:[3]")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(link)
    assert cuda.find_users([6, 7, 8, 9], tmp_path) == (7,)
    assert (cuda.USERS, cuda.SOCKET) == (cuda_checkpoint.USERS, cuda_checkpoint.SOCKET)
    assert cuda.name_users((7, 12)) == {"WARMHOLD_CUDA_PIDS": "7,12"}
    assert (cuda.name_users(()), cuda.name_users(None)) == ({"WARMHOLD_CUDA_PIDS": ""}, {})
