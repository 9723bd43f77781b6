# SPDX-License-Identifier: Apache-2.0
"""Which NVIDIA GPUs the engine will have, read without torch; nothing is decided here.

Where there is no device file nothing is asked, and a start on a CPU pays nothing. A driver that
nobody uses takes 0.2 s to answer, so that its answer is kept in the run directory, which lives as
long as the container: a restart does not ask again.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import Fault
from ..files import read_json, write_atomically

FILE_NAME = "gpus.json"
_CONTROL = Path("/dev/nvidiactl")
_VERSION = Path("/proc/driver/nvidia/version")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# By these the driver shows a process some of its GPUs, or others first.
_CHOICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_PROBE = Path(__file__).with_name("gpu_probe.py")
_LIMIT_S = 20.0  # a driver that wakes its GPUs up takes seconds
_WORDS = 4
_CPU_BUILD = "+cpu"
_ROCM_BUILD = "+rocm"
_AMD = Path("/dev/kfd")
_CUDA_PACKAGE = "nvidia_cuda_runtime"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `capability` is the compute capability, as 9.0; the UUID is without its prefix."""

    uuid: str
    memory_bytes: int
    capability: str
    name: str

    @property
    def is_slice(self) -> bool:
        """Whether it is a part of one (MIG)."""
        return " MIG " in f"{self.name} "


@dataclass(frozen=True)
class Gpus:
    """What the driver says: its version (as 580.159.04, "" where unknown), whether it can
    checkpoint a process, the GPUs by number, why there are none where one was looked for, and the
    newest CUDA that it can run (13000 for 13.0; 0 where unknown)."""

    driver: str = ""
    can_checkpoint: bool = False
    all: tuple[Gpu, ...] = ()
    error: str = ""
    cuda: int = 0

    @property
    def device(self) -> str:
        """The GPU's kind, as a part of a folder's name: compiled code depends on it."""
        first = self.all[0]
        text = repr((first.name, first.capability, self.driver))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"cuda-sm{first.capability.replace('.', '')}-{digest}"


def read_gpus(
    vllm_version: str, run_dir: Path, control: Path = _CONTROL, version: Path = _VERSION
) -> Gpus:
    """Given vLLM's version and the run directory, return the GPUs of this container; none, and no
    error, where it has no driver, or vLLM is built for CPUs."""
    if vllm_version.endswith(_CPU_BUILD) or not control.exists():
        return Gpus()
    driver = _read_driver(version)
    asked = [_BOOT.read_text().strip(), driver, *(os.environ.get(name) for name in _CHOICES)]
    kept = read_json(run_dir / FILE_NAME) or {}
    if kept.get("asked") == asked:
        return parse(str(kept.get("said")), driver)
    said = _ask()
    found = parse(said, driver)
    if not found.error:
        with suppress(OSError):  # the first plan comes before there is such a folder
            write_atomically(run_dir / FILE_NAME, json.dumps({"asked": asked, "said": said}))
    return found


def _ask() -> str:
    """What the probe prints, or such a line of why it could not."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_PROBE)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"error the NVIDIA driver does not answer: {error}"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        return f"error the NVIDIA driver cannot be asked: {said[-1]}"
    return done.stdout


def find_gpu_fault(gpus: Gpus, vllm_version: str, packages: Sequence[str]) -> list[Fault]:
    """Given what the driver says and what is installed, return a fault where a GPU is asked for,
    by the device file or by vLLM's build, and cannot be used: never a silent run on the CPU."""
    if vllm_version.endswith(_CPU_BUILD):
        return []
    found = [name for name in packages if name.startswith(_CUDA_PACKAGE)]
    built = found[0].rpartition("-")[2] if found else ""
    if gpus.all:
        return _find_old_driver(gpus, built)
    if not (gpus.error or built):
        return []
    detail = gpus.error or "vLLM is built for CUDA, and the container has no /dev/nvidiactl"
    remedy = "start it with compose.gpu.yaml (the host needs the driver and NVIDIA's Container"
    return [Fault("gpu.absent", detail, f"{remedy} Toolkit), or use the image warmhold:cpu")]


def _find_old_driver(gpus: Gpus, built: str) -> list[Fault]:
    """A driver runs what is built for its own major version of CUDA, and for older ones."""
    major = built.partition(".")[0]
    if not gpus.cuda or not major.isdecimal() or gpus.cuda // 1000 >= int(major):
        return []
    speaks = f"{gpus.cuda // 1000}.{gpus.cuda % 1000 // 10}"
    driver = f"the driver {gpus.driver}".rstrip()
    detail = f"vLLM is built for CUDA {built}, and {driver} runs CUDA {speaks}"
    remedy = f"install a driver for CUDA {major} on the host (13: 580 or newer; 12: 525 or newer)"
    return [Fault("gpu.driver", detail, remedy)]


def is_rocm(vllm_version: str) -> bool:
    """Given vLLM's version, tell whether AMD's GPUs are meant: by its build, or the device file."""
    return _ROCM_BUILD in vllm_version or _AMD.exists()


def parse(text: str, driver: str) -> Gpus:
    """Given what the probe printed and the driver's version, return the GPUs."""
    found: list[Gpu] = []
    can_checkpoint, error, cuda = False, "", 0
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "checkpoint":
            can_checkpoint = rest == "1"
        elif kind == "version":
            cuda = int(rest)
        elif kind == "error":
            error = rest
        elif kind == "gpu":
            uuid, size, capability, name = rest.split(" ", _WORDS - 1)
            found.append(Gpu(uuid, int(size), capability, name))
    if not found and not error:
        error = "the NVIDIA driver shows no GPU"
    return Gpus(driver, can_checkpoint, tuple(found), error, cuda)


def _read_driver(path: Path) -> str:
    """The kernel module's version. Its line reads `NVRM version: NVIDIA UNIX x86_64 Kernel Module
    580.159.04  ...`, or `... Open Kernel Module for x86_64  580.159.04  ...`."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", path.read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""
