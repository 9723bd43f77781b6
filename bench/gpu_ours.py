# SPDX-License-Identifier: Apache-2.0
"""The rows of our own product: for one size of weights, the ways to start, live snapshots, what it
costs to hold the weights."""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_client import Answer, compare
from gpu_machine import used_mib
from gpu_stack import Stack
from gpu_table import Table
from gpu_upstream import Upstream

# How often each way to start is measured, by size: the slow ones less. "compiled snapshot" is of
# the engine whose start filled the caches, "snapshot" of one that found them, as its peers do.
_FEW = {"compiled snapshot": 1, "snapshot": 3, "kill": 1, "ipc_cache": 1, "disk": 1}
_MORE = {"compiled snapshot": 2, "snapshot": 5, "kill": 2, "ipc_cache": 3, "disk": 3}
COUNTS = {"1gb": _FEW, "16gb": _MORE, "64gb": _FEW}
ONCE = ("first start", "compiled live snapshot", "live snapshot", "processes")
# With the KV cache's size given vLLM measures no memory, which two engines would disturb. The
# share has to have room for the weights of the greatest: vLLM's own ipc_cache ends otherwise.
ENGINE = ["--max-model-len", "1024", "--gpu-memory-utilization", "0.6"]
ENGINE += ["--kv-cache-memory-bytes", str(8 << 30)]


_SECONDS = re.compile(r"(\w+)_s=([\d.]+)")


@dataclass
class Job:
    """One size: where its model is, and what runs it."""

    size: str
    stack: Stack
    upstream: Upstream
    gpu: int
    counts: dict[str, int]  # how often each row is measured
    compared: bool  # with vLLM alone

    @property
    def model(self) -> str:
        """The model's folder."""
        return self.stack.model

    def equal(self, answers: list[Answer]) -> dict[str, int]:
        """Compare with the answers of the first start, also of an earlier run."""
        path = self.upstream.log.with_name("answers.json")
        if not path.exists():
            path.write_text(json.dumps(answers))
        return compare(answers, json.loads(path.read_text()))


def lacks_ours(table: Table, job: Job, skip: list[str]) -> bool:
    """Whether rows of ours are left to measure, but for those whose names begin with a word to
    skip."""
    counts = {**job.counts, **dict.fromkeys(ONCE, 1)}
    return any(
        table.lacks(f"{job.size} {name}", count)
        for name, count in counts.items()
        if name.split()[0] not in skip
    )


def describe(status: dict[str, Any]) -> dict[str, Any]:
    """What of a status is worth a row."""
    weights = status.get("weights") or {}
    shown = {name: weights.get(name) for name in ("mode", "bytes", "seconds", "code")}
    phases = {name: round(value, 3) for name, value in status["phases"].items()}
    return {"mode": status["mode"], "phases": phases, "weights": shown}


def restart(job: Job, mode: str) -> dict[str, Any]:
    """Stop our engine and start it; raise where it comes in another mode. `stopped_mib` is what the
    GPU holds meanwhile: the weights, and what holding them costs besides."""
    job.stack.supervise("stop", "engine")
    since = job.stack.log.stat().st_size
    time.sleep(1.0)  # until the GPU has an ended process's memory back
    stopped_mib = used_mib(job.gpu)
    seconds, status = job.stack.start_engine()
    if status["mode"] != mode:
        raise RuntimeError(f"{mode} was wanted, it is {status['mode']}: {status['rejections']}")
    found: dict[str, Any] = {"first_token_s": round(seconds, 3)}
    found |= {"runner_s": round(status["total_s"], 3)}
    found |= {"loader": read_loader(job.stack.log.read_bytes()[since:].decode(errors="replace"))}
    equal = job.equal(job.stack.ask_all())
    return {**found, **describe(status), "stopped_mib": stopped_mib, "equal": equal}


def read_loader(text: str) -> dict[str, float]:
    """Given a start's log, return the seconds that the loader, or a restored engine's mapping, says
    its parts took."""
    lines = [line for line in text.splitlines() if re.search("weights .*fetch_s=", line)]
    return {name: float(value) for name, value in _SECONDS.findall(lines[-1] if lines else "")}


def create(job: Job) -> dict[str, Any]:
    """Make a snapshot of the serving engine."""
    pid = job.stack.status()["pid"]
    code, out, error = job.stack.run("snapshot-create", "--json", "--name", "a")
    if code:
        raise RuntimeError(f"{code}: {out} {error}")
    made: dict[str, Any] = json.loads(out)
    after = job.stack.wait_ready(1, 60)
    kept = ("pause_s", "frozen_s", "image_bytes", "bytes_by_process", "seconds")
    equal = job.equal(job.stack.ask_all())
    same = after["pid"] == pid
    return {**{name: made[name] for name in kept}, "same_engine": same, "equal": equal}


def show_processes(job: Job) -> list[list[Any]]:
    """Each process of the engine: its name, resident MiB, and the driver's files that it has."""
    from warmhold_snapshot.fds import read_held
    from warmhold_snapshot.pids import read_tree

    rows: list[list[Any]] = []
    for process in read_tree(job.stack.engine_pid()):
        links = {item.link for item in read_held(process.pid).descriptors}
        files = sorted(link for link in links if link.startswith("/dev/nvidia"))
        resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) >> 8
        rows.append([process.name, resident, files])
    return rows


def measure_snapshots(table: Table, job: Job, logs: Path, kind: str = "") -> None:
    """Rows of snapshots of a size whose engine serves, by the row's name; criu's logs go to a
    folder."""
    name = f"{job.size} {kind}"
    count = job.counts[f"{kind}snapshot"]
    job.equal(job.stack.ask_all())
    table.fill(f"{name}live snapshot", 1, lambda: create(job))
    if table.lacks(f"{name}snapshot", count) and not has_snapshot(job):
        table.say(f"{name}: {create(job)}")
    table.fill(f"{name}snapshot", count, lambda: restart(job, "snapshot"))
    logs.mkdir(parents=True, exist_ok=True)
    state = Path(job.stack.environment["WARMHOLD_STATE_DIR"])
    for path in state.glob("snapshots/*/*.log"):
        shutil.copy(path, logs / f"{name}{path.name}".replace(" ", "-"))


def measure_kills(table: Table, job: Job) -> None:
    """The row of engines that were killed, and come back from their snapshot by themselves."""

    def kill() -> dict[str, Any]:
        starts, began = job.stack.status()["starts"], time.monotonic()
        job.stack.kill_engine()
        seconds = job.stack.wait_answer() - began
        status = job.stack.wait_ready(starts + 1, 60)
        equal = job.equal(job.stack.ask_all())
        return {"first_token_s": round(seconds, 3), **describe(status), "equal": equal}

    table.fill(f"{job.size} kill", job.counts["kill"], kill)


def measure_cache(table: Table, job: Job, count: int) -> None:
    """So many values of the row of starts on resident weights; snapshots are removed for that."""
    if not table.lacks(f"{job.size} ipc_cache", count):
        return
    remove = [sys.executable, "-m", "warmhold_snapshot.cli", "prune", "--keep", "0"]
    subprocess.run(remove, env=job.stack.environment, check=False, timeout=60)
    table.fill(f"{job.size} ipc_cache", count, lambda: restart(job, "ipc_cache"))


def measure_disk(table: Table, job: Job) -> None:
    """The row of starts from disk."""

    def from_disk() -> dict[str, Any]:
        forget_weights(job)
        return restart(job, "disk")

    table.fill(f"{job.size} disk", job.counts["disk"], from_disk)


def has_snapshot(job: Job) -> bool:
    """Whether there is one to restore."""
    return any(
        (Path(job.stack.environment["WARMHOLD_STATE_DIR"]) / "snapshots").glob("*/manifest*")
    )


def forget_weights(job: Job) -> None:
    """Drop all that the vault holds; the engine is stopped for that."""
    from warmhold_wcache.client import VaultClient

    job.stack.supervise("stop", "engine")
    with VaultClient(job.stack.run_dir / "wcache.sock") as client:
        for row in client.stat():
            client.drop(row["id"], force=True)
