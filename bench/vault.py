# SPDX-License-Identifier: Apache-2.0
"""What the vault costs: resident memory with 10 generations, time to ready, time of a fetch.

    PYTHONPATH=wcache python bench/vault.py

Prints one JSON object. Each generation has 500 segments and 5,000 tensors; times are the median and
the worst of several runs, in seconds, with the target beside them. Includes the description's way
through JSON on the client's side, which a loader pays too.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.generation import Generation, Segment, Tensor

STARTS, FETCHES = 11, 51
GENERATIONS, SEGMENTS, TENSORS = 10, 500, 5000
SIZE = 4096


def start(path: Path) -> subprocess.Popen[bytes]:
    serve = [sys.executable, "-m", "warmhold_wcache.serve", "--socket", str(path)]
    return subprocess.Popen([*serve, "--log-level", "error"])


def measure_start(path: Path) -> float:
    """Seconds from the vault's exec until its first answer."""
    path.unlink(missing_ok=True)
    begin = time.monotonic()
    process = start(path)
    with VaultClient(path, wait_s=5) as client:
        client.hello()
    taken = time.monotonic() - begin
    process.terminate()
    process.wait(10)
    return taken


def publish(client: VaultClient, number: int, tensors: int) -> dict[str, str]:
    fds = [segments.create(SIZE, f"bench:{index}") for index in range(SEGMENTS)]
    key = {f"field{index}": f"{number}:{'x' * 60}" for index in range(24)}
    shapes = [
        Tensor(
            f"model.layers.{index}.weight", "parameter", index % SEGMENTS, 0, (8, 8), (8, 1), "int8"
        )
        for index in range(tensors)
    ]
    generation = Generation(
        *(key, {"argv": "x" * 500}, "memfd", "cpu", "bench"),
        tuple(Segment(SIZE, 0, "") for _ in fds),
        tuple(shapes),
        {},
        {},
    )
    client.publish(generation, fds)
    for fd in fds:
        os.close(fd)
    return key


def measure_fetch(client: VaultClient, key: dict[str, str]) -> float:
    begin = time.monotonic()
    _, fds = client.fetch(key)
    taken = time.monotonic() - begin
    assert len(fds) == SEGMENTS
    for fd in fds:
        os.close(fd)
    return taken


def spread(values: list[float], target: float) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "worst": round(max(values), 4),
        "target": target,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vault.sock"
        starts = [measure_start(path) for _ in range(STARTS)]
        process = start(path)
        with VaultClient(path, wait_s=5) as client:
            keys = [publish(client, number, TENSORS) for number in range(GENERATIONS)]
            few = publish(client, GENERATIONS, SEGMENTS)
            many_s = [measure_fetch(client, keys[5]) for _ in range(FETCHES)]
            few_s = [measure_fetch(client, few) for _ in range(FETCHES)]
        status = Path(f"/proc/{process.pid}/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0]) / 1024
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
        process.terminate()
        process.wait(10)
    print(
        json.dumps(
            {
                "ready_s": spread(starts, 0.3),
                f"fetch_{SEGMENTS}_segments_{SEGMENTS}_tensors_s": spread(few_s, 0.02),
                f"fetch_{SEGMENTS}_segments_{TENSORS}_tensors_s": spread(many_s, 0.02),
                f"rss_{GENERATIONS + 1}_generations_mib": round(rss, 1),
                "rss_peak_mib": round(peak, 1),
                "rss_target_mib": 30,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
