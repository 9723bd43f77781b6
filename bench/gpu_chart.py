# SPDX-License-Identifier: Apache-2.0
"""The table of `bench/gpu_restart.py` as a picture, in the way of `warmhold bench`.

    PYTHONPATH=entrypoint:snapshot:wcache python3 bench/gpu_chart.py RESULTS.json RUN SIZE OUT NAME

RESULTS.json is a file of bench/results with several runs by name; OUT/NAME.svg and .png are made.
vLLM alone does not tell its phases: its bars have one colour.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warmhold_entrypoint.bench.chart import draw, save, style
from warmhold_entrypoint.bench.result import Result, Start, complete, summarise

BASELINE = "vLLM's ipc_cache"
NAMES = {
    "upstream disk": "vLLM's disk",
    "upstream ipc_cache": BASELINE,
    "disk": "disk",
    "ipc_cache": "ipc_cache",
    "compiled snapshot": "snapshot, compiled engine",
    "snapshot": "snapshot",
}


def build_result(found: Mapping[str, Any], run: str, size: str) -> Result:
    """Given a file's content, the name of a run and a size, return that as a benchmark's result."""
    rows = found["runs"][run]
    (machine,) = rows["machine"]
    starts = [
        start
        for row, name in NAMES.items()
        for start in build_starts(name, rows.get(f"{size} {row}", []))
    ]
    return Result(
        date=found["date"],
        command=found["command"].partition(",")[0],
        versions={"warmhold": run, "vllm": found["vllm"], "kernel": machine["kernel"]},
        machine={"cpus": str(machine["cores"]), "cpu": "x86-64", "gpus": machine["gpus"][0]},
        model=f"{size.upper().replace('GB', ' GB')}",
        weight_bytes=0,
        arguments=[],
        page_cache="warm",
        starts=starts,
        rows=summarise(starts, BASELINE),
    )


def build_starts(name: str, values: Sequence[Mapping[str, Any]]) -> list[Start]:
    """Given a row's name and its values, return them as starts."""
    return [
        Start(
            name=name,
            round=number,
            first_token_s=value["first_token_s"],
            ready_s=None,
            phases=complete(value.get("phases", {}), value["first_token_s"]),
            proof={},
            faults=[],
        )
        for number, value in enumerate(values)
    ]


def main() -> None:
    source, run, size, out, name = sys.argv[1:]
    result = build_result(json.loads(Path(source).read_text()), run, size)
    with style():
        for path in save(draw(result, BASELINE), Path(out), name):
            print(path)


if __name__ == "__main__":
    main()
