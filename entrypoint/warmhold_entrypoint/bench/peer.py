# SPDX-License-Identifier: Apache-2.0
"""Plain `vllm serve` beside ours: the same arguments, vLLM's own defaults, and nothing of warmhold.

It runs on the engine's port while that is stopped, with compile caches of its own that outlast it.
"""

import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from ..command import build_engine_argv, inherit_environment
from ..facts import read_facts
from ..running import tree
from ..running.phases import PhaseClock, Phases
from ..weight_cache import weights
from .container import Container

NAME = "vllm serve"
_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
_END_S = 60.0


class Peer:
    """Starts of plain vLLM in a container whose engine is stopped. `folder` is for its caches."""

    def __init__(self, container: Container, folder: Path) -> None:
        self._container = container
        self._log = folder / "vllm.log"
        settings, plan = container.settings, container.plan
        kv_bytes = plan.kv_cache_bytes
        facts = read_facts(settings)
        self._argv = build_engine_argv(settings, facts, kv_bytes)
        caches = {name: str(folder / name.lower()) for name in _CACHES}
        offline = {"HF_HUB_OFFLINE": "1"} if plan.model_directory else {}
        plugins = ",".join(name for name in facts.plugins if name != weights.PLUGIN)
        own = {"VLLM_PLUGINS": plugins, **caches, **offline}
        self._environment = inherit_environment(settings, own)
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> tuple[float | None, Phases, list[str], str]:
        """Start it, and end it again. Return the seconds to the first token (None: it never came),
        its phases, its answers to the known prompts, and the end of its log."""
        clock, answers = PhaseClock(), list[str]()
        began = time.monotonic()
        process = subprocess.Popen(
            self._argv,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = threading.Thread(target=self._follow, args=(process.stdout, clock), daemon=True)
        lines.start()
        try:
            served = self._container.first_token(over=lambda: process.poll() is not None)
            seconds = time.monotonic() - began if served else None
            phases = clock.finish()
            if served:
                answers = self._container.ask()
        finally:
            _end(process)
            lines.join(_END_S)
        return seconds, phases, answers, self._log.read_text(errors="replace")[-2000:]

    def _follow(self, output: IO[bytes], clock: PhaseClock) -> None:
        with self._log.open("wb") as log:
            for line in output:
                clock.see_line(line)
                log.write(line)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, and kill what is left of its tree, whatever sessions that has."""
    members = tree.find_below(process.pid)
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)
    for member in members:
        tree.send_signal(member, signal.SIGKILL)
