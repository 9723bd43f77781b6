# SPDX-License-Identifier: Apache-2.0
"""Seconds of each step of an act, by name."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up what steps took; a step that fails counts too."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Given a name, add the time of what happens within to it."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.monotonic() - began
