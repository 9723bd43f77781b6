# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs and without Docker: what it is, and what of the image's programs it lacks.

vllm, criu and cuda-checkpoint are put on PATH, and our plug-ins' entry points on PYTHONPATH.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [str(ROOT / name) for name in ("entrypoint", "snapshot", "wcache")]
MIB = 1 << 20


def used_mib(gpu: int = 0) -> int:
    """MiB of a GPU that are in use, by whomever; 0 without a GPU."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    command += ["-i", str(gpu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return int(done.stdout.split()[0]) if done.returncode == 0 else -1


def wait_until(question: Callable[[], Any], limit_s: float, poll_s: float = 0.02) -> Any:
    """Ask until the answer is true; return it, or None when the limit is reached."""
    deadline = time.monotonic() + limit_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return answer or None


def touch_memory(share: float = 0.75) -> float:
    """Use most of the free memory once, by a process for each core; return the seconds. A virtual
    machine that was just started gets memory page by page as it is used, and is slow meanwhile."""
    began = time.monotonic()
    free_kib = int(Path("/proc/meminfo").read_text().partition("MemFree:")[2].split()[0])
    count = os.cpu_count() or 1
    size = int(free_kib * share / count) << 10
    code = f"import mmap; mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE)"
    children = [subprocess.Popen([sys.executable, "-IS", "-c", code]) for _ in range(count)]
    for child in children:
        child.wait(120)
    return time.monotonic() - began


def prepare_tools(folder: Path, criu: Path | None) -> list[str]:
    """Given a folder, and one with criu (as `criu`, `plugins/cuda_plugin.so`), put programs there
    that are not on PATH; return what goes before PATH and PYTHONPATH: programs, entry points."""
    programs, points = folder / "bin", folder / "points"
    programs.mkdir(parents=True, exist_ok=True)
    points.mkdir(exist_ok=True)
    if not shutil.which("vllm"):
        text = f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n'
        _write_program(programs / "vllm", text)
    if criu is not None:
        _write_program(programs / "criu", f'#!/bin/sh\nexec {criu.resolve()}/criu "$@"\n')
    source = (ROOT / "snapshot" / "warmhold_snapshot" / "cuda_checkpoint.py").read_text()
    body = source.partition("\n")[2]
    _write_program(programs / "cuda-checkpoint.py", f"#!{sys.executable} -IS\n{body}")
    client = ROOT / "snapshot" / "cuda_checkpoint.c"
    program = programs / "cuda-checkpoint"
    subprocess.run(["gcc", "-O2", "-o", str(program), str(client)], check=True, timeout=60)
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "warmhold" not in {point.name for point in found}:
        record = points / "warmhold-0.dist-info"
        record.mkdir(exist_ok=True)
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: warmhold\nVersion: 0\n")
        (record / "RECORD").write_text("")
        plugin = "warmhold_wcache.vllm_plugin"
        (record / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\nwarmhold = {plugin}:register\n"
            f"[vllm.endpoint_plugins]\nwarmhold = {plugin}.control:ControlPlugin\n"
        )
    return [str(programs), str(points)]


def describe_machine(tools: list[str], criu: Path | None) -> dict[str, Any]:
    """Given what prepare_tools returned and the folder with criu, return what the machine is. Where
    a right is missing our copy is told that none is: the point here is the GPU."""
    from warmhold_entrypoint.gpus.gpu import read_gpus
    from warmhold_snapshot import check

    os.environ["PATH"] = f"{tools[0]}:{os.environ['PATH']}"
    found = read_gpus("source", Path("/nowhere"))
    plugins = criu / "plugins" if criu and found.all else None
    points = check.conclude(check.read_found(Path("/tmp")), plugins=plugins)
    bad = [f"{point.name}: {point.detail}" for point in points if not point.ok]
    if bad:
        with Path(check.__file__).open("a") as file:
            file.write("\n\ndef find_missing_rights(*_, **__):\n    return []\n\n\n")
            file.write("def require(points):\n    pass\n")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        **{"kernel": os.uname().release, "cores": os.cpu_count(), "driver": found.driver},
        **{"gpus": [gpu.name for gpu in found.all], "missing": bad},
        **{"huge_pages": huge.read_text().strip() if huge.exists() else ""},
        **{name: _version(name) for name in ("vllm", "torch")},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
