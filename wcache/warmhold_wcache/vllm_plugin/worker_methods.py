# SPDX-License-Identifier: Apache-2.0
"""What the engine can ask each of its workers by name, through `collective_rpc`.

Put on vLLM's worker base class by the loader, so that only processes that loaded through it have
them; `--worker-extension-cls` stays the user's.
"""

from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

from warmhold_wcache.vllm_plugin import residency


def add_worker_methods() -> None:
    """Add `warmhold_state`, `warmhold_quiesce` and `warmhold_resume` to this process's workers."""
    WorkerBase.warmhold_state = _state
    WorkerBase.warmhold_quiesce = _quiesce
    WorkerBase.warmhold_resume = _resume


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
        "detached": sum(residency.DETACHED),
    }


def _quiesce(worker: Any) -> dict[str, Any]:
    """Unmap all weights and keep their addresses. The caller sees to it that no request runs."""
    for resident in residency.RESIDENT:
        resident.quiesce()
    return _state(worker)


def _resume(worker: Any) -> dict[str, Any]:
    """Map all weights again, where they were."""
    for resident in residency.RESIDENT:
        resident.resume()
    return _state(worker)
