# SPDX-License-Identifier: Apache-2.0
"""An engine as the control verbs see it, and asking it within a deadline.

Deadlines are times of the running event loop's clock.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .control_protocol import ControlError
from .errors import WcacheError

T = TypeVar("T")


@dataclass(frozen=True)
class Token:
    """One generated token: its id, its text ("" without a tokenizer), and its log-probability where
    that was asked for."""

    id: int
    text: str
    logprob: float | None


class Engine(Protocol):
    """What is asked of an engine. Every call may be cancelled, and may raise anything."""

    def find_obstacle(self) -> str:
        """Why its weights cannot be unmapped; "" where they can."""

    def is_dead(self) -> bool:
        """Whether it will never answer again."""

    def count_requests(self) -> int:
        """How many requests it has not finished."""

    async def generate(
        self, prompt: Sequence[int] | None, with_logprob: bool, request_id: str
    ) -> Token:
        """Given token ids, or None for a prompt of its own, return the likeliest next token."""

    async def abort(self, request_id: str) -> None:
        """End a request; one that is not there is fine."""

    def shut_out(self) -> None:
        """Accept no client any more. May be repeated."""

    async def wait_gone(self) -> None:
        """After `shut_out`, close connections on which no request comes, and wait until no client
        is connected; no limit but the caller's."""

    async def let_in(self) -> None:
        """Accept clients again; nothing where they are accepted."""

    async def pause(self) -> None:
        """Begin no request any more, and return when none runs."""

    async def unpause(self) -> None:
        """Begin requests again."""

    async def call_workers(self, method: str) -> list[dict[str, Any]]:
        """Call a worker method by name; return each worker's answer, in which `error` (code,
        detail, remedy) says that it could not."""


async def ask(engine: Engine, call: Awaitable[T], deadline: float) -> T:
    """Given one of the engine's calls, return its result; raise control.timeout, control.dead or
    control.failed. A WcacheError goes through."""
    loop = asyncio.get_running_loop()
    limit_s = deadline - loop.time()
    try:
        async with asyncio.timeout_at(deadline) as limit:
            return await call
    except WcacheError:
        raise
    except Exception as error:
        if limit.expired():
            raise ControlError(
                "control.timeout",
                f"the engine did not answer within {limit_s:.3g} s",
                "see the engine's log",
            ) from None
        code = "control.dead" if engine.is_dead() else "control.failed"
        detail = f"{type(error).__name__}: {error}"
        raise ControlError(code, detail, "see the engine's log") from error


async def ask_workers(engine: Engine, act: str, deadline: float) -> list[dict[str, Any]]:
    """Given an act, call `warmhold_<act>` on every worker and return their answers; raise what
    `ask` raises, and control.failed where a worker's answer is an error."""
    workers = await ask(engine, engine.call_workers(f"warmhold_{act}"), deadline)
    for rank, worker in enumerate(workers):
        error = worker.get("error")
        if error:
            detail = f"worker {rank}: {error['code']}: {error['detail']}"
            raise ControlError("control.failed", detail, str(error["remedy"]))
    return workers
