# SPDX-License-Identifier: Apache-2.0
"""Sleep mode `warmhold`: weights that lie in the vault are unmapped, and copied nowhere.

Everything else is upstream's: the KV cache is discarded, runtime state goes to the host (without
its zeros, see `sparse`), graphs and communicators stay. The stacks of the GPU's threads are given
back too. A model that is not in segments sleeps as with upstream's own backend. The vault's copy
stays on the GPU, so that a sleep frees the KV cache there and not the weights.
"""

import logging
from contextlib import suppress
from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
from vllm.platforms import current_platform

from warmhold_wcache.cuda_driver import CudaError
from warmhold_wcache.vllm_plugin import residency
from warmhold_wcache.vllm_plugin.cuda_memory import CudaMemory
from warmhold_wcache.vllm_plugin.sparse import SparseCopies

_log = logging.getLogger("vllm.warmhold")
NAME = "warmhold"
_COPIED = ("runtime", "cudagraph")  # at every level; weights at level 1 alone


class WarmholdSleepBackend(CuMemBackend):  # type: ignore[misc]
    """Owns the state that upstream asks for; the mappings are those of `residency.RESIDENT`."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = CudaMemory(torch.cuda.current_device())
        self._sparse = SparseCopies(self._memory.view)
        self._stack_bytes: int | None = None  # while it sleeps, what each of the GPU's threads had

    def suspend(self, level: int = 1) -> None:
        """Unmap the weights, at every level, and free what upstream frees at this one. Raise
        WcacheError, with nothing unmapped, where the vault does not have them."""
        residency.require_held()
        for resident in residency.RESIDENT:
            resident.quiesce()
        torch.cuda.synchronize()
        self._sparse.keep(_allocations(), (*_COPIED, "weights") if level == 1 else _COPIED)
        super().suspend(level)
        if self._stack_bytes is None:
            with suppress(CudaError):  # a driver that does not say is slower, no more
                self._stack_bytes = self._memory.exchange_stack_limit(0)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("asleep: %s", _describe_rest())

    def resume(self, tags: list[str] | None = None) -> None:
        """Map the weights where they were, if asked for; raise WcacheError where the vault has them
        no more. Then what upstream brings back."""
        if self._stack_bytes is not None:
            self._memory.exchange_stack_limit(self._stack_bytes)
            self._stack_bytes = None
        if tags is None or "weights" in tags:
            for resident in residency.RESIDENT:
                resident.resume()
        super().resume(tags)
        self._sparse.put_back(_allocations())
        torch.cuda.synchronize()

    @classmethod
    def is_supported(cls) -> bool:
        """On an NVIDIA GPU."""
        return bool(current_platform.is_cuda())


def _describe_rest() -> str:
    """What this process still has on the GPU, which is moved with it: of each of torch's pools the
    MiB it keeps and those that are used; (0, 0) is the usual one, others are of CUDA graphs, or
    the sleeping one."""
    pools: dict[tuple[int, ...], list[int]] = {}
    for segment in torch.cuda.memory_snapshot():
        sizes = pools.setdefault(tuple(segment.get("segment_pool_id", (0, 0))), [0, 0])
        sizes[0] += segment["total_size"]
        sizes[1] += segment["allocated_size"]
    shown = {pool: [size >> 20 for size in sizes] for pool, sizes in pools.items()}
    copies = (data.cpu_backup_tensor for data in _allocations().values())
    copied = sum(copy.numel() for copy in copies if copy is not None)
    free, total = torch.cuda.mem_get_info()
    return f"pools {shown}, copied {copied >> 20} MiB, in use by all {(total - free) >> 20} MiB"


def _allocations() -> dict[int, Any]:
    return dict(get_mem_allocator_instance().pointer_to_data)


def register_sleep_backend() -> None:
    """Make it known to vLLM as `--sleep-mode-backend warmhold`; again is fine."""
    if NAME not in SleepModeBackendFactory._registry:  # which refuses a name it has
        SleepModeBackendFactory.register_backend(NAME, __name__, WarmholdSleepBackend.__name__)
