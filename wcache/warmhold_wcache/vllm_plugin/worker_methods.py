# SPDX-License-Identifier: Apache-2.0
"""What the engine can ask each of its workers by name, through `collective_rpc`.

Put on vLLM's worker base class by the loader, so that only processes that loaded through it have
them; `--worker-extension-cls` stays the user's. What a worker cannot do it answers, as `error`, and
does not raise: of several workers vLLM reads no answer behind the first that failed, and would take
those for answers to its next call.
"""

import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy
import torch
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from warmhold_wcache import pages
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.vllm_plugin import residency

# vLLM's ways to change weights in place. They write into the tensors, which are read-only where
# they are shared. The CPU's worker is a subclass of this one.
_WRITERS = (
    "reload_weights",
    "reset_weights",
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
)


def add_worker_methods() -> None:
    """Add `warmhold_state`, `warmhold_quiesce` and `warmhold_resume` to this process's workers,
    and let whatever writes into weights make them private first."""
    WorkerBase.warmhold_state = _state
    WorkerBase.warmhold_quiesce = _quiesce
    WorkerBase.warmhold_resume = _resume
    for name in _WRITERS:
        method = getattr(Worker, name, None)
        if method is not None and not hasattr(method, "warmhold"):
            setattr(Worker, name, _detaching(method))


def _detaching(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def detach_and_call(*args: Any, **kwargs: Any) -> Any:
        residency.detach()
        return method(*args, **kwargs)

    detach_and_call.warmhold = True  # type: ignore[attr-defined]
    return detach_and_call


def _state(worker: Any) -> dict[str, Any]:
    """The generations that this worker maps, and whether its model still lies in them."""
    return {
        "generations": [
            {
                "id": resident.generation.id,
                "bytes": resident.generation.size_bytes,
                "segments": len(resident.addresses),
                "mapped": resident.mapped,
            }
            for resident in residency.RESIDENT
        ],
        "detached": list(residency.DETACHED),
    }


def _quiesce(worker: Any) -> dict[str, Any]:
    """Unmap all weights and keep their addresses, and forget what the KV cache holds. The caller
    sees to it that no request runs and that no prefix is taken from the cache afterwards."""
    answer = _try_all(worker, residency.Residency.quiesce)
    if "error" not in answer:
        for storage in _find_caches(worker):
            pages.forget(storage.data_ptr(), storage.nbytes())
        pages.trim_heap()
    return answer


def _find_caches(worker: Any) -> list[torch.UntypedStorage]:
    """The memory of the KV cache on a CPU, each block once; layers of some models have several
    tensors."""
    found = {}
    for cache in getattr(worker.model_runner, "kv_caches", ()):
        for tensor in cache if isinstance(cache, list | tuple) else (cache,):
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage
    return list(found.values())


def _resume(worker: Any) -> dict[str, Any]:
    """Map all weights again, where they were."""
    answer = _try_all(worker, residency.Residency.resume)
    _reseed()
    return answer


def _reseed() -> None:
    """Begin anew wherever samples come from: what is resumed may be a copy, one of many, and none
    is to repeat another. Requests with a seed of their own have a generator of their own."""
    torch.seed()
    random.seed()
    numpy.random.seed()  # the one that libraries use


def _try_all(worker: Any, act: Callable[[residency.Residency], None]) -> dict[str, Any]:
    """Do it to every generation; return the state, with `error` (code, detail, remedy) where one
    failed."""
    try:
        for resident in residency.RESIDENT:
            act(resident)
    except (WcacheError, OSError) as error:
        known = (
            error if isinstance(error, WcacheError) else WcacheError("wcache.refused", str(error))
        )
        return {**_state(worker), "error": known.to_json()}
    return _state(worker)
