# SPDX-License-Identifier: Apache-2.0
"""Where the seconds of a start go: phases cut at lines that vLLM logs anyway.

The lines are upstream's (vllm 0.31-0.33). Each ends a phase. Where an expected line never came, the
time up to the next one belongs to no phase: it is unaccounted, not guessed.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from .tree import read_process

_COMPILE = "compile"
# A line that ends a phase, in order of time.
_MARKS = (
    ("imports", re.compile(rb"non-default args:")),
    ("engine_init", re.compile(rb"Starting to load model|Loading model from scratch")),
    # The last one is our loader's, after all that it does; there may be several workers.
    ("weights", re.compile(rb"Loading weights took|Model loading took|\] weights mode=")),
    (
        _COMPILE,
        re.compile(
            rb"saved AOT compiled function|Directly load AOT compilation|torch\.compile took"
            rb"|Warming up done"
        ),
    ),
    ("warmup", re.compile(rb"init engine \(profile, create kv cache, warmup model\) took")),
    ("api", None),  # ends when the server answers, not at a line
)
# Memory is profiled and the KV cache is made: before compilation on a CPU, after it on a GPU.
_KV = re.compile(rb"KV cache size: [\d,]+ tokens")
_AFTER = "weights"
# Without compilation (--enforce-eager) there is no such phase, and nothing is missing.
_OPTIONAL = {_COMPILE}


@dataclass(frozen=True)
class Phases:
    """Durations of one start in seconds, by phase, and the total up to the first token."""

    seconds: dict[str, float]
    total_s: float

    @property
    def unaccounted_s(self) -> float:
        """What no phase explains."""
        return max(0.0, self.total_s - sum(self.seconds.values()))


class Gap:
    """The phases before an attempt: from the runner's own start, from an engine's end or from the
    wish for it. All times are of the monotonic clock."""

    def __init__(self, began: float) -> None:
        self._seconds: dict[str, float] = {}
        self._last: float | None = began

    def begin(self, began: float) -> None:
        """Nothing serves since then, where that is news."""
        if self._last is None:
            self._last = began

    def close(self, name: str) -> None:
        """What came since the last phase is this one."""
        if self._last is not None:
            now = time.monotonic()
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
            self._last = now

    def end(self, start: Phases) -> Phases:
        """Given the phases of the attempt that serves, return all, and begin no other gap."""
        seconds = {**self._seconds, **start.seconds}
        total_s = sum(self._seconds.values()) + start.total_s
        self._seconds, self._last = {}, None
        return Phases(seconds, total_s)


def own_age_s() -> float:
    """How long this process has lived, in seconds."""
    process = read_process(os.getpid())
    assert process is not None
    return process.age_s


class PhaseClock:
    """Follows one start; owns nothing but times. All times are of the monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin = self._last = now()
        # No image is read in a start from scratch.
        self._seconds = {"image": 0.0}
        self._next = 0

    def see_line(self, line: bytes) -> None:
        """Given a line of the engine's log, close the phase that it ends, or the last one again."""
        if _AFTER in self._seconds and _KV.search(line):
            self._add("kv")
            return
        for index in range(max(0, self._next - 1), len(_MARKS)):
            _, pattern = _MARKS[index]
            if pattern is not None and pattern.search(line):
                self._close(index)
                return

    def see_listening(self) -> None:
        """The server answers: what came since the engine's own warm-up is the API's start."""
        self._close(len(_MARKS) - 1)

    def finish(self) -> Phases:
        """The first token has come: close the last phase and return all."""
        now = self._now()
        self._seconds["first_token"] = now - self._last
        return Phases(dict(self._seconds), now - self._begin)

    @property
    def current(self) -> str:
        """The phase that is under way."""
        return _MARKS[self._next][0] if self._next < len(_MARKS) else "first_token"

    def _close(self, index: int) -> None:
        """End the phase with this index; its time counts unless another one's end was missed."""
        missed = {name for name, _ in _MARKS[self._next : index]} - _OPTIONAL
        name = _MARKS[index][0]
        if index < self._next:
            missed = set() if name in self._seconds else {name}
        self._add(name, counts=not missed)
        self._next = index + 1

    def _add(self, name: str, counts: bool = True) -> None:
        """The time since the last phase's end belongs to this one, if it `counts`."""
        now = self._now()
        if counts:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now
