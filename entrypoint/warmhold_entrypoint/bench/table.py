# SPDX-License-Identifier: Apache-2.0
"""A result as a table for a terminal. What did not prove itself has its reason, and no time."""

from rich.console import Console
from rich.table import Table

from .result import BASELINE, TIMES, Result, Row

_MOST_PHASES = 6
_MIB = 1 << 20


def print_table(result: Result, console: Console) -> None:
    """Given a result, print its rows, the snapshot and the conditions."""
    table = Table(title=f"start → first token, {result.model}", title_justify="left")
    for name in ("start", "median", "best - worst", "n", f"{TIMES} faster than {BASELINE}"):
        table.add_column(name, justify="left" if name == "start" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*build_cells(row), style=None if row.median_s is not None else "red")
    console.print(table)
    for row in result.rows:
        if row.median_s is not None:
            longest = sorted(row.phases.items(), key=lambda item: -item[1])[:_MOST_PHASES]
            phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest)
            console.print(f"{row.name}: {phases}", markup=False, soft_wrap=True)
    if result.snapshot:
        made = result.snapshot
        console.print(
            f"snapshot: pause {made.pause_s:.2f} s, of which frozen {made.frozen_s:.2f} s;"
            f" image {made.image_bytes / _MIB:.0f} MiB"
        )
    for row in result.rows:
        for fault in row.faults:
            console.print(
                f"not counted: {row.name}: {fault}", style="red", markup=False, soft_wrap=True
            )
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    machine = result.machine
    console.print(
        f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_gib']} GiB, vLLM"
        f" {result.versions['vllm']}, kernel {result.versions['kernel']}; {result.page_cache}",
        markup=False,
        soft_wrap=True,
    )


def build_cells(row: Row) -> list[str]:
    """Given a row, return its cells as text."""
    if row.median_s is None:
        return [row.name, "failed", "-", f"0 of {row.count}", "-"]
    count = str(row.count) if not row.failed else f"{row.count - row.failed} of {row.count}"
    span = f"{row.best_s:.2f} - {row.worst_s:.2f}"
    ratio = f"{row.speedup:.1f}" if row.speedup else "-"
    return [row.name, f"{row.median_s:.2f} s", span, count, ratio]
