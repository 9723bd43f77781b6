# SPDX-License-Identifier: Apache-2.0
"""What a runner or a snapshot asks of an engine over its control socket. Standard library only.

Every call makes a connection of its own, and none stays open.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .connection import Connection
from .control_protocol import (
    CANARY_S,
    DRAIN_S,
    RESUME_S,
    STATE_S,
    WORKERS_S,
    ControlError,
    to_control,
)
from .errors import WcacheError


class ControlClient:
    """An engine's control socket; a call to an engine that has none, or has ended, fails at once.

    `timeout_s` is what a call may take beyond the engine's own time. Every call raises
    ControlError; see `control_protocol` for the codes.
    """

    def __init__(self, path: Path, timeout_s: float = 5.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def canary(
        self,
        limit_s: float = CANARY_S,
        prompt: Sequence[int] | None = None,
        with_logprob: bool = True,
    ) -> dict[str, Any]:
        """Given a limit in seconds and token ids, generate one token greedily, past HTTP and its
        key. Return token (its id), text, logprob (None if not wanted) and seconds.

        The first log-probability of a process costs it the compilation of a kernel: seconds with a
        cache of it, tens of seconds without.
        """
        more = {} if prompt is None else {"prompt": list(prompt)}
        return self._ask("canary", limit_s, limit_s, logprob=with_logprob, **more)

    def hold(self, drain_s: float = DRAIN_S) -> dict[str, Any]:
        """Given the drain's limit in seconds, refuse requests with 503, let those that run end, and
        close the connections that are left; canaries are answered. Return seconds (drain). Raise
        control.busy or control.unsupported, and requests are then served as before."""
        return self._ask("hold", drain_s, drain_s)

    def quiesce(self, drain_s: float = DRAIN_S) -> dict[str, Any]:
        """Given the drain's limit in seconds, refuse requests with 503, let those that run end, and
        unmap the weights. Return quiesced, seconds (drain, unmap) and workers (a state for each).

        Raise control.busy where requests outlast the limit, control.unsupported where the weights
        cannot be unmapped; after any error but one requests are served as before: control.failed
        whose detail says that it could not be undone.
        """
        return self._ask("quiesce", drain_s, drain_s + 2 * WORKERS_S)

    def resume(self, limit_s: float = RESUME_S, serve: bool = True) -> dict[str, Any]:
        """Given a limit in seconds, map the weights again and serve, or stay held. Return quiesced,
        seconds (map) and workers. An engine that serves is fine, and goes on."""
        return self._ask("resume", limit_s, limit_s, serve=serve)

    def state(self, limit_s: float = STATE_S) -> dict[str, Any]:
        """Given a limit in seconds, return phase (serving, quiescing, held or quiesced), quiesced,
        nonce (a text that only this process and what is restored from it hold), requests and
        engine_requests (how many), unsupported (why there can be no quiesce, or "") and workers:
        for each its generations (id, bytes, segments, mapped) and detached."""
        return self._ask("state", limit_s, limit_s)

    def _ask(self, verb: str, limit_s: float, longest_s: float, **more: Any) -> dict[str, Any]:
        connection = Connection(self._path, longest_s + self._timeout_s)
        request = {"verb": verb, "timeout_s": limit_s, **more}
        try:
            return connection.call(lambda: connection.ask(request), again=False).body
        except WcacheError as error:
            raise to_control(error) from error.__cause__
        finally:
            connection.close()


__all__ = ["ControlClient", "ControlError"]
