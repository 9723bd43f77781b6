# SPDX-License-Identifier: Apache-2.0
"""Work that takes its time, in a thread of its own, while the runner's loop goes on serving."""

import threading
from collections.abc import Callable
from typing import TypeVar

from .loop import Loop

T = TypeVar("T")


def run_beside(loop: Loop, work: Callable[[threading.Event], T]) -> T:
    """Given the loop and a piece of work, return what it does, or raise what it raises. It is given
    an event, set as soon as the runner is asked to stop, and has to end soon then."""
    stop, done = threading.Event(), threading.Event()
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work(stop))
        except Exception as error:
            errors.append(error)
        finally:
            done.set()
            loop.wake()

    threading.Thread(target=run, name="beside", daemon=True).start()
    while not done.is_set():
        if loop.stop_asked:
            stop.set()
        loop.wait(None)
    if errors:
        raise errors[0]
    return results[0]
