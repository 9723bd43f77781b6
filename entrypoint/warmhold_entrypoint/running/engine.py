# SPDX-License-Identifier: Apache-2.0
"""The supervised process `warmhold engine`: the runner with its sockets, and its exit code."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from ..container.pid1 import leave_exit_code
from ..errors import EntrypointError, Exit
from ..files import read_run_dir
from ..log import Log, configure_logging
from ..reporting.status import serve_status
from ..start import log_plan, make_sound_plan, read_command
from . import tree
from .loop import Loop
from .orders import serve_orders
from .runner import Runner
from .sweep import Leftovers

_log = Log("engine")


def run_engine(command: Sequence[str], run_dir: Path) -> int:
    """Given the container's command, run engines until the end; return the exit code."""
    tree.become_subreaper()
    leftovers = Leftovers(run_dir)
    leftovers.sweep()  # before the plan: what an earlier engine holds, its port too, is in the way
    settings, plan = make_sound_plan(command)
    log_plan(plan)
    uid = os.getuid() if plan.uid is None else plan.uid
    with ExitStack() as stack:
        loop = Loop()
        stack.callback(loop.close)
        runner = Runner(command, settings, plan, loop, uid, leftovers)
        server = serve_status(run_dir, loop, runner.status)
        stack.callback(server.close)
        orders = serve_orders(run_dir, loop, runner.take_order)
        stack.callback(orders.close)
        return runner.run()


def main() -> NoReturn:
    """Run engines as supervisord's program; tell faults and bugs to PID 1 as exit codes too."""
    configure_logging(os.environ)
    run_dir = read_run_dir()
    try:
        sys.exit(run_engine(read_command(run_dir), run_dir))
    except EntrypointError as error:
        for fault in error.faults:
            sys.stderr.write(fault.lines() + "\n")
        code = error.exit_code
    except Exception as error:  # the last resort: a bug is told as one, and ends the container
        _log.error("bug", exc_info=True, detail=f"{type(error).__name__}: {error}")
        code = Exit.BUG
    leave_exit_code(run_dir, code)
    sys.exit(code)


if __name__ == "__main__":
    main()
