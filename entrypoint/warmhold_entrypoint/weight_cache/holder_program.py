# SPDX-License-Identifier: Apache-2.0
"""supervisord's program `preload`: becomes upstream's `vllm preload`, as the runner ordered it.

An order counts once. Started by anybody else it ends: beside an engine that serves, another holder
would be a second copy of the weights on the GPU.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..command import inherit_environment
from ..errors import Exit
from ..files import read_json, read_run_dir
from ..launcher import PROGRAM
from ..log import Log, configure_logging
from ..running import tree
from ..settings import read_settings
from ..start import read_command
from .holder import ORDER_FILE, TAKEN_FILE

_log = Log("holder")


def take_order(run_dir: Path) -> dict[str, Any] | None:
    """Given the run directory, take the order away and return it; None where there is none."""
    try:
        (run_dir / ORDER_FILE).replace(run_dir / TAKEN_FILE)
    except FileNotFoundError:
        return None
    return read_json(run_dir / TAKEN_FILE)


def build_environment(run_dir: Path, environ: Mapping[str, str], added: Any) -> dict[str, str]:
    """Given the run directory, the container's environment and what the plan adds to it, return
    the holder's: the engine's, but for the API key, because nothing serves."""
    settings, _, _ = read_settings(environ, read_command(run_dir))
    environment = inherit_environment(settings, added)
    environment.pop("VLLM_API_KEY", None)
    return environment


def main() -> NoReturn:
    """Become `vllm preload`, through the launcher, which takes its rights away and marks it."""
    configure_logging(os.environ)
    run_dir = read_run_dir()
    order = take_order(run_dir)
    if order is None:
        remedy = "`supervisorctl restart engine` starts it, with the engine"
        _log.error("not started: the engine's runner did not order it", remedy=remedy)
        sys.exit(Exit.MODE_UNAVAILABLE)
    marked = [str(order["uid"]), str(tree.HOLDER_GROUP)]
    argv = [sys.executable, "-I", "-S", PROGRAM, *marked, *order["argv"]]
    environment = build_environment(run_dir, os.environ, order["environment"])
    os.execve(argv[0], argv, environment)  # noqa: S606 - becomes the holder


if __name__ == "__main__":
    main()
