# SPDX-License-Identifier: Apache-2.0
"""Weights without an engine: plans as for a start, and becomes the plug-in's preload.

It has the engine's argv, environment, user and lack of rights, so that the weights are those which
the engine asks for. It is not marked as an engine's process: the runner must not sweep it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError

from ..command import build_fetch_argv
from ..container.conf import VAULT_SOCKET
from ..errors import EntrypointError, Fault
from ..files import read_run_dir
from ..launcher import PROGRAM
from ..log import Log
from ..plan import Plan
from ..settings import PREFIX, Settings
from ..start import make_sound_plan, prepare_folders, read_command
from .weights import LOADER_FILE

_EXTRA = "--model-loader-extra-config"
_MODULE = "warmhold_wcache.vllm_plugin.preload"
# Nothing listens here, and a running engine holds its port.
_TOLERATED = frozenset(("port.taken", "rights.port"))
_HOPELESS = frozenset(("ipc_cache.off", "ipc_cache.unsupported", "ipc_cache.memory"))

_log = Log("preload")


def run_preload(arguments: Sequence[str]) -> NoReturn:
    """Given a model and engine arguments, or nothing for the container's own, load the weights into
    the vault; end with 0 when all of them are resident.

    Raise EntrypointError, with every fault, before anything is loaded.
    """
    command = build_command(arguments) if arguments else read_command(read_run_dir())
    # In a named mode, that nothing is resident yet would be a fault.
    os.environ[f"{PREFIX}MODE"] = "auto"
    settings, plan = make_sound_plan(command, _TOLERATED)
    _check_vault(settings, plan)
    prepare_folders(settings, plan)
    if plan.model_directory is None:
        settings, plan = _fetch(command, settings, plan)
    _log.info("preload starts", model=plan.model, directory=plan.model_directory)
    argv = build_preload_argv(settings, plan)
    os.execve(argv[0], argv, _environment(settings, plan))  # noqa: S606 - becomes the load


def build_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """Given a model, which may be left out, and engine arguments, return them as a container's
    command."""
    if arguments and not arguments[0].startswith("-"):
        return ("--model", *arguments)
    return tuple(arguments)


def build_preload_argv(settings: Settings, plan: Plan) -> list[str]:
    """Given settings and plan, return the argv that loads the plan's weights, by the launcher.

    What the loader is told stands in it: the file for that is the one of the engine that runs.
    """
    words = list(plan.attempts[-1].argv)
    assert words[:2] == ["vllm", "serve"], words[:2]
    extra = json.loads(words[-1]) if words[-2] == _EXTRA else {}
    if extra.get("file") == str(settings.env.run_dir / LOADER_FILE):
        del extra["file"]
        told = dict(plan.loader)
        if "socket_dir" in extra:
            del told["socket_path"]
        words[-1] = json.dumps({**told, **extra})
    return _launched(plan, [sys.executable, "-m", _MODULE, *words[2:]])


def _launched(plan: Plan, argv: Sequence[str]) -> list[str]:
    uid = os.getuid() if plan.uid is None else plan.uid
    return [sys.executable, "-I", "-S", PROGRAM, str(uid), "none", *argv]


def _environment(settings: Settings, plan: Plan) -> dict[str, str]:
    """The engine's environment, but for the API key of warmhold's own setting: nothing serves."""
    return {**settings.environ, **plan.environment}


def _check_vault(settings: Settings, plan: Plan) -> None:
    """Raise EntrypointError where all of the loading would be for nothing: no vault answers, or
    these weights would not be published."""
    if plan.backend == "vllm":
        detail = "`vllm preload` holds the weights here, and it starts with the engine"
        remedy = "none: `supervisorctl restart engine` finds them held"
        raise EntrypointError([Fault("mode.unavailable", detail, remedy)])
    for item in plan.rejections:
        if item.code in _HOPELESS:
            detail = f"{item.code}: {item.detail}"
            raise EntrypointError([Fault("mode.unavailable", detail, item.remedy)])
    try:
        with VaultClient(settings.env.run_dir / VAULT_SOCKET) as client:
            client.hello()
    except WcacheError as error:
        detail = f"{error.code}: {error.detail}"
        raise EntrypointError([Fault("wcache.unreachable", detail, error.remedy)]) from error


def _fetch(command: Sequence[str], settings: Settings, plan: Plan) -> tuple[Settings, Plan]:
    """Download the model and plan anew; raise EntrypointError where it is not there then."""
    argv = _launched(plan, build_fetch_argv(settings))
    done = subprocess.run(argv, env=_environment(settings, plan), check=False)
    if done.returncode == 0:
        settings, plan = make_sound_plan(command, _TOLERATED)
    if plan.model_directory is None:
        detail = f"{plan.model} could not be downloaded"
        raise EntrypointError([Fault("model.missing", detail, "read the download's log above")])
    return settings, plan
