# SPDX-License-Identifier: Apache-2.0
"""The runner's answer to "how is it?", over a socket, as a table, and as Prometheus text.

Asked anew each time; never read from a file, because a file outlives the truth in it.
"""

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..running.loop import Loop
from ..running.runner_socket import RunnerSocket, ask

SOCKET_NAME = "engine.sock"
_WEIGHTS_FROM = {
    "disk": "read from disk",
    "flat": "read from a flat file",
    "ipc_cache": "mapped from the vault",
    "vllm": "mapped from `vllm preload`",
}

Status = dict[str, Any]


def serve_status(run_dir: Path, loop: Loop, answer: Callable[[], Status]) -> RunnerSocket:
    """Given the run directory, answer every connection from the loop until the socket is closed."""

    def send(connection: socket.socket) -> None:
        # The answer is far smaller than a socket's buffer, so nobody can make the loop wait.
        with connection, suppress(OSError):
            connection.sendall(json.dumps(answer()).encode() + b"\n")

    return RunnerSocket(run_dir / SOCKET_NAME, loop, send)


def ask_status(run_dir: Path, timeout_s: float) -> Status | None:
    """Given the run directory, return the runner's status, or None where nobody answers in time."""
    try:
        status = json.loads(ask(run_dir / SOCKET_NAME, b"", timeout_s))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def build_metrics(status: Status | None) -> str:
    """Given a status (None: no runner answered), return Prometheus text, version 0.0.4."""
    lines = []

    def add(name: str, kind: str, meaning: str, samples: dict[str, float]) -> None:
        lines.append(f"# HELP warmhold_{name} {meaning}")
        lines.append(f"# TYPE warmhold_{name} {kind}")
        lines.extend(f"warmhold_{name}{labels} {value!r}" for labels, value in samples.items())

    add("up", "gauge", "Whether the runner answers.", {"": float(status is not None)})
    if status is None:
        return "\n".join(lines) + "\n"
    add("engine_ready", "gauge", "Whether the engine serves.", {"": float(status["ready"])})
    degraded = float(bool(status["degraded"]))
    add("engine_degraded", "gauge", "Serves, but its weights are not held.", {"": degraded})
    add(
        "engine_state",
        "gauge",
        "The runner's state; the current one is 1.",
        {_label(state=status["state"]): 1.0},
    )
    add("engine_starts_total", "counter", "Engine starts.", {"": float(status["starts"])})
    add(
        "engine_crashes_total",
        "counter",
        "Engine ends that nobody asked for.",
        {"": float(status["crashes"])},
    )
    add("engine_uptime_seconds", "gauge", "Since it serves.", {"": status["uptime_s"] or 0.0})
    if status["mode"]:
        add(
            "engine_mode",
            "gauge",
            "The mode that served last; the current one is 1.",
            {_label(mode=status["mode"]): 1.0},
        )
    add(
        "mode_rejected",
        "gauge",
        "Why a mode is not used.",
        {_label(mode=item["mode"], code=item["code"]): 1.0 for item in status["rejections"]},
    )
    add(
        "start_phase_seconds",
        "gauge",
        "Phases of the last start.",
        {_label(phase=name): value for name, value in status["phases"].items()},
    )
    return "\n".join(lines) + "\n"


def _label(**labels: str) -> str:
    """Given label names and values, return them as Prometheus text has them."""
    pairs = (
        '{}="{}"'.format(name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(pairs) + "}"


def render_status(status: Status) -> str:
    """Given a status, return it as lines of text, a name and a value each."""
    last, uptime_s, saved_as = status["last_exit"], status["uptime_s"], status["saved_as"]
    # Upstream's carry a label: `vllm:NAME`.
    mode = " ".join(
        filter(None, [status["mode"], status["snapshot"] and f"({status['snapshot']})"])
    )
    rows = [
        ("state", status["state"] + ("" if status["ready"] else " (not ready)")),
        ("reason", status["reason"]),
        *([("degraded", status["degraded"])] if status["degraded"] else []),
        ("mode", mode or "-"),
        *(
            (f"not {item['mode']}", f"{item['code']}: {item['detail']}")
            for item in status["rejections"]
        ),
        *([("saved as", f"{saved_as}, for the next start")] if saved_as else []),
        *([("weights", _weights_text(status["weights"]))] if status["weights"] else []),
        ("model", status["model"]),
        ("url", status["url"]),
        ("uptime", "-" if uptime_s is None else f"{uptime_s:.0f} s"),
        ("starts", f"{status['starts']} ({status['crashes']} crashes)"),
        ("last exit", f"{last['code']}: {last['reason']}" if last else "-"),
    ]
    if status["phases"]:
        phases = ", ".join(f"{name} {value:.2f}" for name, value in status["phases"].items())
        rows.append(("last start", f"{status['total_s']:.2f} s: {phases}"))
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def _weights_text(found: dict[str, Any]) -> str:
    """Given what the loads did, return it as a phrase."""
    where = _WEIGHTS_FROM[found.get("holder") or found["mode"]]
    text = f"{found['bytes'] / (1 << 20):.0f} MiB {where} in {found['seconds']:.2f} s"
    if found["published"]:
        return f"{text}, published as {', '.join(found['published'])}"
    return f"{text}; not published: {found['not_published']}" if found["not_published"] else text
