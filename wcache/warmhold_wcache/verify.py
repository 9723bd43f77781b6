# SPDX-License-Identifier: Apache-2.0
"""Whether resident bytes still are what was published: each segment against its checksum.

What lies on a GPU is computed there, by a process of the vLLM plug-in.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from .client import VaultClient
from .errors import WcacheError
from .generation import Generation
from .protocol import FdBag
from .segments import checksum

_ON_GPU = "warmhold_wcache.vllm_plugin.segment_checksums"
_GPU_LIMIT_S = 300.0  # the import of torch is most of it


@dataclass(frozen=True)
class Report:
    """What was found in one generation; `changed` and `unchecked` are segment numbers."""

    id: str
    model: str
    checked: int
    changed: tuple[int, ...]
    tensors: tuple[str, ...]
    unchecked: tuple[int, ...]

    @property
    def sound(self) -> bool:
        """Whether no segment differs from its checksum and each has one."""
        return not self.changed and not self.unchecked

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "sound": self.sound}

    def line(self) -> str:
        """Return the report as one line."""
        if self.sound:
            return f"{self.id} {self.model}: sound, {self.checked} segment(s) checked"
        if self.changed:
            names = ", ".join(self.tensors[:5]) + (", ..." if len(self.tensors) > 5 else "")
            return (
                f"{self.id} {self.model}: CHANGED in segment(s)"
                f" {', '.join(map(str, self.changed))}: {names}"
            )
        return f"{self.id} {self.model}: {len(self.unchecked)} segment(s) without a checksum"


def check_resident(client: VaultClient, row: dict[str, Any]) -> Report:
    """Given a row of `stat`, compare each segment's bytes with its checksum.

    Raise WcacheError where the generation has gone meanwhile.
    """
    generation, fds = client.fetch(row["key"])
    try:
        with FdBag(fds) as bag:
            return compare(generation, bag)
    finally:
        client.release(generation.id)


def compare(generation: Generation, bag: FdBag) -> Report:
    """Given a generation and its segments' descriptors, return what differs."""
    segments = generation.segments
    due = [index for index, segment in enumerate(segments) if segment.checksum]
    changed = tuple(
        index
        for index, value in zip(due, _read_checksums(generation, bag, due), strict=True)
        if value != segments[index].checksum
    )
    return Report(
        id=generation.id,
        model=generation.model,
        checked=len(due),
        changed=changed,
        tensors=tuple(item.name for item in generation.tensors if item.segment in changed),
        unchecked=tuple(sorted(set(range(len(segments))) - set(due))),
    )


def _read_checksums(generation: Generation, bag: FdBag, due: Sequence[int]) -> list[str]:
    """The checksums of these segments' bytes as they are now."""
    pairs = [(bag.fds[index], generation.segments[index].size_bytes) for index in due]
    if generation.backend == "memfd":
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            return list(pool.map(lambda pair: checksum(*pair), pairs))
    return _ask_gpu(generation.device.partition(":")[2], pairs)


def _ask_gpu(uuid: str, pairs: Sequence[tuple[int, int]]) -> list[str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", _ON_GPU, *(f"{fd}:{size}" for fd, size in pairs)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"},
            pass_fds=[fd for fd, _ in pairs],
            capture_output=True,
            text=True,
            timeout=_GPU_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        detail = f"GPU memory cannot be read here: {said[-1] if said else error}"
        raise WcacheError("wcache.unsupported", detail, "run it in the GPU image") from error
    return done.stdout.split()
