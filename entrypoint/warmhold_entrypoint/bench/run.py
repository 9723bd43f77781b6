# SPDX-License-Identifier: Apache-2.0
"""One benchmark: which starts, in what order, under which conditions, and what came of each.

Modes take turns (A B C A B C), so that a machine that grows slower does so for all of them.
"""

import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .. import VERSION
from ..facts import read_facts
from ..log import redact_argv
from ..settings import MODES
from . import page_cache
from .container import Container
from .peer import NAME as PEER
from .peer import Peer
from .proof import Evidence, find_faults
from .result import BASELINE, Result, Snapshot, Start, complete, summarise

COLD = "disk, empty compile caches"
_STATE = {
    "warm": "weight files are in the page cache for starts from disk, and dropped from it before"
    " the others; snapshots are as the start before left them (in memory, where it has room)",
    "cold": "weight files and snapshots are dropped from the page cache before each start",
}


@dataclass(frozen=True)
class Options:
    """What is measured: `rounds` of each of the `modes`, `cold` starts with empty compile caches,
    `peer` starts of plain vLLM after one that fills its caches; `page_cache` is warm or cold."""

    rounds: int = 3
    modes: tuple[str, ...] = tuple(reversed(MODES))
    cold: int = 0
    peer: int = 0
    page_cache: str = "warm"


class Bench:
    """One run. `say` gets a line of text for each step, as it is done."""

    def __init__(
        self, container: Container, options: Options, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._container = container
        self._options = options
        self._folder = folder
        self._say = say
        self._starts: list[Start] = []
        self._nonces: set[str] = set()
        self._snapshot: Snapshot | None = None
        self._notes: list[str] = []
        self._total = options.cold + options.rounds * len(options.modes) + options.peer

    def run(self) -> Result:
        """Measure everything; return what was found. The engine serves again afterwards."""
        container, options = self._container, self._options
        self._nonces.add(container.nonce())
        peer = Peer(container, self._folder / "peer") if options.peer else None
        for index in range(options.cold):
            self._drop_caches()
            self._measure(COLD, "disk", index)
        for mode in self._choose_warm_ups():
            self._warm_up(mode)
        if "snapshot" in options.modes:
            self._make_snapshot()
        if peer:
            self._say("plain vLLM fills its caches, which is not counted")
            self._run_peer(peer, None)
        for index in range(options.rounds):
            for mode in options.modes:
                self._measure(mode, mode, index)
            if peer and index < options.peer:
                self._run_peer(peer, index)
        container.remove_snapshot()
        return self._build_result()

    def _choose_warm_ups(self) -> list[str]:
        """Starts that are not counted: their caches are warm for those that are, and a snapshot is
        made of an engine whose weights are the vault's, which then stay there."""
        status = self._container.status()
        found = status.get("weights") or {}
        eager = self._container.settings.arguments.has("--enforce-eager")
        mapped = bool(found.get("published")) or found.get("mode") == "ipc_cache"
        warm_ups = []
        if not (eager or self._options.cold or status.get("mode") == "disk"):
            warm_ups.append("disk")
        if set(self._options.modes) != {"disk"} and not (eager and mapped):
            warm_ups.append("ipc_cache")
        return warm_ups

    def _warm_up(self, mode: str) -> None:
        """A start that fills caches, and proves nothing."""
        self._say(f"a start in mode {mode} that is not counted: what it compiles is kept")
        self._container.wait_ready()
        self._container.restart(mode)
        self._nonces.add(self._container.nonce())

    def _measure(self, name: str, mode: str, index: int) -> None:
        """One start of ours, with all that it has to prove."""
        container = self._container
        container.wait_ready()
        self._prepare_pages(mode)
        before = self._resident()
        first_token_s, answer = container.restart(mode)
        if first_token_s is None:
            faults = [f"{answer.get('code', '')}: {answer.get('detail', 'it never served')}"]
            self._keep(Start(name, index, None, None, {}, {}, faults))
            return
        status = container.wait_ready()
        seen = Evidence(
            wanted=mode,
            mode=str(status["mode"]),
            weights=status["weights"] or {},
            weight_bytes=sum(path.stat().st_size for path in container.weights),
            answers=container.ask(),
            known_answers=self._container.answers,
            nonce=container.nonce(),
            nonces_before=frozenset(self._nonces),
            snapshot_nonce=container.snapshot_nonce(),
            cached_before_bytes=before,
            cached_after_bytes=self._resident(),
        )
        self._nonces.add(seen.nonce)
        faults = find_faults(seen)
        self._keep(
            Start(
                name,
                index,
                None if faults else first_token_s,
                status["total_s"],
                complete(status["phases"], first_token_s),
                seen.to_json(),
                faults,
            )
        )

    def _run_peer(self, peer: Peer, index: int | None) -> None:
        """Plain vLLM in the engine's place; it is held to nothing, and its answers are compared."""
        self._container.wait_ready()
        self._prepare_pages("disk")
        self._container.supervise("stop")
        try:
            seconds, phases, answers, log = peer.start()
        finally:
            self._container.supervise("start")
        if index is None:
            return
        faults = [] if seconds is not None else [f"it never served: {log}"]
        shown = complete(phases.seconds, seconds) if seconds is not None else {}
        proof = {"answers_equal": answers == self._container.answers}
        self._keep(Start(PEER, index, seconds, seconds, shown, proof, faults))

    def _make_snapshot(self) -> None:
        made = self._container.create_snapshot()
        if made["ok"]:
            self._snapshot = Snapshot(made["pause_s"], made["frozen_s"], made["image_bytes"])
            self._say(f"snapshot made, pause {made['pause_s']:.2f} s")
        else:
            self._notes.append(f"no snapshot: {made['code']}: {made['detail']}")
            self._say(self._notes[-1])

    def _prepare_pages(self, mode: str) -> None:
        weights = self._container.weights
        if self._options.page_cache == "cold":
            page_cache.drop([*weights, *self._container.snapshot_files()])
        elif mode == "disk":
            page_cache.fill(weights)
        else:
            page_cache.drop(weights)

    def _resident(self) -> int | None:
        try:
            return page_cache.resident_bytes(self._container.weights)
        except OSError as error:
            self._notes.append(f"page cache: {error}")
            return None

    def _drop_caches(self) -> None:
        """Remove what was compiled, not the folder itself: the engine's home is in it."""
        import shutil

        for path in Path(self._container.plan.cache_dir).iterdir():
            if path.is_dir() and path.name != "home":
                shutil.rmtree(path)

    def _keep(self, start: Start) -> None:
        self._starts.append(start)
        count = f"{len(self._starts)}/{self._total}"
        if start.faults:
            self._say(f"{count}  {start.name}: not counted: {'; '.join(start.faults)}")
        else:
            self._say(f"{count}  {start.name}: {start.first_token_s:.2f} s")

    def _build_result(self) -> Result:
        container = self._container
        facts = read_facts(container.settings)
        names = [gpu.name for gpu in facts.gpus.all]
        return Result(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["warmhold", *sys.argv[1:]]),
            versions={
                **facts.versions,
                "warmhold": VERSION,
                "python": platform.python_version(),
                "kernel": platform.release(),
            },
            machine={
                "cpus": str(facts.cpus),
                "cpu": _cpu_name(),
                "memory_gib": f"{facts.memory_limit_bytes / 2**30:.1f}",
                "gpus": ", ".join(names) or "none",
                "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
            },
            model=container.settings.model,
            weight_bytes=sum(path.stat().st_size for path in container.weights),
            arguments=redact_argv(container.settings.arguments.argv),
            page_cache=_STATE[self._options.page_cache],
            starts=self._starts,
            rows=summarise(self._starts),
            snapshot=self._snapshot,
            notes=self._notes,
        )


def check_modes(modes: Sequence[str]) -> None:
    """Given the modes asked for, raise ValueError where the one that others are compared with is
    not among them, or one is none."""
    if unknown := set(modes) - set(MODES):
        raise ValueError(f"no mode: {', '.join(sorted(unknown))}")
    if BASELINE not in modes:
        raise ValueError(f"{BASELINE} has to be among the modes: the others are compared with it")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
