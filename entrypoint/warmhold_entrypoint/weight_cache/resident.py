# SPDX-License-Identifier: Apache-2.0
"""What the vault holds right now: asked within a moment, and never waited for while it starts."""

import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError

from ..running.tree import read_process

_TIMEOUT_S = 0.15
# So young a vault is still taking back what PID 1 kept. The loader in the engine waits for it.
_STARTING_S = 1.0
_PEER = struct.Struct("3i")
# Of a vault that may answer yet: PID 1 plans before there is one, and a machine may be busy.
COMING = ("loading", "absent", "dead-socket", "hung")


@dataclass(frozen=True)
class Vault:
    """The rows of the vault's `stat`, or with a `code` why there are none.

    Codes: off, absent, loading, hung, dead-socket, other-uid, and the others of warmhold_wcache.
    """

    code: str = ""
    detail: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()


def read_vault(socket_path: Path, patience_s: float = 0.0) -> Vault:
    """Given the vault's socket, return what it holds; raises nothing. Takes at most 0.15 s and does
    not ask a vault that is starting, or waits for one up to a `patience_s`."""
    age_s = _read_age_s(socket_path)
    if not patience_s and age_s is not None and age_s < _STARTING_S:
        return Vault("loading", f"the vault started {age_s:.1f} s ago")
    try:
        with VaultClient(socket_path, patience_s or _TIMEOUT_S) as client:
            return Vault(rows=tuple(client.stat()))
    except WcacheError as error:
        return Vault(error.code.removeprefix("wcache."), error.detail)


def _read_age_s(socket_path: Path) -> float | None:
    """How long the process that listens on a socket has been running; None where there is none."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.connect(str(socket_path))
        pid, _, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if process := read_process(pid):
            return process.age_s
    return None
