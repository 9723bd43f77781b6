# SPDX-License-Identifier: Apache-2.0
"""The image's main job: check everything, say what is meant, and become PID 1's loop."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import VERSION
from ..log import Log
from .supervision import begin_supervisord

_log = Log("boot")


def run_boot(arguments: Sequence[str]) -> NoReturn:
    """Given vLLM's arguments, serve; end with the container's exit code.

    Raise EntrypointError, with every fault, before anything was started.
    """
    supervisord = begin_supervisord()
    # These imports run beside supervisord's own.
    from .. import start
    from . import conf
    from .pid1 import run_pid1

    _log.info("warmhold starts", version=VERSION, pid=os.getpid())
    settings, plan = start.make_sound_plan(arguments)
    env = settings.env
    _log.info(
        "settings",
        mode=env.mode,
        model=settings.model,
        drain_s=env.drain_s,
        api_key="set" if settings.api_keys else "none",
        threads=plan.threads,
        kv_cache_bytes=plan.kv_cache_bytes,
        cache=plan.cache_dir,
    )
    start.prepare_folders(settings, plan)
    start.prepare_snapshots(settings)
    start.write_command(env.run_dir, arguments)
    uid = os.getuid() if plan.uid is None else plan.uid
    store_uid = uid if plan.backend == "vault" else None
    sys.exit(run_pid1(supervisord, conf.write_conf(settings, plan.backend), env.run_dir, store_uid))
