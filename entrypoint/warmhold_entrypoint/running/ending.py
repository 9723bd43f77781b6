# SPDX-License-Identifier: Apache-2.0
"""The end of an engine that is asked for: held until its last answer has gone out, then killed.

vLLM's own way takes seconds more, in which nobody is served: its processes end one after the other.
It is the way of engines that cannot be held, or that are not held in time.
"""

import threading
import time
from collections.abc import Callable

from warmhold_wcache.control_client import ControlClient, ControlError

from ..container.conf import CONTROL_SOCKET
from ..log import Log
from ..settings import Settings
from .engine_process import EngineProcess

MARGIN_S = 10.0

_log = Log("engine")


class Ending:
    """One end, within the drain time and a margin (`deadline`, monotonic). Owns a thread once it
    has begun; `wake` is called when that ends."""

    def __init__(self, settings: Settings, wake: Callable[[], None]) -> None:
        self.begun = False
        self.deadline = time.monotonic() + settings.env.drain_s + MARGIN_S
        self._drained = False
        self._failed = False
        self._client = ControlClient(settings.env.run_dir / CONTROL_SOCKET)
        self._drain_s = settings.env.drain_s
        self._wake = wake

    def begin(self) -> None:
        """Let requests that run end, and no other begin."""
        self.begun = True
        try:
            threading.Thread(target=self._run, name="draining", daemon=True).start()
        except RuntimeError as error:  # of threads there may be none to have
            _log.warning("vLLM drains by itself", detail=str(error))
            self._failed = True
            self._wake()

    def is_over(self, process: EngineProcess) -> bool:
        """Whether it can be killed. One that could not be held is asked, once, to end by itself."""
        if self._failed:
            self._failed = False
            process.terminate()
        if time.monotonic() > self.deadline:
            _log.warning("drain time is over, killing the engine", pid=process.pid)
            return True
        return self._drained

    def _run(self) -> None:
        try:
            self._client.hold(self._drain_s)
            self._drained = True
        except ControlError as error:
            _log.info("vLLM drains by itself", code=error.code, detail=error.detail)
            self._failed = True
        finally:
            self._wake()
