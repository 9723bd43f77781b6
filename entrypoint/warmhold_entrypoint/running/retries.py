# SPDX-License-Identifier: Apache-2.0
"""How often engines have failed in a row, and so when the next one starts, and whether."""

import signal

_MAX_BACK_OFF_S = 60.0
_STABLE_S = 60.0
_UNSTABLE = 3
_KILLED = 128 + signal.SIGKILL
# A usage error of vLLM's parser, and programs that cannot be run: another try ends the same way.
_HOPELESS = (2, 126, 127)


def back_off_s(failures: int) -> float:
    """Given the failures in a row, return the wait before the next start: 0, 1, 2, 4, ... s."""
    return 0.0 if failures <= 1 else min(_MAX_BACK_OFF_S, 2.0 ** (failures - 2))


def is_hopeless(code: int) -> bool:
    """Given the exit code of an engine that never served, tell whether every other would end so."""
    return code in _HOPELESS


class Retries:
    """Counts failed starts, of which there may be `max_failures`, and crashes soon after a start,
    which only slow the next one down."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._failed_starts = 0
        self._quick_crashes = 0
        self._own_crashes = 0

    def see_serving(self) -> None:
        """An engine serves."""
        self._failed_starts = 0

    def see_crash(self, code: int, served_s: float) -> bool:
        """Given how a serving engine ended and how long it served, tell whether engines end by
        themselves again and again; one that was killed does not count."""
        if served_s > _STABLE_S:
            self._quick_crashes = self._own_crashes = 0
        self._quick_crashes += 1
        self._own_crashes += code != _KILLED
        return self._own_crashes >= _UNSTABLE

    def see_failed_start(self, code: int) -> bool:
        """Given the exit code of an engine that never served, tell whether it was the last one."""
        self._failed_starts += 1
        return is_hopeless(code) or self._failed_starts >= self._max_failures

    @property
    def wait_s(self) -> float:
        """Seconds before the next start."""
        return back_off_s(max(self._failed_starts, self._quick_crashes))
