# SPDX-License-Identifier: Apache-2.0
"""What the engine can ask each of its workers by name, through `collective_rpc`.

Put on vLLM's worker base class by the loader, so that only processes that loaded through it have
them; `--worker-extension-cls` stays the user's. What a worker cannot do it answers, as `error`, and
does not raise: of several workers vLLM reads no answer behind the first that failed, and would take
those for answers to its next call.
"""

import random
from collections.abc import Callable, Iterable, Set
from functools import wraps
from typing import Any

import numpy
import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from warmhold_wcache import affinity, pages
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
# The CPUs of this process's threads while it is quiesced: what is restored has none of its own.
_BOUND: dict[int, Set[int]] = {}


def add_worker_methods() -> None:
    """Add `warmhold_state`, `warmhold_quiesce` and `warmhold_resume` to this process's workers,
    let whatever writes into weights make them private first, and keep a wake-up from writing."""
    WorkerBase.warmhold_state = _state
    WorkerBase.warmhold_quiesce = _quiesce
    WorkerBase.warmhold_resume = _resume
    for name in _WRITERS:
        method = getattr(Worker, name, None)
        if method is not None and not hasattr(method, "warmhold"):
            setattr(Worker, name, _detaching(method))
    if not hasattr(Worker.wake_up, "warmhold"):
        Worker.wake_up = _keeping_shared(Worker.wake_up)


def _detaching(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def detach_and_call(*args: Any, **kwargs: Any) -> Any:
        residency.detach()
        return method(*args, **kwargs)

    detach_and_call.warmhold = True  # type: ignore[attr-defined]
    return detach_and_call


def _keeping_shared(wake_up: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wake_up)
    def forget_and_wake_up(worker: Any, *args: Any, **kwargs: Any) -> Any:
        _forget_shared(worker)
        return wake_up(worker, *args, **kwargs)

    forget_and_wake_up.warmhold = True  # type: ignore[attr-defined]
    return forget_and_wake_up


def _forget_shared(worker: Any) -> None:
    """Before a wake-up, forget what vLLM copied of shared tensors when it fell into a sleep of
    level 2: it would write the copies back, into tensors that kept their values and are
    read-only."""
    saved = getattr(worker, "_sleep_saved_buffers", {})
    drafts = getattr(worker, "_sleep_saved_draft_buffers", {})
    parameters = getattr(worker, "_sleep_saved_parameters", {})
    if saved:
        _drop_shared(saved, worker.model_runner.model.named_buffers())
    if drafts:
        _drop_shared(drafts, worker.get_draft_model().named_buffers())
    if parameters:
        _drop_shared(parameters, worker._get_sleep_parameters(worker.model_runner.model).items())


def _drop_shared(saved: dict[str, Any], tensors: Iterable[tuple[str, Any]]) -> None:
    for name, tensor in tensors:
        if name in saved and residency.is_shared(tensor):
            del saved[name]


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
        _BOUND.update(affinity.read_affinities())
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
    """Map all weights again, where they were, and let threads run where they ran."""
    answer = _try_all(worker, residency.Residency.resume)
    affinity.set_affinities(_BOUND)
    _BOUND.clear()
    _reseed()
    return answer


def _reseed() -> None:
    """Begin anew wherever samples come from: what is resumed may be a copy, one of many, and none
    is to repeat another. Requests with a seed of their own have a generator of their own."""
    torch.seed()
    random.seed()
    numpy.random.seed()  # the one that libraries use


def _try_all(worker: Any, act: Callable[[residency.Residency], None]) -> dict[str, Any]:
    """Do it to every generation, or let vLLM's worker sleep or wake up with our sleep mode, which
    does so too; return the state, with `error` (code, detail, remedy) where it failed."""
    try:
        if not _has_sleep_mode(worker):
            if act is residency.Residency.quiesce:
                residency.require_held()
            for resident in residency.RESIDENT:
                act(resident)
        elif act is residency.Residency.quiesce:
            worker.sleep()
        else:
            worker.wake_up()
    except Exception as error:  # a sleep raises whatever upstream's parts do
        known = (
            error if isinstance(error, WcacheError) else WcacheError("wcache.refused", str(error))
        )
        return {**_state(worker), "error": known.to_json()}
    return _state(worker)


def _has_sleep_mode(worker: Any) -> bool:
    """Whether the engine was started with our sleep mode, which discards its KV cache as well."""
    config = worker.model_config
    return bool(
        current_platform.is_cuda()
        and config.enable_sleep_mode
        and getattr(config, "sleep_mode_backend", "") == "warmhold"
    )
