# SPDX-License-Identifier: Apache-2.0
"""The control socket in vLLM's API server: an endpoint plug-in that adds no route.

An entry point of `vllm.endpoint_plugins`, so vLLM loads it only where VLLM_PLUGINS names it. Only
the first of several API servers opens the socket, and none of them can then be quiesced: each would
have to refuse its own requests. Without WARMHOLD_CONTROL_SOCKET nothing is done at all.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from warmhold_wcache import nvml, pages
from warmhold_wcache.control_engine import Token
from warmhold_wcache.control_protocol import ControlError
from warmhold_wcache.control_server import ControlServer
from warmhold_wcache.control_verbs import Control
from warmhold_wcache.door import Door
from warmhold_wcache.gate import Gate, GateMiddleware
from warmhold_wcache.server import listen

VARIABLE = "WARMHOLD_CONTROL_SOCKET"
_log = logging.getLogger("vllm.warmhold")  # below vLLM's own, or its handlers would not see it
# Of a vocabulary's first tokens many are special; these are plain bytes or characters mostly.
_FIRST_TOKEN, _TOKENS = 100, 8
_HTTP_BUSY = 503


class ControlPlugin:
    """vLLM's `EndpointPlugin`: made once for each API server."""

    name = "warmhold"
    required_tasks = None

    def __init__(self) -> None:
        self._path = os.environ.get(VARIABLE, "")
        self._gate = Gate()
        self._task: asyncio.Task[None] | None = None
        self._app: Any = None

    def attach_router(self, app: Any) -> None:
        """Given the FastAPI app, put the gate in front of its routes: added before vLLM's own
        middlewares it is the innermost one, so that keys are checked first and CORS headers added.
        """
        self._app = app
        if self._path:
            app.add_middleware(GateMiddleware, gate=self._gate)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Given the engine's client (None on a server without an engine), open the socket and serve
        it from the running event loop, until that ends."""
        if not self._path or engine_client is None:
            return
        if engine_client.vllm_config.parallel_config._api_process_rank != 0:
            return
        try:
            listener = listen(Path(self._path))
        except OSError as error:
            _log.warning("no control socket at %s: %s", self._path, error)
            return
        server = ControlServer(listener, Control(VllmEngine(engine_client, self._app), self._gate))
        self._task = asyncio.create_task(server.serve())
        _log.info("control socket at %s", self._path)


class VllmEngine:
    """vLLM's `EngineClient` as the verbs see an engine.

    No call has a time limit of vLLM's own: an answer that came too late would be taken for that of
    the next call.
    """

    def __init__(self, client: Any, app: Any) -> None:
        self._client = client
        self._app = app
        self._door: Door | None = None

    def find_obstacle(self) -> str:
        """Why its weights cannot be unmapped; "" where they can. Looks, and asks no worker: one
        without our methods logs an error with a traceback."""
        from vllm.model_executor import model_loader

        from warmhold_wcache.vllm_plugin.loader import WarmholdLoader

        config = self._client.vllm_config
        servers = config.parallel_config._api_process_count
        if servers > 1:
            return f"{servers} API servers share the engine"
        name = config.load_config.load_format
        if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(name) is not WarmholdLoader:
            return f"the weights were loaded with --load-format {name}"
        return ""

    def is_dead(self) -> bool:
        """Whether it will never answer again."""
        return bool(self._client.errored)

    def count_requests(self) -> int:
        """How many requests this API server has given to the engine and not got back."""
        return int(self._client.get_num_unfinished_requests())

    async def generate(
        self, prompt: Sequence[int] | None, with_logprob: bool, request_id: str
    ) -> Token:
        """Given token ids, or None for a prompt of its own, return the likeliest next token;
        computed, not taken from the prefix cache."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        if "generate" not in await self._client.get_supported_tasks():
            raise ControlError("control.unsupported", "this model does not generate")
        if prompt is None:
            size = self._client.model_config.get_vocab_size()
            prompt = [(_FIRST_TOKEN + index) % size for index in range(_TOKENS)]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=0 if with_logprob else None,  # 0: of the chosen token alone
            skip_reading_prefix_cache=True,
        )
        stream = self._client.generate(tokens_input(list(prompt)), params, request_id)
        choice = None
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    (choice,) = output.outputs
        except Exception as error:
            if getattr(error, "http_status", None) == _HTTP_BUSY:  # vLLM's GracefulHTTPError
                raise ControlError("control.busy", str(error), "try again later") from error
            raise
        if choice is None or not choice.token_ids:
            raise ControlError("control.failed", "the engine generated nothing", "see its log")
        token = int(choice.token_ids[0])
        logprob = float(choice.logprobs[0][token].logprob) if with_logprob else None
        return Token(token, choice.text, logprob)

    async def abort(self, request_id: str) -> None:
        """End a request; one that is not there is fine."""
        await self._client.abort(request_id)

    def shut_out(self) -> None:
        """Accept no client any more. vLLM keeps the server in the app's state."""
        server = getattr(self._app.state, "server", None)
        if self._door is None and server is not None:
            self._door = Door(server)
        if self._door is not None:
            self._door.shut()

    async def wait_gone(self) -> None:
        """Close connections on which no request comes, and wait until no client is connected."""
        if self._door is not None:
            await self._door.wait_gone()

    async def let_in(self) -> None:
        """Accept clients again."""
        if self._door is not None:
            await self._door.open()

    async def pause(self) -> None:
        """Begin no request any more, and return when none runs; cached prefixes are forgotten, what
        is free in this process's memory goes back to the kernel, and its files of the GPU are
        closed."""
        await self._client.pause_generation(mode="wait")
        pages.trim_heap()
        nvml.close()

    async def unpause(self) -> None:
        """Begin requests again."""
        await self._client.resume_generation()

    async def call_workers(self, method: str) -> list[dict[str, Any]]:
        """Call a worker method by name; return each worker's answer."""
        return list(await self._client.collective_rpc(method))
