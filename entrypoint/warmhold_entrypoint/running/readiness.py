# SPDX-License-Identifier: Apache-2.0
"""Whether the engine serves: asked over HTTP, from the inside, within a bound.

Health alone is no proof: vLLM answers 200 while its core hangs. So a completion of one token is
asked for (the canary), at the start and whenever nothing else made progress lately. One thread owns
the questions, because an answer may take seconds; it sends a `Report` of each change to the loop.
"""

import json
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ..settings import Settings
from .engine_http import ProbeError, Target, request

_PROGRESS = (
    b"vllm:request_success_total",
    b"vllm:generation_tokens_total",
    b"vllm:prompt_tokens_total",
)
# What the web framework says where there is no such route; an unknown model reads differently.
_NO_ROUTE = '{"detail":"Not Found"}'
_START_POLL_S = 0.2
_DEGRADED_POLL_S = 2.0
# A hang shows after interval + poll + two probes: 15 + 3 + 6 + 6 s with the default settings.
_PROGRESS_POLL_S = 3.0
_PROGRESS_TIMEOUT_S = 2.0
_HEALTH_TIMEOUT_S = 3.0
_MISSES_TO_DEGRADE = 2


class Event(StrEnum):
    """What the prober has to say to the runner."""

    LISTENING = "listening"
    READY = "ready"
    DEGRADED = "degraded"
    DEAD = "dead"


@dataclass(frozen=True)
class Report:
    """An event of one prober, with the reason for it."""

    event: Event
    reason: str


def build_target(settings: Settings) -> Target:
    """Given settings, return how to reach the engine; a wildcard address is asked over loopback."""
    arguments = settings.arguments
    host = arguments.value("--host")
    return Target(
        host="127.0.0.1" if host in (None, "", "0.0.0.0", "::") else str(host),  # noqa: S104
        port=arguments.port,
        uds=arguments.value("--uds"),
        tls=arguments.tls,
        root_path=arguments.root_path,
        model=arguments.value("--served-model-name") or settings.model,
        key=settings.api_keys[0] if settings.api_keys else None,
    )


def probe_health(target: Target, timeout_s: float) -> None:
    """Given a target, ask GET /health; raise ProbeError unless it answers 200 in time."""
    request(target, "GET", "/health", timeout_s)


def probe_canary(target: Target, timeout_s: float) -> bool:
    """Given a target, ask for one token; raise ProbeError unless it comes in time.

    Return False where the engine has no completions (an embedding model): health has to do then.
    """
    body = json.dumps({"model": target.model, "prompt": "1", "max_tokens": 1, "temperature": 0})
    try:
        answer = json.loads(request(target, "POST", "/v1/completions", timeout_s, body))
        if answer["usage"]["completion_tokens"] != 1:
            raise ProbeError(
                f"the canary got {answer['usage']['completion_tokens']} tokens for one"
            )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProbeError(f"the canary's answer is no completion: {error!r}") from error
    except ProbeError as error:
        if error.status == 405 or (error.status == 404 and _NO_ROUTE in str(error)):
            return False
        if error.status == 503:  # a full queue (--max-num-queued-reqs) or a pause, and no death
            raise ProbeError(str(error)) from error
        raise
    return True


def read_progress(target: Target, timeout_s: float) -> float:
    """Return the sum of vLLM's counters of finished requests and tokens; it only ever grows."""
    total = 0.0
    for line in request(target, "GET", "/metrics", timeout_s).splitlines():
        if line.startswith(_PROGRESS):
            total += float(line.rpartition(b" ")[2])
    return total


class Prober:
    """Watches one engine from its first answer to its end. Owns a thread."""

    def __init__(
        self, target: Target, interval_s: float, timeout_s: float, wake: Callable[[], None]
    ) -> None:
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.last_ok: float | None = None
        self.missed = 0
        self.last_moved = time.monotonic()  # when somebody else's request last made progress
        self._target = target
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._wake = wake
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; a question under way is left to its own time limit."""
        self._stopped.set()

    def _run(self) -> None:
        if not self._wait_until_listening():
            return
        self._report(Event.LISTENING, "health answered 200")
        degraded, progress = True, 0.0
        while not self._stopped.is_set():
            seen = self._read_progress()
            moved, progress = seen > progress, max(seen, progress)
            if moved:
                self.last_moved = time.monotonic()
            if moved and not degraded:
                self._note_ok()
            elif degraded or self.missed or self._quiet_s() >= self._interval_s:
                try:
                    self._check()
                except ProbeError as error:
                    if self._miss(error) and not degraded:
                        degraded = True
                        self._report(Event.DEGRADED, str(error))
                    self._stopped.wait(_DEGRADED_POLL_S if degraded else 0.0)
                    continue
                # Our own token is nobody's progress.
                progress = max(progress, self._read_progress())
                self._note_ok()
                if degraded:
                    degraded = False
                    self._report(Event.READY, "the canary got its token")
            self._stopped.wait(min(_PROGRESS_POLL_S, self._interval_s))

    def _wait_until_listening(self) -> bool:
        while not self._stopped.is_set():
            try:
                probe_health(self._target, _HEALTH_TIMEOUT_S)
            except ProbeError:
                self._stopped.wait(_START_POLL_S)
                continue
            return True
        return False

    def _check(self) -> None:
        """One question of health and one canary, together within the time limit."""
        deadline = time.monotonic() + self._timeout_s
        probe_health(self._target, min(_HEALTH_TIMEOUT_S, self._timeout_s))
        probe_canary(self._target, max(0.1, deadline - time.monotonic()))

    def _note_ok(self) -> None:
        self.missed = 0
        self.last_ok = time.monotonic()

    def _quiet_s(self) -> float:
        """How long nothing has shown that the engine works."""
        return math.inf if self.last_ok is None else time.monotonic() - self.last_ok

    def _read_progress(self) -> float:
        """The engine's counters, or 0 where it gives none."""
        try:
            return read_progress(self._target, _PROGRESS_TIMEOUT_S)
        except (ProbeError, ValueError):
            return 0.0

    def _miss(self, error: ProbeError) -> bool:
        """Count a missed probe; tell whether that makes the engine degraded."""
        self.missed += 1
        if error.status == 503 and self.missed >= _MISSES_TO_DEGRADE:
            # vLLM itself says that its core is gone; it will not come back.
            self._report(Event.DEAD, str(error))
        return self.missed >= _MISSES_TO_DEGRADE

    def _report(self, event: Event, reason: str) -> None:
        if not self._stopped.is_set():
            self.reports.put(Report(event, reason))
            self._wake()
