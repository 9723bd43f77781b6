# SPDX-License-Identifier: Apache-2.0
"""Which resident weights an engine that is about to load could do without, on its own GPU."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .generation import is_superseded

Row = Mapping[str, Any]  # of the vault's `stat`
Key = Mapping[str, str]


def find_superseded(rows: Sequence[Row], keys: Mapping[str, Key]) -> list[str]:
    """Given rows and, by model, the exact keys that are going to be published, return the ids of
    what a publish would supersede."""
    return [
        row["id"]
        for row in rows
        for model, key in keys.items()
        if is_superseded(row["key"], key, row["model"] == model)
    ]


def find_spare(
    rows: Sequence[Row], mapped: Collection[Key], device: str, free_bytes: int, needed_bytes: int
) -> list[str]:
    """Given rows, the exact keys that are going to be mapped, a device, its free bytes and those
    that the engine asks for besides, return the ids of what is to be given up: all else that is
    resident there, where the engine lacks memory and then has enough; nothing otherwise."""
    spare = [row for row in rows if row["key"].get("device") == device and row["key"] not in mapped]
    enough = free_bytes + sum(row["bytes"] for row in spare) >= needed_bytes
    return [row["id"] for row in spare] if free_bytes < needed_bytes and enough else []
