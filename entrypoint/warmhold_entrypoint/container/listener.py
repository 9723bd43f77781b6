# SPDX-License-Identifier: Apache-2.0
"""supervisord's event listener: when the engine's runner has given up, the container ends.

supervisord itself stays up whatever its children do. A stop on request is the event STOPPED, which
is not subscribed to; a runner killed by a signal has an unexpected exit and is started again.
"""

import os
import signal
import sys
from collections.abc import Iterable
from typing import TextIO

from ..log import Log, configure_logging

_log = Log("listener")


def read_pairs(text: str) -> dict[str, str]:
    """Given supervisord's `key:value` words, return them as a mapping."""
    return dict(word.split(":", 1) for word in text.split() if ":" in word)


def ends_container(event: str, payload: dict[str, str]) -> bool:
    """Given an event and its payload, tell whether the container has to end."""
    if payload.get("processname") != "engine":
        return False
    return event == "PROCESS_STATE_FATAL" or payload.get("expected") == "1"


def run_listener(requests: TextIO, answers: TextIO, supervisord_pid: int) -> None:
    """Given supervisord's streams and PID, answer its events until it closes them."""
    for event, payload in _events(requests, answers):
        if ends_container(event, payload):
            _log.error("engine given up, the container ends", event=event)
            os.kill(supervisord_pid, signal.SIGTERM)


def _events(requests: TextIO, answers: TextIO) -> Iterable[tuple[str, dict[str, str]]]:
    while True:
        answers.write("READY\n")
        answers.flush()
        header = requests.readline()
        if not header:
            return
        headers = read_pairs(header)
        yield headers["eventname"], read_pairs(requests.read(int(headers["len"])))
        answers.write("RESULT 2\nOK")
        answers.flush()


def main() -> None:
    """Serve the listener protocol on this process's own streams."""
    configure_logging(os.environ)
    run_listener(sys.stdin, sys.stdout, os.getppid())


if __name__ == "__main__":
    main()
