# SPDX-License-Identifier: Apache-2.0
"""Room on the GPUs beside resident weights, asked of the vault at the moment of a start.

What an engine that loads could do without its loader gives up, which knows the exact key
(warmhold_wcache.spare). A restored engine has no loader: what others have makes room here.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError

from ..container.conf import VAULT_SOCKET
from ..gpus.gpu_memory import Need
from ..log import Log
from .resident import read_vault

Row = Mapping[str, Any]  # of the vault's `stat`

_VAULT_S = 5.0
_DEVICE = "cuda:"

_log = Log("engine")


def measure(run_dir: Path, need: Need) -> Need:
    """Given the run directory and what has to be free on GPUs where nothing is resident, return
    what has to be free beside what is. Raises nothing."""
    return need.beside(_by_gpu(_read_rows(run_dir))) if need.by_uuid else need


def make_room(run_dir: Path, need: Need, kept: Collection[str]) -> Need:
    """Given the same and the ids of the weights that a snapshot's engine maps, return the same; all
    other weights are given up where a GPU is too small for it beside them. Raises nothing."""
    if not need.by_uuid:
        return need

    def is_other(row: Row) -> bool:
        return row["id"] not in kept and _gpu_of(row) in need.by_uuid

    rows = _read_rows(run_dir)
    own = _by_gpu(row for row in rows if row["id"] in kept)
    others = _by_gpu(filter(is_other, rows))
    if others and need.exceeds(own, others):
        give_up(run_dir, is_other)
        rows = _read_rows(run_dir)
    return need.beside(_by_gpu(rows))


def give_up(run_dir: Path, which: Callable[[Row], bool], force: bool = False) -> None:
    """Given the run directory and which rows are meant, drop those weights, unless a process uses
    them; also then where `force`d. Raises nothing."""
    with suppress(WcacheError), VaultClient(run_dir / VAULT_SOCKET, _VAULT_S) as client:
        for row in filter(which, client.stat()):
            with suppress(WcacheError):
                client.drop(str(row["id"]), force)
                _log.info("resident weights given up", id=row["id"], bytes=row["bytes"])


def _read_rows(run_dir: Path) -> tuple[Row, ...]:
    return read_vault(run_dir / VAULT_SOCKET, _VAULT_S).rows


def _by_gpu(rows: Iterable[Row]) -> dict[str, int]:
    """Resident bytes by the GPU's UUID."""
    found: dict[str, int] = {}
    for row in rows:
        found[_gpu_of(row)] = found.get(_gpu_of(row), 0) + row["bytes"]
    return found


def _gpu_of(row: Row) -> str:
    return str(row["key"].get("device", "")).removeprefix(_DEVICE)
