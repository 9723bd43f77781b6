# SPDX-License-Identifier: Apache-2.0
r"""How long the weight phase takes: a load from disk against a hit, for growing models, in one run.

    docker run --rm --shm-size 1g --memory 16g -v "$PWD/bench:/bench:ro" \
        -v "$PWD/tests/contract:/contract:ro" -e PYTHONPATH=/contract --entrypoint python \
        warmhold:cpu /bench/weight_phase.py [GB ...]

For each size a Llama with random weights is made, loaded from disk and published, and then twice
mapped from the vault, each time by a new vLLM. The file is in the page cache for all of them, which
favours the disk. Prints seconds and the hit's share of the disk's.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import stand
from random_llama import write_random_llama

SIZES_GB = (0.25, 0.5, 1.0, 2.0)


def measure(size_gb: float) -> dict[str, float]:
    """Weight-phase seconds of one size: disk, and the better of two hits."""
    folder = Path(tempfile.mkdtemp(prefix="random-"))
    weights = write_random_llama(folder / "llama", int(size_gb * 1e9))
    time.sleep(2.5)  # a file that was just written has no digest that is kept
    vault = stand.Vault()
    try:
        seconds = []
        for source in ("disk", "ipc_cache", "ipc_cache"):
            extra = vault.extra(source=source)
            result = stand.start(model=str(folder / "llama"), extra=extra, tokens_only=True)
            said = stand.words(result)
            if said.get("mode") != source:
                raise RuntimeError(result["log"][-4000:])
            print(f"  {result['line']}", flush=True)
            seconds.append({name: float(said[f"{name}_s"]) for name in ("total", "content")})
    finally:
        vault.stop()
        shutil.rmtree(folder)
    disk, *hits = seconds
    hit = min(hits, key=lambda row: row["total"])
    return {
        "weights_mb": weights / 1e6,
        "disk_s": disk["total"],
        "hit_s": hit["total"],
        "share": hit["total"] / disk["total"],
    }


def main() -> None:
    rows = [measure(float(size)) for size in sys.argv[1:] or SIZES_GB]
    print(f"{'weights, MB':>12} {'disk, s':>9} {'hit, s':>8} {'share':>7}")
    for row in rows:
        print(
            f"{row['weights_mb']:>12.0f} {row['disk_s']:>9.3f} {row['hit_s']:>8.3f}"
            f" {row['share']:>7.2%}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
