# SPDX-License-Identifier: Apache-2.0
"""The container that is measured, from inside: its engine is restarted, asked, and looked at."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from warmhold_snapshot import artifact
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache.control_client import ControlClient, ControlError

from ..container.conf import CONF_NAME, CONTROL_SOCKET
from ..errors import EntrypointError, Fault
from ..model import weight_files
from ..plan import Plan
from ..reporting.states import State
from ..reporting.status import ask_status
from ..running.engine_http import ProbeError, Target, request
from ..running.orders import CREATE, RESTART, give_order
from ..running.readiness import build_target
from ..settings import Settings
from ..snapshot_mode.snapshot_engine import PROMPTS
from ..snapshot_mode.snapshots import FOLDER
from ..start import make_plan, read_command

NAME = "bench"
_TOKENS = 8
_ORDER_S = 3600.0
_POLL_S = 0.01
_ASK_S = 60.0
_AGAIN_S = 0.5
T = TypeVar("T")


class Container:
    """A running container of the product. Owns the snapshot `bench`, until `remove_snapshot`."""

    def __init__(self, run_dir: Path) -> None:
        """Given the run directory; raise EntrypointError where no engine is supervised there, or it
        completes no text."""
        self._run_dir = run_dir
        if not self.status():
            detail = "no answer from the engine's runner"
            fault = Fault("ready.no-runner", detail, "run it in a container that serves")
            raise EntrypointError([fault])
        self.command = read_command(run_dir)
        self.settings, self.plan = self.make_plan()
        self.target: Target = build_target(self.settings)
        folder = Path(self.plan.model_directory or "/nonexistent")
        self.weights = [path.resolve() for path in weight_files(folder)]
        self._control = ControlClient(run_dir / CONTROL_SOCKET)
        self.wait_ready()
        try:
            self.answers = self.ask()
        except (ProbeError, ValueError, KeyError) as error:
            detail = f"the engine completes no text: {error}"
            fault = Fault("usage.bench", detail, "measure a model that generates text")
            raise EntrypointError([fault]) from error

    def make_plan(self) -> tuple[Settings, Plan]:
        """Return settings and plan of a start from disk; raise EntrypointError for a fault."""
        settings, plan, faults, _ = make_plan(self.command, tolerated=("port.taken",), mode="disk")
        if faults:
            raise EntrypointError(faults)
        return settings, plan

    def status(self) -> dict[str, Any]:
        """Return the runner's status; {} where it does not answer."""
        return ask_status(self._run_dir, 5.0) or {}

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the engine serves; return the status, raise EntrypointError in the end."""

        def ready() -> dict[str, Any] | None:
            status = self.status()
            return status if status.get("ready") else None

        limit_s = self.settings.env.ready_timeout_s
        found = _wait(ready, float(limit_s))
        if found is None:
            detail = f"no engine serves here within {limit_s} s"
            fault = Fault("ready.timeout", detail, "see `warmhold status` and the container's log")
            raise EntrypointError([fault])
        return found

    def restart(self, mode: str) -> tuple[float | None, dict[str, Any]]:
        """Given a mode, restart the engine in it; return the seconds from the order to the first
        token over HTTP, and the runner's answer to the order (`ok`, code, detail)."""
        answers: list[dict[str, Any]] = []
        began = time.monotonic()
        order = threading.Thread(
            target=lambda: answers.append(
                give_order(self._run_dir, RESTART, "", _ORDER_S, mode=mode)
            ),
            daemon=True,
        )
        order.start()

        def refused() -> bool:
            return bool(answers) and not answers[0]["ok"]

        # The engine before has gone as soon as the next one is tried: what answers is the new one.
        _wait(lambda: answers or self.status().get("state") == State.TRYING, _ORDER_S)
        served = self.first_token(over=refused)
        first_token_s = time.monotonic() - began
        order.join(_ORDER_S)
        answer = answers[0] if answers else {"ok": False, "code": "bench.no-answer"}
        # A restored engine may answer, and then fail its canary.
        return (first_token_s if served and answer["ok"] else None), answer

    def ask(self) -> list[str]:
        """Return the answers to known prompts, greedily decoded."""
        return [self._complete(prompt, _TOKENS) for prompt in PROMPTS]

    def nonce(self) -> str:
        """Return the text that only the running process and its snapshots hold; "" for none."""
        try:
            return str(self._control.state()["nonce"])
        except ControlError:
            return ""

    def create_snapshot(self) -> dict[str, Any]:
        """Make the snapshot `bench` of the running engine; return the runner's answer. One that is
        being made by itself comes first."""
        while True:
            self.wait_ready()
            answer = give_order(self._run_dir, CREATE, NAME, _ORDER_S)
            if answer.get("code") != "snapshot.not-serving":
                return answer
            time.sleep(_AGAIN_S)

    def snapshot_nonce(self) -> str:
        """Return the nonce in the snapshot; "" where there is none."""
        with suppress(SnapshotError):
            return str(Store(self._folder).read(NAME).canary.get("nonce", ""))
        return ""

    def snapshot_files(self) -> list[Path]:
        """Return the files of the snapshot."""
        return [path for path in (self._folder / NAME).rglob("*") if path.is_file()]

    def remove_snapshot(self) -> None:
        """Remove the snapshot `bench` and the weights that nothing else needs."""
        with suppress(OSError, SnapshotError):
            artifact.remove(self._folder / NAME)
            Store(self._folder).sweep_weights()

    def supervise(self, act: str) -> None:
        """Given `start` or `stop`, do it with the engine; raise RuntimeError where that fails."""
        done = subprocess.run(
            ["supervisorctl", "-c", str(self._run_dir / CONF_NAME), act, "engine"],
            capture_output=True,
            text=True,
            timeout=_ORDER_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"supervisorctl {act} engine: {done.stdout}{done.stderr}")

    def first_token(self, over: Callable[[], bool]) -> bool:
        """Ask until one token comes, or until it is `over`; tell whether it came."""
        return bool(_wait(lambda: over() or self._has_token(), _ORDER_S)) and not over()

    @property
    def _folder(self) -> Path:
        return self.settings.env.state_dir / FOLDER

    def _has_token(self) -> bool:
        try:
            self._complete(PROMPTS[0], 1)
        except (ProbeError, ValueError, KeyError, IndexError):
            return False
        return True

    def _complete(self, prompt: list[int], count: int) -> str:
        body: Mapping[str, Any] = {
            "model": self.target.model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
        }
        answer = request(self.target, "POST", "/v1/completions", _ASK_S, json.dumps(body))
        return str(json.loads(answer)["choices"][0]["text"])


def _wait(question: Callable[[], T], limit_s: float) -> T | None:
    """Ask until the answer is true; return it, or None once the limit is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if answer := question():
            return answer
        time.sleep(_POLL_S)
    return None
