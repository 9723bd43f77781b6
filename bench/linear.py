# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a CPU on the plain shared tensors, and on vLLM's packed copies: speed and
memory.

    docker run --rm --shm-size 1g -v "$PWD:/src:ro" -e PYTHONPATH=/src/tests/contract \
        --entrypoint python warmhold:cpu /src/bench/linear.py [--rounds 2] [--model FOLDER]

Starts of both paths take turns, with vLLM's thread binding off and on; every start is eager and
loads from disk without a vault, so that only the path differs. One JSON line per start, then a
table.
"""

import argparse
import json
import statistics

import stand

COLUMNS = ("decode_1", "decode_8", "prefill_800_s", "anon_mb", "start_s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default=stand.MODEL)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bindings", default="nobind,auto")
    options = parser.parse_args()
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for binding in options.bindings.split(","):
            for path in ("packed", "shared"):
                result = stand.start(
                    {"VLLM_CPU_OMP_THREADS_BIND": binding, "OMP_NUM_THREADS": "2"},
                    model=options.model,
                    extra={"cpu_linear": path, "digests": "/tmp/digests", "socket_path": "/none"},
                    measure=options.tokens,
                )
                result["anon_mb"] = result["memory_measured"]["RssAnon"] / 1e6
                row = {name: round(result[name], 2) for name in COLUMNS}
                rows.setdefault((binding, path), []).append(row)
                print(json.dumps({"binding": binding, "path": path, **row}), flush=True)
    print("| binding | path | " + " | ".join(COLUMNS) + " |")
    for (binding, path), found in rows.items():
        values = [statistics.median(row[name] for row in found) for name in COLUMNS]
        print(f"| {binding} | {path} | " + " | ".join(f"{value:.2f}" for value in values) + " |")


if __name__ == "__main__":
    main()
