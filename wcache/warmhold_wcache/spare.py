# SPDX-License-Identifier: Apache-2.0
"""Which resident weights an engine that is about to load could do without, on its own GPU."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .generation import is_superseded

Row = Mapping[str, Any]  # of the vault's `stat`
Key = Mapping[str, str]


def find_superseded(rows: Sequence[Row], keys: Iterable[tuple[str, Key]]) -> list[Row]:
    """Given rows and, with each model's name, the exact keys that are going to be published, return
    the rows that a publish would supersede and that nobody uses."""
    pairs = list(keys)
    return [
        row
        for row in rows
        if not row["holders"]
        and any(is_superseded(row["key"], key, row["model"] == model) for model, key in pairs)
    ]


def find_spare(
    rows: Sequence[Row],
    mapped: Collection[Key],
    drafts: Collection[str],
    device: str,
    free_bytes: int,
    needed_bytes: int,
) -> list[Row]:
    """Given rows, the exact keys that are going to be mapped, the contents of draft models, a
    device, its free bytes and those that the engine asks for besides, return the rows that make
    room: all else there that nobody uses, where the engine lacks memory and then has enough; none
    otherwise. A draft model is told by its content: it may be loaded by another key."""
    spare = [
        row
        for row in rows
        if row["key"].get("device") == device
        and row["key"] not in mapped
        and row["key"].get("content") not in drafts
        and not row["holders"]
    ]
    enough = free_bytes + sum(row["bytes"] for row in spare) >= needed_bytes
    return spare if free_bytes < needed_bytes and enough else []
