# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found, as values: every start, and the rows that table and chart are made of.

Its JSON is the one source of both. The schema is made from these types (`bench/schema.json`).
"""

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct, field

BASELINE = "disk"
TIMES = "\N{MULTIPLICATION SIGN}"
UNACCOUNTED = "unaccounted"


class Start(Struct, frozen=True, forbid_unknown_fields=True):
    """One start, from the order to the first token, in seconds. `faults` says what it did not
    prove; with one it is no measurement, and has no time."""

    name: str
    round: int
    first_token_s: float | None
    ready_s: float | None
    phases: dict[str, float]
    proof: dict[str, Any]
    faults: list[str]


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """The starts of one name. The median is that of a start (the lower of two), and `phases` are
    that start's: they add up to it. `speedup` is the baseline's median over this one's."""

    name: str
    count: int
    failed: int
    median_s: float | None
    best_s: float | None
    worst_s: float | None
    speedup: float | None
    phases: dict[str, float]
    faults: list[str]


class Snapshot(Struct, frozen=True, forbid_unknown_fields=True):
    """The snapshot that was made on the running engine, and how long nothing was served for it."""

    pause_s: float
    frozen_s: float
    image_bytes: int


class Result(Struct, frozen=True, forbid_unknown_fields=True):
    """One run of `warmhold bench` on one machine."""

    date: str
    command: str
    versions: dict[str, str]
    machine: dict[str, str]
    model: str
    weight_bytes: int
    arguments: list[str]
    page_cache: str
    starts: list[Start]
    rows: list[Row]
    snapshot: Snapshot | None = None
    notes: list[str] = field(default_factory=list)
    format: Literal[1] = 1


def complete(phases: dict[str, float], total_s: float) -> dict[str, float]:
    """Given phases in their order and the whole they belong to, in seconds, return them with what
    is left over, so that they add up. Phases that took no time are left out.

    The phases end with the runner's own first token. Where ours came before it, the last ones are
    that much shorter.
    """
    shown: dict[str, float] = {}
    left_s = total_s
    for name, seconds in phases.items():
        if name != UNACCOUNTED and min(seconds, left_s) > 0.0:
            shown[name] = min(seconds, left_s)
            left_s -= shown[name]
    return {**shown, UNACCOUNTED: left_s}


def summarise(starts: Sequence[Start], baseline_name: str = BASELINE) -> list[Row]:
    """Given all starts and the baseline's name, return a row for each name, in the order of their
    first starts."""
    names = list(dict.fromkeys(start.name for start in starts))
    groups = {name: [start for start in starts if start.name == name] for name in names}
    baseline = _median(groups.get(baseline_name, []))
    rows = []
    for name, group in groups.items():
        times = _times(group)
        middle = _median(group)
        median_s = middle.first_token_s if middle else None
        rows.append(
            Row(
                name=name,
                count=len(group),
                failed=len(group) - len(times),
                median_s=median_s,
                best_s=min(times, default=None),
                worst_s=max(times, default=None),
                speedup=_ratio(baseline, median_s),
                phases=middle.phases if middle else {},
                faults=list(dict.fromkeys(fault for start in group for fault in start.faults)),
            )
        )
    return rows


def _times(group: Sequence[Start]) -> list[float]:
    return [start.first_token_s for start in group if start.first_token_s is not None]


def _median(group: Sequence[Start]) -> Start | None:
    """The start with the median time, of those that have one."""
    times = _times(group)
    if not times:
        return None
    wanted = statistics.median_low(times)
    return next(start for start in group if start.first_token_s == wanted)


def _ratio(baseline: Start | None, median_s: float | None) -> float | None:
    if baseline is None or baseline.first_token_s is None or not median_s:
        return None
    return baseline.first_token_s / median_s
