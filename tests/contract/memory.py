# SPDX-License-Identifier: Apache-2.0
"""Private memory of a shared hit, and the time of its weight phase, on a random Llama.

    docker run --rm --shm-size 1g ... --entrypoint python warmhold:cpu tests/contract/memory.py [GB]

A start with dummy weights has the whole tree's memory and private weights; a hit has to have less
by the weights, but for 5 % of them. Ends with 1 where it has not.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import stand
from random_llama import write_random_llama


def main() -> int:
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    model = Path(tempfile.mkdtemp(prefix="random-")) / "llama"
    weights = write_random_llama(model, int(size * 1e9))
    time.sleep(2.5)
    vault = stand.Vault()
    rows = {}
    try:
        for name, extra in {
            "dummy": vault.extra(disk_format="dummy"),
            "disk": vault.extra(mode="disk"),
            "hit": vault.extra(mode="ipc_cache"),
        }.items():
            result = stand.start(model=str(model), extra=extra, tokens_only=True)
            print(result["line"], flush=True)
            rows[name] = {
                "anon": result["memory_after"]["RssAnon"],
                "shmem": result["memory_after"]["RssShmem"],
                "seconds": float(stand.words(result).get("total_s", 0)),
                "answers": result["answers"],
            }
            print(name, {k: v for k, v in rows[name].items() if k != "answers"}, flush=True)
    finally:
        vault.stop()
    over = rows["hit"]["anon"] - (rows["dummy"]["anon"] - weights)
    summary = {
        "weights": weights,
        "hit_over_dummy_without_weights": over,
        "share_of_weights": round(over / weights, 4),
        "weight_phase_share": round(rows["hit"]["seconds"] / rows["disk"]["seconds"], 4),
        "equal": rows["hit"]["answers"] == rows["disk"]["answers"],
    }
    print(json.dumps(summary), flush=True)
    return 0 if over < 0.05 * weights and summary["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
