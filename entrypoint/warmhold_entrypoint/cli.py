# SPDX-License-Identifier: Apache-2.0
"""The command `warmhold`, and the image's entrypoint.

A first argument that is a flag, or none, serves; a command of ours runs; anything else is executed
as given. This is the only place that catches EntrypointError and ends with its exit code.
"""

import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from . import VERSION
from .errors import EntrypointError, Exit, Fault
from .files import read_run_dir
from .log import Log, configure_logging, redact_argv
from .status import ask_status, build_metrics, render_status

# Commands import what they need themselves: the health check runs every second during a start, and
# pydantic alone would triple its cost.
_log = Log("boot")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HEALTH_TIMEOUT_S = 3.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="warmhold")
def cli() -> None:
    """Serve one vLLM engine that restarts in seconds."""


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def boot(arguments: tuple[str, ...]) -> None:
    """Serve, as PID 1. ARGUMENTS go to vLLM as they are."""
    from . import conf, start
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
    start.write_command(env.run_dir, arguments)
    uid = os.getuid() if plan.uid is None else plan.uid
    sys.exit(run_pid1(conf.write_conf(settings), env.run_dir, uid))


@cli.command(context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="The whole plan as JSON.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(as_json: bool, arguments: tuple[str, ...]) -> None:
    """Say what a start would do, and why; start nothing."""
    from . import start

    arguments = arguments or start.read_command(read_run_dir())
    _, made, faults, notes = start.make_plan(arguments)
    if as_json:
        click.echo(made.to_json())
    else:
        for attempt in made.attempts:
            click.echo(f"try {attempt.mode}")
        for rejection in made.rejections:
            click.echo(f"not {rejection.mode}: {rejection.code}: {rejection.detail}")
        click.echo(f"model {made.model}: {made.model_directory or 'to be downloaded'}")
        for note in notes:
            click.echo(f"note: {note}")
    if faults:
        raise EntrypointError(faults)


@cli.command()
def settings() -> None:
    """List every setting, its value here, its default and its meaning."""
    from .settings import read_settings, settings_table

    current, faults, notes = read_settings(os.environ, ())
    values = current.env.model_dump().values()
    for (name, default, meaning), value in zip(settings_table(), values, strict=True):
        shown = "none" if value is None else _hide_secrets(name, str(value))
        click.echo(f"{name} = {shown}  (default {default})\n    {meaning}")
    for note in notes:
        click.echo(f"note: {note}")
    if faults:
        raise EntrypointError(faults)


@cli.command()
def engine() -> None:
    """Run engines (supervisord starts the module itself, without this command line)."""
    from .engine import main as run

    run()


@cli.command()
@click.option("--live", is_flag=True, help="Only whether the supervision is alive.")
def healthcheck(live: bool) -> None:
    """End with 0 when the engine serves, else with 1 and the reason."""
    if live:
        from .supervision import is_alive

        if not is_alive(read_run_dir()):
            click.echo("supervisord does not answer")
            sys.exit(Exit.FAILED)
        click.echo("alive")
        return
    status = ask_status(read_run_dir(), _HEALTH_TIMEOUT_S)
    if status is None:
        click.echo("no answer from the engine's runner")
        sys.exit(Exit.FAILED)
    click.echo(f"{status['state']}: {status['reason']}")
    sys.exit(Exit.STOPPED if status["ready"] else Exit.FAILED)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def status(as_json: bool) -> None:
    """Show what happened: mode, state, restarts, last exit, phases."""
    answer = ask_status(read_run_dir(), _HEALTH_TIMEOUT_S)
    if answer is None:
        fault = Fault(
            "ready.no-runner",
            "no answer from the engine's runner",
            "see `supervisorctl status` and the container's log",
        )
        raise EntrypointError([fault])
    if as_json:
        import json

        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo(render_status(answer))


@cli.command()
@click.option("--port", type=int, help="Serve them over HTTP on this port instead.")
def metrics(port: int | None) -> None:
    """Print Prometheus metrics of the supervision."""
    if port is None:
        click.echo(build_metrics(ask_status(read_run_dir(), _HEALTH_TIMEOUT_S)), nl=False)
        return
    from .metrics_server import serve_metrics

    serve_metrics(port, read_run_dir())


def main() -> NoReturn:
    """Run the command line; end with the exit code that the fault's kind has."""
    configure_logging(os.environ)
    arguments = sys.argv[1:]
    try:
        if _is_foreign(arguments):
            _execute(arguments)
        if not arguments or (arguments[0].startswith("-") and not _is_own_flag(arguments)):
            arguments = ["boot", "--", *arguments]
        cli(arguments, standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _say([Fault("usage.command", error.format_message(), "see `warmhold --help`")])
        sys.exit(Exit.USAGE)
    except EntrypointError as error:
        _say(error.faults)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # the last resort: a bug is told as one
        _say([Fault("bug.unexpected", f"{type(error).__name__}: {error}", "please report it")])
        traceback.print_exc()
        sys.exit(Exit.BUG)
    sys.exit(Exit.STOPPED)


def _is_own_flag(arguments: Sequence[str]) -> bool:
    return len(arguments) == 1 and arguments[0] in ("-h", "--help", "--version")


def _is_foreign(arguments: Sequence[str]) -> bool:
    return bool(arguments) and not arguments[0].startswith("-") and arguments[0] not in cli.commands


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


def _hide_secrets(variable: str, value: str) -> str:
    if variable != "WARMHOLD_ENGINE_ARGS":
        return value
    try:
        return shlex.join(redact_argv(shlex.split(value)))
    except ValueError:  # cannot be split, so what is secret in it is not known
        return "***"


def _say(faults: Sequence[Fault]) -> None:
    for fault in faults:
        click.echo(fault.lines(), err=True)


if __name__ == "__main__":
    main()
