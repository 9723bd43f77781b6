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
    """Bytes that have to be free on each GPU, by UUID: vLLM's share less what is resident, but at
    least `least_bytes`. `sizes` is all that each GPU has."""

    by_uuid: Mapping[str, int]
    least_bytes: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    def beside(self, resident: Mapping[str, int]) -> "Need":
        """Given the bytes that are resident on each GPU, return the need beside them."""
        by_uuid = {
            uuid: max(self.least_bytes, size - resident.get(uuid, 0))
            for uuid, size in self.by_uuid.items()
        }
        return Need(by_uuid, self.least_bytes, self.sizes)

    def exceeds(self, own: Mapping[str, int], others: Mapping[str, int]) -> bool:
        """Given what is resident on each GPU for a restored engine and for others, tell whether one
        is too small for both. It asks for no share: where its KV cache has a given size, only for
        that."""

        def whole(uuid: str) -> int:
            given = self.least_bytes + own.get(uuid, 0) + _CONTEXT_BYTES
            return given if self.least_bytes else self.by_uuid[uuid]

        return any(
            whole(uuid) + others.get(uuid, 0) + _CONTEXT_BYTES > self.sizes.get(uuid, math.inf)
            for uuid in self.by_uuid
        )


def build_need(arguments: EngineArguments, gpus: Sequence[Gpu]) -> Need:
    """Given the engine's arguments and the GPUs that it computes on, return what has to be free
    where nothing is resident: vLLM's share, and no less than a KV cache of a given size. A slice of
    a GPU is left out: NVML does not tell its memory by this name."""
    try:
        share = float(arguments.value("--gpu-memory-utilization") or _UTILIZATION)
    except ValueError:
        share = 0.0
    share = share if math.isfinite(share) else 0.0  # what is no share vLLM says itself
    sizes = {gpu.uuid: gpu.memory_bytes for gpu in gpus if not gpu.is_slice}
    least = read_bytes(arguments.value("--kv-cache-memory-bytes") or "") or 0
    return Need({uuid: max(least, int(size * share)) for uuid, size in sizes.items()}, least, sizes)


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
        if waited_s >= limit_s or stop.is_set():
            uuid, short = max(missing.items(), key=lambda item: item[1])
            return (
                f"GPU {uuid} lacks {short // _MIB} MiB of the {need.by_uuid[uuid] // _MIB} that the"
                f" engine will ask for, after {waited_s:.0f} s; held by {describe_holders()}"
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


def describe_holders() -> str:
    """Name who holds memory of the GPUs. Who keeps the driver awake for a restore has none."""
    holders = [process for process in find_holders() if process.name != PROGRAM]
    names = [f"{process.name}:{process.pid}" for process in holders]
    return ", ".join(names) or "no process of this container"
