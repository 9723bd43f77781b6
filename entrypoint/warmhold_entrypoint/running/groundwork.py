# SPDX-License-Identifier: Apache-2.0
"""What an engine needs before it is started: memory on its GPUs, which resident weights may have to
make room for, and, with backend `vllm`, a holder of its weights. Owns the holder's watch while the
engine runs."""

import threading
from typing import Any

from ..errors import Rejection
from ..gpus.gpu_memory import CODE, Need, wait_for_memory
from ..log import Log
from ..plan import Attempt, Plan
from ..settings import Settings
from ..weight_cache import weights
from ..weight_cache.holder import Holder, HolderError
from ..weight_cache.ranks import Held
from ..weight_cache.room import give_up, measure
from .beside import run_beside
from .loop import Loop
from .phases import Phases

_log = Log("engine")


class Groundwork:
    """Prepares one engine after the other. `shortage` says what memory its start had to do
    without."""

    def __init__(self, loop: Loop) -> None:
        self.shortage = ""
        self._loop = loop
        self._holder = Holder(loop.wake)
        self._held: Held | None = None

    @property
    def trouble(self) -> str:
        """Why the weights of the engine that runs are held by nobody any more; "" mostly."""
        return self._holder.trouble

    def prepare(self, settings: Settings, plan: Plan, attempt: Attempt) -> Rejection | None:
        """Given what will be started, see to all that it needs; return why that cannot be had. A
        stop that is asked for ends it early."""
        self.shortage, self._held = "", None
        if plan.backend != "vllm" and attempt.snapshot:
            return None  # a restore waits for memory beside its work
        try:
            run_beside(self._loop, lambda stop: self._prepare(settings, plan, attempt, stop))
        except HolderError as error:
            if not self._loop.stop_asked:
                _log.warning("no holder of weights", detail=str(error))
            return error.rejection
        if self._held:
            self._holder.watch(settings)
        return None

    def rest(self) -> None:
        """The engine has ended."""
        self._holder.rest()

    def explain(self, reason: str) -> str:
        """Given why an engine that never served ended, return it with what it had to do without."""
        return f"{reason} ({CODE}: {self.shortage})" if self.shortage else reason

    def summarise(self, phases: Phases) -> dict[str, Any] | None:
        """Given the phases of a start that served, tell what was mapped from the holder, as a
        loader's reports do; None without one. Upstream's loader had no other way then: its fallback
        is off."""
        self.shortage = ""
        if self._held is None:
            return None
        return {
            "mode": "ipc_cache",
            "holder": "vllm",
            "bytes": self._held.bytes,
            "seconds": phases.seconds.get("weights", 0.0),
            "loads": len(self._held.by_socket),
            "code": "",
            "reason": "",
            "fields": [],
            "published": [],
            "not_published": "",
        }

    def _prepare(
        self, settings: Settings, plan: Plan, attempt: Attempt, stop: threading.Event
    ) -> None:
        wanted = plan.backend == "vllm" and attempt.mode == "ipc_cache"
        held = self._holder.look(settings, plan) if wanted else None
        if plan.backend == "vllm" and held is None:
            # Whatever is there holds other weights, or would be a second copy beside the engine's.
            self._holder.end(settings)
        need = _less(plan.memory, held) if held else plan.memory
        if plan.backend == "vault":
            need = measure(settings.env.run_dir, need)
        self.shortage = wait_for_memory(need, settings.env.gpu_wait_s, stop)
        failed = any(item.code == weights.FAILED for item in plan.rejections)
        if plan.backend == "vault" and attempt.mode == "disk" and failed and not self.shortage:
            # No engine came up on them. This one has its own, and publishes them.
            give_up(settings.env.run_dir, lambda row: weights.is_resident(row, plan.launch_key))
        if self.shortage and not stop.is_set():
            _log.warning("too little GPU memory is free", code=CODE, detail=self.shortage)
        if wanted and held is None:
            held = self._holder.start(settings, plan, stop)
        self._held = held


def _less(need: Need, held: Held) -> Need:
    """The need of an engine that maps what the holder has on each GPU; none where that is not
    told."""
    size = held.bytes_per_gpu
    return Need({}) if size is None else need.beside(dict.fromkeys(need.by_uuid, size))
