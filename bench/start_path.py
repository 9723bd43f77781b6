# SPDX-License-Identifier: Apache-2.0
r"""How long the entrypoint takes before vLLM's first instruction. Run inside the image:

    docker run --rm --shm-size 1g --tmpfs /run/warmhold -v "$PWD/bench:/bench:ro" warmhold:cpu \
        python3 /bench/start_path.py

Prints, each the median and the worst of several runs, in seconds: `warmhold plan` as a whole, and
`boot` from its exec to the engine's exec, with a program in vLLM's place that notes the time. An
interpreter's bare start is measured in the same run, as the floor.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 11
PLAN_TARGET_S = 0.3
EXEC_TARGET_S = 0.5


def measure(argv: list[str]) -> float:
    begin = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)  # a time limit would poll
    return time.monotonic() - begin


def measure_exec(folder: Path, run: int) -> float:
    """Seconds from boot's exec until the engine's program runs (CLOCK_MONOTONIC is shared)."""
    mark = folder / f"mark{run}"
    engine = folder / "vllm"
    engine.write_text(f"#!/bin/sh\n: > {mark}\nexec sleep 60\n")
    engine.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    begin = time.monotonic()
    process = subprocess.Popen(
        ["warmhold", "boot"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not mark.exists():
            if process.poll() is not None or time.monotonic() - begin > 60:
                raise RuntimeError("the engine was never started")
            time.sleep(0.001)
        return time.monotonic() - begin
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = {
            "python": [measure([sys.executable, "-c", "pass"]) for _ in range(RUNS)],
            "plan": [measure(["warmhold", "plan"]) for _ in range(RUNS)],
            "boot_to_exec": [measure_exec(folder, run) for run in range(RUNS)],
        }
    for row, times in rows.items():
        print(f"{row:<14} median {statistics.median(times):.3f} s   worst {max(times):.3f} s")
    print(
        json.dumps(
            {
                "median_s": {
                    row: round(statistics.median(times), 4) for row, times in rows.items()
                },
                "target_s": {"plan": PLAN_TARGET_S, "boot_to_exec": EXEC_TARGET_S},
            }
        )
    )


if __name__ == "__main__":
    main()
