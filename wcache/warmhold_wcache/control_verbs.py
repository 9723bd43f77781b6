# SPDX-License-Identifier: Apache-2.0
"""What an engine does when asked over its control socket: canary, hold, quiesce, resume, state.

Owns whether the engine is held. A quiesce that does not get through leaves the engine as it was
before. All belongs to one event loop.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

from .control_engine import Engine, ask, ask_workers
from .control_protocol import (
    CANARY_S,
    DRAIN_S,
    RESUME_S,
    STATE_S,
    WORKERS_S,
    ControlError,
    read_flag,
    read_limit,
    read_prompt,
)
from .errors import WcacheError, malformed
from .gate import Gate

_log = logging.getLogger("vllm.warmhold")  # below vLLM's own, or its handlers would not see it
Answer = dict[str, Any]


class Phase(StrEnum):
    """Where the engine stands."""

    SERVING = "serving"
    QUIESCING = "quiescing"
    HELD = "held"
    QUIESCED = "quiesced"


_EDGES = {
    Phase.SERVING: {Phase.QUIESCING},
    Phase.QUIESCING: {Phase.HELD, Phase.QUIESCED, Phase.SERVING},
    Phase.HELD: {Phase.QUIESCING, Phase.SERVING},
    Phase.QUIESCED: {Phase.HELD},
}


class Control:
    """The verbs, for a control server to call. Limits are in seconds."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        # Written nowhere: who knows it is this process, or was restored from it.
        self._nonce = secrets.token_hex(16)
        self._engine = engine
        self._gate = gate
        self._phase = Phase.SERVING
        self._lock = asyncio.Lock()
        self._canaries = 0
        self._resuming: set[asyncio.Task[Answer]] = set()

    @property
    def is_quiesced(self) -> bool:
        """Whether the weights are unmapped, or may be."""
        return self._phase is Phase.QUIESCED

    async def handle(self, body: dict[str, Any]) -> Answer:
        """Given a request, return its answer; raise WcacheError."""
        match body.get("verb"):
            case "canary":
                limit_s, with_logprob = read_limit(body, CANARY_S), read_flag(body, "logprob", True)
                return await self.canary(limit_s, read_prompt(body), with_logprob)
            case "hold":
                return await self.hold(read_limit(body, DRAIN_S))
            case "quiesce":
                return await self.quiesce(read_limit(body, DRAIN_S))
            case "resume":
                return await self.resume(read_limit(body, RESUME_S), read_flag(body, "serve", True))
            case "state":
                return await self.state(read_limit(body, STATE_S))
        raise malformed("no such verb; there are canary, hold, quiesce, resume, state")

    async def canary(
        self, limit_s: float, prompt: Sequence[int] | None, with_logprob: bool
    ) -> Answer:
        """Given a limit and token ids (None: the engine's own), generate one token, and return
        token (its id), text, logprob (None where it is not asked for) and seconds."""
        if self._phase not in (Phase.SERVING, Phase.HELD):
            raise ControlError("control.quiesced", f"the engine is {self._phase}", "resume first")
        began = _now()
        self._canaries += 1
        request_id = f"warmhold-canary-{self._canaries}"
        self._gate.enter()
        try:
            call = self._engine.generate(prompt, with_logprob, request_id)
            token = await ask(self._engine, call, began + limit_s)
        except BaseException:
            with suppress(Exception):  # of a dead engine
                await self._engine.abort(request_id)
            raise
        finally:
            self._gate.leave()
        if token.logprob is not None and not math.isfinite(token.logprob):
            detail = f"token {token.id} has the log-probability {token.logprob}"
            raise ControlError("control.failed", detail, "the weights are damaged; restart")
        return {
            "ok": True,
            "token": token.id,
            "text": token.text,
            "logprob": token.logprob,
            "seconds": _since(began),
        }

    async def hold(self, limit_s: float) -> Answer:
        """Given a limit, refuse new requests, wait for those that run, close the connections that
        are left, and accept no more: clients wait until `resume`. Canaries are answered meanwhile.
        Return seconds (drain).

        Raise control.busy where requests outlast the limit; requests are then served as before.
        """
        self._require_support()
        began = _now()
        await self._take_lock(began + limit_s)
        try:
            if self._phase is Phase.SERVING:
                self._advance(Phase.QUIESCING, "asked to hold")
                self._gate.shut()
                try:
                    await self._within(began, limit_s, self._gate.wait_empty())
                    self._engine.shut_out()
                    await self._within(began, limit_s, self._engine.wait_gone())
                except BaseException as error:
                    await self._put_back((), error)
                    raise
                self._advance(Phase.HELD, "drained")
            self._engine.shut_out()
        finally:
            self._lock.release()
        return {"ok": True, "quiesced": self.is_quiesced, "seconds": {"drain": _since(began)}}

    async def quiesce(self, limit_s: float) -> Answer:
        """Given the drain's limit, refuse new requests, wait for those that run, and unmap the
        weights. Return seconds (drain, unmap) and each worker's state.

        Raise control.busy where requests outlast the limit; then, and after any other error or a
        cancellation, requests are served as before.
        """
        self._require_support()
        began = _now()
        await self._take_lock(began + limit_s)
        try:
            held = self.is_quiesced
            if not held:
                self._advance(Phase.QUIESCING, "asked to")
                self._gate.shut()
            done: list[str] = []
            try:
                await self._drain(began, limit_s, done)
                drained = _now()
                done.append("unmap")
                workers = await ask_workers(self._engine, "quiesce", drained + WORKERS_S)
            except BaseException as error:
                if not held:
                    await self._put_back(done, error)
                raise
            if not held:
                self._advance(Phase.QUIESCED, "drained and unmapped")
        finally:
            self._lock.release()
        seconds = {"drain": round(drained - began, 4), "unmap": _since(drained)}
        return {"ok": True, "quiesced": True, "seconds": seconds, "workers": workers}

    async def resume(self, limit_s: float, serve: bool = True) -> Answer:
        """Given a limit, map the weights again, and serve; else the engine stays held, and canaries
        alone are answered. Return seconds (map) and each worker's state. Goes on to its end though
        its client goes away."""
        task = asyncio.ensure_future(self._resume(limit_s, serve))
        self._resuming.add(task)
        task.add_done_callback(self._end_resume)
        return await asyncio.shield(task)

    async def state(self, limit_s: float) -> Answer:
        """Given a limit, return phase, quiesced, nonce (a random text that this process alone holds
        from its start on, and what is restored from it), requests (that entered and have not left),
        engine_requests, unsupported ("" or why) and each worker's state (none if so)."""
        obstacle = self._engine.find_obstacle()
        workers = []
        if not obstacle:
            workers = await ask_workers(self._engine, "state", _now() + limit_s)
        return {
            "ok": True,
            "phase": self._phase,
            "quiesced": self.is_quiesced,
            "nonce": self._nonce,
            "requests": self._gate.inside,
            "engine_requests": self._engine.count_requests(),
            "unsupported": obstacle,
            "workers": workers,
        }

    def _require_support(self) -> None:
        obstacle = self._engine.find_obstacle()
        if obstacle:
            remedy = "start with --load-format warmhold and one API server"
            raise ControlError("control.unsupported", obstacle, remedy)

    async def _within(self, began: float, limit_s: float, what: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout_at(began + limit_s):
                await what
        except TimeoutError:
            raise self._busy(limit_s) from None

    async def _drain(self, began: float, limit_s: float, done: list[str]) -> None:
        """Wait until nobody is inside, and then until the engine has finished."""
        # Or one would reach it paused and hang.
        await self._within(began, limit_s, self._gate.wait_empty())
        self._engine.shut_out()
        await self._within(began, limit_s, self._engine.wait_gone())
        done.append("pause")
        try:
            await ask(self._engine, self._engine.pause(), began + limit_s)
        except ControlError as error:
            if error.code != "control.timeout":
                raise
            raise self._busy(limit_s) from None

    async def _let_in(self) -> None:
        await self._engine.let_in()
        self._gate.open()

    def _busy(self, limit_s: float) -> ControlError:
        count = max(self._gate.inside, self._engine.count_requests())
        detail = f"{count} requests still run after {limit_s:g} s"
        return ControlError("control.busy", detail, "try again later, or with a longer limit")

    async def _put_back(self, done: Sequence[str], error: BaseException) -> None:
        """Undo a quiesce that failed; where that fails too the engine stays held."""
        deadline = _now() + WORKERS_S
        try:
            if "unmap" in done:
                await ask_workers(self._engine, "resume", deadline)
            if "pause" in done:
                await ask(self._engine, self._engine.unpause(), deadline)
        except BaseException as second:
            self._advance(Phase.QUIESCED, f"a quiesce could not be undone: {second}")
            if not isinstance(error, WcacheError):
                raise
            detail = f"{error}; and it could not be undone: {second}"
            remedy = "resume; if that fails too, restart the engine"
            raise ControlError("control.failed", detail, remedy) from error
        await self._let_in()
        self._advance(Phase.SERVING, f"quiesce undone: {error!r}")

    async def _resume(self, limit_s: float, serve: bool) -> Answer:
        began = _now()
        deadline = began + limit_s
        await self._take_lock(deadline)
        try:
            workers: list[Answer] = []
            if self._phase is Phase.QUIESCED:
                workers = await ask_workers(self._engine, "resume", deadline)
                await ask(self._engine, self._engine.unpause(), deadline)
                self._advance(Phase.HELD, "mapped")
            if serve and self._phase is Phase.HELD:
                await self._let_in()
                self._advance(Phase.SERVING, "let go")
        finally:
            self._lock.release()
        seconds = {"map": _since(began)}
        return {"ok": True, "quiesced": False, "seconds": seconds, "workers": workers}

    def _end_resume(self, task: asyncio.Task[Answer]) -> None:
        self._resuming.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.warning("control resume failed: %s", error)

    async def _take_lock(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            detail = f"another request is at it; the engine is {self._phase}"
            raise ControlError("control.busy", detail, "try again later") from None

    def _advance(self, phase: Phase, reason: str) -> None:
        assert phase in _EDGES[self._phase], f"{self._phase} to {phase}"
        _log.info("control %s to %s: %s", self._phase, phase, reason)
        self._phase = phase


def _now() -> float:
    return asyncio.get_running_loop().time()


def _since(began: float) -> float:
    return round(_now() - began, 4)
