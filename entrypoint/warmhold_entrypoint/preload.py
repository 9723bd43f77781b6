# SPDX-License-Identifier: Apache-2.0
"""Weights without an engine: plans as for a start, and becomes the plug-in's preload.

It has the engine's argv, environment, user and lack of rights, so that the weights are those which
the engine asks for. It is not marked as an engine's process: the runner must not sweep it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError

from .conf import VAULT_SOCKET
from .errors import EntrypointError, Fault
from .files import read_run_dir
from .log import Log
from .plan import Plan, build_fetch_argv
from .settings import PREFIX, Settings
from .start import make_sound_plan, prepare_folders, read_command

_LAUNCHER = Path(__file__).with_name("launcher.py")
_MODULE = "warmhold_wcache.vllm_plugin.preload"
# Nothing listens here, and a running engine holds its port.
_TOLERATED = frozenset(("port.taken", "rights.port"))

_log = Log("preload")


def run_preload(arguments: Sequence[str]) -> NoReturn:
    """Given a model and engine arguments, or nothing for the container's own, load the weights into
    the vault; end with 0 when all of them are resident.

    Raise EntrypointError, with every fault, before anything is loaded.
    """
    command = build_command(arguments) if arguments else read_command(read_run_dir())
    # Whether a start could use resident weights is no question to one who makes them resident.
    os.environ[f"{PREFIX}MODE"] = "disk"
    settings, plan = make_sound_plan(command, _TOLERATED)
    _check_vault(settings)
    prepare_folders(settings, plan)
    if plan.model_directory is None:
        settings, plan = _fetch(command, settings, plan)
    _log.info("preload starts", model=plan.model, directory=plan.model_directory)
    argv = build_preload_argv(plan)
    os.execve(argv[0], argv, build_environment(os.environ, plan))  # noqa: S606 - ours


def build_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """Given a model, which may be left out, and engine arguments, return them as a container's
    command."""
    if arguments and not arguments[0].startswith("-"):
        return ("--model", *arguments)
    return tuple(arguments)


def build_preload_argv(plan: Plan) -> list[str]:
    """Given the plan, return the argv that loads its weights, through the launcher."""
    serve = plan.attempts[-1].argv
    assert serve[:2] == ("vllm", "serve"), serve[:2]
    return _launched(plan, [sys.executable, "-m", _MODULE, *serve[2:]])


def build_environment(environ: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Given the container's environment and the plan, return the engine's, as its runner makes it;
    without an API key, which only a server needs."""
    own = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    return {**plan.environment, **own}


def _launched(plan: Plan, argv: Sequence[str]) -> list[str]:
    uid = os.getuid() if plan.uid is None else plan.uid
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(uid), "none", *argv]


def _check_vault(settings: Settings) -> None:
    """Raise EntrypointError where no vault answers: all of the loading would be for nothing."""
    try:
        with VaultClient(settings.env.run_dir / VAULT_SOCKET) as client:
            client.hello()
    except WcacheError as error:
        remedy = error.remedy
        if settings.env.wcache == "off":
            remedy = f"start the container with {PREFIX}WCACHE=vault"
        detail = f"{error.code}: {error.detail}"
        raise EntrypointError([Fault("wcache.unreachable", detail, remedy)]) from error


def _fetch(command: Sequence[str], settings: Settings, plan: Plan) -> tuple[Settings, Plan]:
    """Download the model and plan anew; raise EntrypointError where it is not there then."""
    argv = _launched(plan, build_fetch_argv(settings))
    done = subprocess.run(argv, env=build_environment(os.environ, plan), check=False)
    if done.returncode == 0:
        settings, plan = make_sound_plan(command, _TOLERATED)
    if plan.model_directory is None:
        detail = f"{plan.model} could not be downloaded"
        raise EntrypointError([Fault("model.missing", detail, "read the download's log above")])
    return settings, plan
