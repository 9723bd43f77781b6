# SPDX-License-Identifier: Apache-2.0
"""Restarts on a machine with GPUs and without Docker: a table that fills row by row.

    python3 bench/gpu_restart.py OUT --criu FOLDER --models FOLDER [16gb 64gb 1gb]

Each row is a size of random weights and a way to start; a value is the time to the first token over
HTTP of the whole multi-process server: from `supervisorctl start engine` for ours (`runner_s`: from
the engine's own start), in the row of kills from a SIGKILL, from the process's start for vLLM
alone. Caches are warm but in the first starts, which run at once. What OUT/restarts.json has is not
measured again, so that a run that was cut off goes on.

Several sizes go through the same stages, ours on the GPUs in turn, vLLM alone on the next one. What
takes a minute runs for all at once (first starts, ipc_cache, disk, vLLM's own rows); snapshots and
kills for one size after the other, while the other engines stand idle.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gpu_machine import MIB, PACKAGES, describe_machine, prepare_tools, touch_memory, used_mib
from gpu_model import SHAPES
from gpu_ours import (
    COUNTS,
    ENGINE,
    Job,
    describe,
    lacks_ours,
    measure_cache,
    measure_disk,
    measure_kills,
    measure_snapshots,
    show_processes,
)
from gpu_stack import Stack, build_environment
from gpu_table import Table
from gpu_upstream import Upstream


def make_model(table: Table, job: Job) -> None:
    """Make the model where it is not there."""
    if Path(job.model).exists():
        return
    began = time.monotonic()
    script = Path(__file__).with_name("gpu_model.py")
    subprocess.run([sys.executable, str(script), job.model, job.size], check=True, timeout=400)
    table.say(f"{job.size}: model made in {time.monotonic() - began:.1f} s")
    time.sleep(2.5)  # so that the digest of its files is kept


def begin(table: Table, job: Job, beside: int, skip: list[str], pool: ThreadPoolExecutor) -> None:
    """Boot our product where rows of it are left: with empty caches at first. Meanwhile vLLM alone
    fills its own caches, where they are wanted."""
    make_model(table, job)
    warming = [pool.submit(warm_upstream, table, job)] if job.compared else []
    if lacks_ours(table, job, skip):
        job.stack.start(ENGINE)
        status = job.stack.wait_ready(1, 420)
        value = {"runner_s": status["total_s"], "beside": beside, **describe(status)}
        if table.lacks(f"{job.size} first start"):
            table.add(f"{job.size} first start", value)
    for warm in warming:
        warm.result()


def measure_ours(
    table: Table, jobs: list[Job], logs: Path, skip: list[str], pool: ThreadPoolExecutor
) -> None:
    """Our rows of sizes whose engines serve, and have just filled the caches."""

    def together(measure: Callable[[Job], None]) -> None:
        list(pool.map(measure, jobs))

    if "compiled" not in skip:
        for job in jobs:
            measure_snapshots(table, job, logs, "compiled ")
    if "ipc_cache" not in skip:
        together(lambda job: measure_cache(table, job, 1))
    for job in jobs:
        measure_snapshots(table, job, logs)
        measure_kills(table, job)
        table.fill(f"{job.size} processes", 1, partial(show_processes, job))
    if "ipc_cache" not in skip:
        together(lambda job: measure_cache(table, job, job.counts["ipc_cache"]))
    if "disk" not in skip:
        together(lambda job: measure_disk(table, job))


def measure_upstream(table: Table, job: Job, plugins: Path | None) -> None:
    """vLLM's own rows of a size; nothing else runs on that GPU."""
    size, counts, engine, gpu = job.size, job.counts, job.upstream, job.upstream.gpu

    def serve(cached: bool) -> dict[str, Any]:
        seconds = engine.serve(ENGINE, cached)
        equal = job.equal(engine.answers())
        engine.stop(keep=int(cached))
        return {"first_token_s": round(seconds, 3), "equal": equal}

    if table.lacks(f"{size} upstream ipc_cache", counts["ipc_cache"]):
        empty_mib = used_mib(gpu)

        def hold() -> dict[str, Any]:
            seconds = engine.preload(ENGINE)
            weights = SHAPES[size].size_bytes / MIB
            used = used_mib(gpu) - empty_mib
            return {"ready_s": seconds, "weights_mib": weights, "used_mib": used}

        if not table.is_over() and table.measure(f"{size} upstream preload", hold):
            name = f"{size} upstream ipc_cache"
            table.fill(name, counts["ipc_cache"], lambda: serve(True))
        engine.stop()
    table.fill(f"{size} upstream disk", counts["disk"], lambda: serve(False))
    engine.stop()
    if plugins is not None:
        folder = engine.log.parent / "snapshot"
        measure = partial(engine.snapshot, folder, ENGINE, plugins)
        table.fill(f"{size} upstream snapshot", 1, measure)
        engine.stop()


def warm_upstream(table: Table, job: Job) -> None:
    """One start that fills vLLM's own caches."""
    if not job.upstream.is_warm:
        seconds = job.upstream.serve(ENGINE)
        job.upstream.stop()
        table.say(f"{job.size}: vLLM's first start took {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("sizes", nargs="*", default=["1gb"])
    parser.add_argument("--criu", type=Path, help="a folder with criu and plugins/cuda_plugin.so")
    parser.add_argument("--models", type=Path, default=Path("/tmp/wh/models"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/wh"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--upstream", default="", help="sizes whose upstream rows are wanted too")
    parser.add_argument("--skip", default="", help="of ours: compiled,ipc_cache,disk")
    parser.add_argument("--few", action="store_true", help="all sizes as seldom as 1gb")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds; see Table")
    given = parser.parse_args()
    sys.path[:0] = PACKAGES
    given.out.mkdir(parents=True, exist_ok=True)
    criu = given.criu and given.criu.resolve()
    table = Table(given.out / "restarts.json", given.until)
    tools = prepare_tools(given.folder / "tools", criu)
    machine = describe_machine(tools, criu)
    table.fill("machine", 1, lambda: machine)
    table.say(f"memory touched in {touch_memory():.1f} s")
    plugins, skip = criu and criu / "plugins", given.skip.split(",")
    jobs = []
    for index, size in enumerate(given.sizes):
        folder, gpu, model = given.folder / size, index % given.gpus, given.models / size
        # What is measured has its weights resident, and the disk has no room for them twice.
        more = {"CUDA_VISIBLE_DEVICES": str(gpu), "WARMHOLD_SNAPSHOT_WEIGHTS": "none"}
        more |= {} if criu is None else {"CRIU_CUDA_PLUGIN_DIR": str(criu / "plugins")}
        environment = build_environment(folder, str(model), tools, **more)
        stack = Stack(environment, given.out / f"{size}.log", 8100 + index)
        upstream = Upstream(folder, str(model), (index + 1) % given.gpus, 8200 + index)
        counts = COUNTS["1gb" if given.few else size]
        compared = size in given.upstream.split(",")
        jobs.append(Job(size, stack, upstream, gpu, counts, compared))
    with ExitStack() as ending, ThreadPoolExecutor() as pool:
        for job in jobs:
            ending.callback(job.stack.stop)
            ending.callback(job.upstream.stop)
        starts = [pool.submit(begin, table, job, len(jobs) - 1, skip, pool) for job in jobs]
        for job, start in zip(jobs, starts, strict=True):
            if error := start.exception():
                table.say(f"FAILED {job.size} did not start: {error!r}"[-6000:])
        running = [job for job in jobs if job.stack.is_running]
        measure_ours(table, running, given.folder / "logs", skip, pool)
        for job in running:
            job.stack.stop()
        compared = [job for job in jobs if job.compared]
        list(pool.map(lambda job: measure_upstream(table, job, plugins), compared))
    table.summarise("first_token_s")
    table.summarise("runner_s")


if __name__ == "__main__":
    main()
