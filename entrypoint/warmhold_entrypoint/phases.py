# SPDX-License-Identifier: Apache-2.0
"""Where the seconds of a start go: phases cut at lines that vLLM logs anyway.

A phase ends when its line arrives, so the phases and `unaccounted` add up to the total exactly. The
lines are upstream's (vllm 0.31-0.33); one that never comes leaves its time to the next phase.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

# A line that ends a phase, in order of time.
_MARKS = (
    ("imports", re.compile(rb"non-default args:")),
    ("engine_init", re.compile(rb"Starting to load model|Loading model from scratch")),
    ("weights", re.compile(rb"Loading weights took|Model loading took")),
    (
        "compile",
        re.compile(
            rb"saved AOT compiled function|Directly load AOT compilation|torch\.compile took"
        ),
    ),
    ("warmup", re.compile(rb"init engine \(profile, create kv cache, warmup model\) took")),
)
ORDER = ("image", "imports", "engine_init", "weights", "compile", "warmup", "api", "first_token")


@dataclass(frozen=True)
class Phases:
    """Durations of one start in seconds, by phase, and the total from exec to the first token."""

    seconds: dict[str, float]
    total_s: float

    @property
    def unaccounted_s(self) -> float:
        """What no phase explains."""
        return max(0.0, self.total_s - sum(self.seconds.values()))


class PhaseClock:
    """Follows one start; owns nothing but times. All times are of the monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin = now()
        self._last = self._begin
        self._seconds: dict[str, float] = {}
        self._next = 0

    def see_line(self, line: bytes) -> None:
        """Given a line of the engine's log, close the phase that it ends."""
        for index in range(self._next, len(_MARKS)):
            name, pattern = _MARKS[index]
            if pattern.search(line):
                self._close(name)
                self._next = index + 1
                return

    def see_listening(self) -> None:
        """The HTTP server answers: what came since the engine's own warm-up is the API's start."""
        self._close("api")
        self._next = len(_MARKS)

    def finish(self) -> Phases:
        """The first token has come: close the last phase and return all."""
        self._close("first_token")
        ordered = {name: self._seconds[name] for name in ORDER if name in self._seconds}
        return Phases(ordered, self._last - self._begin)

    @property
    def current(self) -> str:
        """The phase that is under way."""
        return _MARKS[self._next][0] if self._next < len(_MARKS) else "first_token"

    def _close(self, name: str) -> None:
        now = self._now()
        self._seconds[name] = now - self._last
        self._last = now
