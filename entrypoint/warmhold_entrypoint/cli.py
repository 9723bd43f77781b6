# SPDX-License-Identifier: Apache-2.0
"""The command `warmhold`, and the image's entrypoint.

A first argument that is a flag, or none, serves; a command of ours runs; anything else is executed
as given. This is the only place that catches EntrypointError and ends with its exit code.
"""

import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .errors import EntrypointError, Exit, Fault
from .log import configure_logging

COMMANDS = (
    *("boot", "plan", "settings", "engine", "preload", "healthcheck", "status", "metrics"),
    *("snapshot-create", "snapshot-restore", "restart", "bench"),
)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def main() -> NoReturn:
    """Run the command line; end with the exit code that the fault's kind has."""
    configure_logging(os.environ)
    arguments = sys.argv[1:]
    try:
        if not arguments or (arguments[0].startswith("-") and not _is_own_flag(arguments)):
            # The parser of commands is not imported on the way to an engine.
            from .container.boot import run_boot

            run_boot(arguments)
        if arguments[0] not in COMMANDS and not _is_own_flag(arguments):
            _execute(arguments)
        from .commands import run_command

        run_command(arguments)
    except EntrypointError as error:
        _say(error.faults)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # the last resort: a bug is told as one
        _say([Fault("bug.unexpected", f"{type(error).__name__}: {error}", "please report it")])
        traceback.print_exc()
        sys.exit(Exit.BUG)
    sys.exit(Exit.STOPPED)


def _is_own_flag(arguments: Sequence[str]) -> bool:
    return len(arguments) == 1 and arguments[0] in ("-h", "--help", "--version")


def _execute(arguments: Sequence[str]) -> NoReturn:
    """Become the given command; say what was meant where there is no such program."""
    try:
        os.execvp(arguments[0], list(arguments))  # noqa: S606 - as the user wrote it, no shell
    except OSError as error:
        name = arguments[0]
        remedy = "give a program of the image, or engine arguments that begin with a dash"
        if _HUB_ID.fullmatch(name) or Path(name).is_dir():
            remedy = f"to serve this model set WARMHOLD_MODEL={name}"
        _say([Fault("usage.command", f"{name}: {error.strerror}", remedy)])
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _say(faults: Sequence[Fault]) -> None:
    for fault in faults:
        sys.stderr.write(fault.lines() + "\n")


if __name__ == "__main__":
    main()
