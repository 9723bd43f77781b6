# SPDX-License-Identifier: Apache-2.0
"""Room on the GPUs for an engine beside resident weights: those that it maps need not be free, and
others are given up where a GPU is too small for both."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.key import compare

from ..container.conf import VAULT_SOCKET
from ..gpus.gpu_memory import Need
from ..log import Log
from ..settings import Settings
from .resident import read_vault

Row = Mapping[str, Any]  # of the vault's `stat`

_VAULT_S = 5.0
_CHECKPOINT_FIELDS = frozenset(("content", "files"))

_log = Log("engine")


def is_near(row: Row, wanted: Mapping[str, str]) -> bool:
    """Given a row and a launch key, tell whether those are the wanted weights, or were before the
    checkpoint changed: the loader, which knows more than the launch key, maps them or gives them
    up."""
    return "launch_key" in row and compare(row["launch_key"], wanted).keys() <= _CHECKPOINT_FIELDS


def make_room(settings: Settings, wanted: Mapping[str, str], need: Need) -> Need:
    """Given the launch key of an engine's weights and what has to be free on GPUs where nothing is
    resident, return what has to be free now. Weights that the engine will not map are given up
    where a GPU is too small for it beside them; in mode `disk` all are such. Raises nothing."""
    if not need.by_uuid or settings.env.wcache == "off":
        return need

    def stays(row: Row) -> bool:
        return settings.env.mode != "disk" and is_near(row, wanted)

    count = len(need.by_uuid)
    rows = read_vault(settings.env.run_dir / VAULT_SOCKET, _VAULT_S).rows
    mapped = sum(row["bytes"] for row in rows if stays(row))
    others = sum(row["bytes"] for row in rows) - mapped
    need = need.beside(mapped // count, others // count)
    if others and need.is_crowded:
        give_up(settings.env.run_dir, lambda row: not stays(row))
        need = dataclasses.replace(need, others_bytes=0)
    return need


def give_up(run_dir: Path, which: Callable[[Row], bool], force: bool = False) -> None:
    """Given the run directory and which rows are meant, drop those weights, unless a process uses
    them; also then where `force`d. Raises nothing."""
    with suppress(WcacheError), VaultClient(run_dir / VAULT_SOCKET, _VAULT_S) as client:
        for row in filter(which, client.stat()):
            with suppress(WcacheError):
                client.drop(str(row["id"]), force)
                _log.info("resident weights given up", id=row["id"], bytes=row["bytes"])
