# SPDX-License-Identifier: Apache-2.0
"""A plug-in of supervisorctl: `start engine` and `restart engine` wait until the engine serves.

supervisord's own RUNNING only means that the runner is alive. The plug-in wraps the commands of
supervisorctl's default plug-in: same output, then progress, then a non-zero exit unless it serves.
"""

import os
import sys
import time
import xmlrpc.client
from pathlib import Path
from typing import Any

from supervisor.supervisorctl import ControllerPluginBase, LSBInitExitStatuses

from ..errors import Exit
from ..reporting.status import ask_status

_MARGIN_S = 60.0
_DEFAULT_READY_TIMEOUT_S = 1800.0


class WaitPlugin(ControllerPluginBase):  # type: ignore[misc]  # supervisor has no types
    """Replaces `start` and `restart` of one supervisorctl session."""

    def __init__(self, controller: Any, run_dir: str) -> None:
        super().__init__(controller)
        self._run_dir = Path(run_dir)
        # supervisorctl asks itself first and then its plug-ins, the default one before all others;
        # an attribute of the controller is the one place that comes before the default.
        self._default = controller.options.plugins[0]
        controller.do_start = self.start
        controller.do_restart = self.restart
        socket = self._run_dir / "supervisor.sock"
        if socket.exists() and not os.access(socket, os.W_OK):
            sys.stderr.write(
                f"error: rights.supervisor-socket: uid {os.getuid()} may not use {socket}\n"
                "fix: run it as root: docker exec -u 0 <container> supervisorctl ...\n"
            )
            sys.exit(Exit.RIGHTS)

    def start(self, names: str) -> None:
        """Given program names, start them; with `engine` among them, wait until it serves."""
        self._default.do_start(names)
        self._wait(names)

    def restart(self, names: str) -> None:
        """Given program names, restart them; with `engine` among them, wait until it serves."""
        self._default.do_restart(names)
        self._wait(names)

    def _wait(self, names: str) -> None:
        if not {"engine", "engine:*", "engine:engine", "all"} & set(names.split()):
            return
        if self.ctl.exitstatus != LSBInitExitStatuses.SUCCESS and self._gone():
            return
        bound_s = float(os.environ.get("WARMHOLD_READY_TIMEOUT_S") or _DEFAULT_READY_TIMEOUT_S)
        deadline = time.monotonic() + bound_s + _MARGIN_S
        shown = ""
        while time.monotonic() < deadline:
            status = ask_status(self._run_dir, 2.0)
            if status is not None:
                phase = f" ({status['phase']})" if status["phase"] else ""
                line = f"engine: {status['state']}{phase}"
                if line != shown:
                    self.ctl.output(line)
                    shown = line
                if status["ready"]:
                    mode, total = status["mode"], status["total_s"]
                    self.ctl.output(f"engine: ready in mode {mode} after {total:.1f} s")
                    self.ctl.exitstatus = LSBInitExitStatuses.SUCCESS
                    return
            elif self._gone():
                self.ctl.output("engine: ERROR (not serving; see the container's log)")
                self.ctl.exitstatus = LSBInitExitStatuses.NOT_RUNNING
                return
            time.sleep(0.2)
        self.ctl.output(f"engine: ERROR (not serving after {bound_s:.0f} s)")
        self.ctl.exitstatus = int(Exit.NOT_READY)

    def _gone(self) -> bool:
        """Tell whether supervisord has given up on the runner, or has itself gone."""
        try:
            info = self.ctl.get_supervisor().getProcessInfo("engine")
        except (OSError, xmlrpc.client.Error):
            return True
        return info["statename"] not in ("STARTING", "RUNNING", "BACKOFF")


def make_plugin(controller: Any, run_dir: str) -> WaitPlugin:
    """Given supervisorctl's controller and the run directory, return the plug-in."""
    return WaitPlugin(controller, run_dir)
