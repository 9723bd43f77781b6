# SPDX-License-Identifier: Apache-2.0
"""Calls an action script as criu does: as its child, which has none of its descriptors."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def call_script(script: Path | str, action: str, fds: Sequence[int]) -> int:
    """Given a script, the step's name and the descriptors that criu has, return its exit code."""
    code = f"import subprocess; exit(subprocess.run([{str(script)!r}]).returncode)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CRTOOLS_SCRIPT_ACTION": action},
        pass_fds=tuple(fds),
        timeout=60,
        check=False,
    ).returncode
