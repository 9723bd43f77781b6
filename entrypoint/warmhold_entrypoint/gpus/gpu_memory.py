# SPDX-License-Identifier: Apache-2.0
"""Whether the GPU has the memory that an engine will ask for; waited for, within a bound.

A driver takes memory back some time after a process was killed, and vLLM ends where it finds too
little free. Who holds memory is read off /proc: in containers the driver names nobody.
"""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from warmhold_snapshot.cuda import PROGRAM

from ..arguments import EngineArguments, read_bytes
from ..log import Log
from ..running import tree
from .gpu import Gpu

CODE = "gpu.memory"
_PROBE = Path(__file__).with_name("gpu_memory_probe.py")
_LIMIT_S = 20.0
_POLL_S = 0.5
_MIB = 1 << 20
# Of vLLM 0.33's CacheConfig.gpu_memory_utilization.
_UTILIZATION = 0.92
# An engine has more than its share: the context of CUDA, half a GiB.
_CONTEXT_BYTES = 1 << 30

_log = Log("gpu")


@dataclass(frozen=True)
class Need:
    """Bytes that have to be free on each GPU, by UUID, beside what is resident on each:
    `mapped_bytes` that the engine maps, and `others_bytes` that no waiting brings back."""

    by_uuid: Mapping[str, int]
    others_bytes: int = 0
    mapped_bytes: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_crowded(self) -> bool:
        """Whether a GPU is too small for the engine beside all that is resident."""
        beside = self.mapped_bytes + self.others_bytes + _CONTEXT_BYTES
        return any(
            size + beside > self.sizes.get(uuid, math.inf) for uuid, size in self.by_uuid.items()
        )

    def beside(self, mapped_bytes: int, others_bytes: int) -> "Need":
        """Given what is resident on each GPU where nothing was, return the need beside it."""
        by_uuid = {uuid: max(0, size - mapped_bytes) for uuid, size in self.by_uuid.items()}
        return Need(by_uuid, others_bytes, mapped_bytes, self.sizes)

    def unmapped(self) -> "Need":
        """The need once nothing is resident that the engine could map."""
        by_uuid = {uuid: size + self.mapped_bytes for uuid, size in self.by_uuid.items()}
        return Need(by_uuid, self.others_bytes, 0, self.sizes)


def build_need(arguments: EngineArguments, gpus: Sequence[Gpu], weight_bytes: int = 0) -> Need:
    """Given the engine's arguments, the GPUs that it computes on and its weights' bytes on each,
    return what has to be free where nothing is resident: vLLM's share, or more where the KV cache's
    size is given. A slice of a GPU is left out: NVML does not tell its memory by this name."""
    try:
        share = float(arguments.value("--gpu-memory-utilization") or _UTILIZATION)
    except ValueError:
        share = 0.0
    share = share if math.isfinite(share) else 0.0  # what is no share vLLM says itself
    whole = [gpu for gpu in gpus if not gpu.is_slice]
    kv_bytes = read_bytes(arguments.value("--kv-cache-memory-bytes") or "")
    least = 0 if kv_bytes is None else weight_bytes + kv_bytes + _CONTEXT_BYTES
    need = {gpu.uuid: max(int(gpu.memory_bytes * share), least) for gpu in whole}
    return Need(need, sizes={gpu.uuid: gpu.memory_bytes for gpu in whole})


def wait_for_memory(need: Need, limit_s: float, stop: threading.Event) -> str:
    """Given what has to be free, wait for it at most `limit_s`, or until a stop; return "", or what
    is missing and who holds the memory. Where NVML cannot be asked nothing is missing."""
    began = time.monotonic()
    while True:
        missing = find_missing(need, read_free(list(need.by_uuid)))
        waited_s = time.monotonic() - began
        if not missing:
            if waited_s > _POLL_S:
                _log.info("GPU memory came back", waited_s=waited_s)
            return ""
        futile = need.is_crowded and max(missing.values()) <= need.others_bytes
        if futile or waited_s >= limit_s or stop.is_set():
            uuid, short = max(missing.items(), key=lambda item: item[1])
            return (
                f"GPU {uuid} lacks {short // _MIB} MiB of the {need.by_uuid[uuid] // _MIB} that the"
                f" engine will ask for, after {waited_s:.0f} s; held by {describe_holders(need)}"
            )
        if waited_s < _POLL_S:
            _log.info("waiting for GPU memory", missing_mib=max(missing.values()) // _MIB)
        stop.wait(_POLL_S)


def find_missing(need: Need, free: Mapping[str, int]) -> dict[str, int]:
    """Given needed and free bytes by UUID, return those that are missing; a GPU whose free memory
    is unknown lacks nothing."""
    short = {uuid: size - free.get(uuid, size) for uuid, size in need.by_uuid.items()}
    return {uuid: size for uuid, size in short.items() if size > 0}


def read_free(uuids: Sequence[str]) -> dict[str, int]:
    """Given UUIDs, return the free bytes of each as NVML has it; {} where it cannot be asked."""
    if not uuids:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_PROBE), *uuids],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.info("free GPU memory is not known", detail=str(error))
        return {}
    found = {}
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "free":
            uuid, size = rest.split(" ")
            found[uuid] = int(size)
        elif kind == "error":
            _log.info("free GPU memory is not known", detail=rest)
    return found


def find_holders() -> list[tree.Process]:
    """Return the processes that hold a GPU open, by their descriptors; those of this PID namespace
    that may be looked into."""
    holders = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            links = (os.readlink(link) for link in (folder / "fd").iterdir())  # noqa: PTH115
            if any(is_device(link) for link in links):
                process = tree.read_process(int(folder.name))
                holders += [process] if process else []
    return sorted(holders, key=lambda process: process.pid)


def is_device(link: str) -> bool:
    """Given what a descriptor links to, tell whether that is a GPU: /dev/nvidia0, but neither the
    control device, which segments of memory are too, nor another one."""
    return link.startswith("/dev/nvidia") and link[len("/dev/nvidia") :].isdigit()


def describe_holders(need: Need) -> str:
    """Given the need, name who holds memory of the GPUs. Who keeps the driver awake for a restore
    has none."""
    holders = [process for process in find_holders() if process.name != PROGRAM]
    names = [f"{process.name}:{process.pid}" for process in holders]
    if need.others_bytes:
        names.append(f"other resident weights ({need.others_bytes // _MIB} MiB)")
    return ", ".join(names) or "no process of this container"
