# SPDX-License-Identifier: Apache-2.0
"""The vault's process: its options, its signals and its loop. Standard library only.

    python -m warmhold_wcache.serve (--socket PATH | --listen-fd N) [--store PATH]

A start that fails waits a second before it ends, so that its supervisor does not spin.
"""

import argparse
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from .errors import WcacheError
from .log import Log
from .server import listen
from .store import FdStoreClient
from .vault import Vault

_FAILED_START_S = 1.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the vault's options."""
    parser = argparse.ArgumentParser(prog="wcache serve", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, help="listen here (mode 0600)")
    where.add_argument("--listen-fd", type=int, help="a listening socket that was inherited")
    parser.add_argument("--store", type=Path, help="the fd store's socket")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    return parser


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    options = build_parser().parse_args()
    log = Log(options.log_level, options.log_format == "json")
    stop = _Stop()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        if options.listen_fd is not None:
            listener = socket.socket(fileno=options.listen_fd)
            os.set_inheritable(options.listen_fd, False)
        else:
            listener = listen(options.socket)
        store = None if options.store is None else FdStoreClient(options.store)
        vault = Vault(listener, store, log)
        count = vault.recover()
    except (OSError, WcacheError) as error:
        log.error("the vault cannot start", error=error)
        time.sleep(_FAILED_START_S)
        return 1
    log.info("vault ready", generations=count, pid=os.getpid())
    vault.server.watch(stop.fd, stop.drain)
    while not stop.asked:
        vault.server.step()
    vault.server.close()
    if options.socket is not None:
        options.socket.unlink(missing_ok=True)
    return 0


class _Stop:
    """Whether to stop: set by a signal, seen by a descriptor."""

    def __init__(self) -> None:
        self.asked = False
        self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def drain(self) -> None:
        """Read what the signals wrote."""
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def _on_signal(self, signum: int, frame: object) -> None:
        self.asked = True


if __name__ == "__main__":
    raise SystemExit(main())
