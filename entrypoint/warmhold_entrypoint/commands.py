# SPDX-License-Identifier: Apache-2.0
"""The commands of `warmhold`: parsing and printing, what they do is elsewhere."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from . import VERSION
from .errors import EntrypointError, Exit, Fault
from .files import read_run_dir
from .log import redact_argv
from .reporting.status import ask_status, build_metrics, render_status

# Commands import what they need themselves: the health check runs every second during a start, and
# msgspec alone would double its cost.
_HEALTH_TIMEOUT_S = 3.0
# The drain, the dump and the checksums, or a drain, a restore, and another mode where that fails.
_ORDER_TIMEOUT_S = 3600.0
_MIB = 1 << 20
_backend = click.option(
    "--backend",
    type=click.Choice(["warmhold", "vllm"]),
    default="warmhold",
    help="vllm: by upstream's command, in its scope.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="warmhold")
def cli() -> None:
    """Serve one vLLM engine that restarts in seconds."""


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def boot(arguments: tuple[str, ...]) -> None:
    """Serve, as PID 1. ARGUMENTS go to vLLM as they are."""
    from .container.boot import run_boot

    run_boot(arguments)


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
    from .settings import FIELDS, read_settings, settings_table

    current, faults, notes = read_settings(os.environ, ())
    values = [getattr(current.env, name) for name in FIELDS]
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
    from .running.engine import main as run

    run()


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def preload(arguments: tuple[str, ...]) -> None:
    """Load weights into the vault and end: [MODEL] [ENGINE ARGUMENTS], by default the container's.

    Whether an engine runs meanwhile does not matter.
    """
    from .weight_cache.preload import run_preload

    run_preload(arguments)


@cli.command()
@click.option("--live", is_flag=True, help="Only whether the supervision is alive.")
def healthcheck(live: bool) -> None:
    """End with 0 when the engine serves, else with 1 and the reason."""
    if live:
        from .container.supervision import is_alive

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
    from .reporting.metrics_server import serve_metrics

    serve_metrics(port, read_run_dir())


@cli.command()
@click.option("--name", default="", help="Its name; by default the time.")
@_backend
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def snapshot_create(name: str, backend: str, as_json: bool) -> None:
    """Make a snapshot of the running engine (`snapshot create` is the same).

    Upstream's command starts an engine of its own: ours ends for it, and starts again.
    """
    from .running.orders import CREATE

    result = _order(CREATE, _label(name, backend), Exit.SNAPSHOT_CREATE)
    if as_json:
        import json

        click.echo(json.dumps(result, indent=2))
        return
    if "made_s" in result:
        size = f"{result['image_bytes'] / _MIB:.1f} MiB in {result['made_s']:.2f} s"
        click.echo(f"snapshot  {result['name']}: {size}")
        click.echo(f"engine    serves again, in mode {result['mode']}")
        return
    kinds = [f"{kind} {size / _MIB:.1f}" for kind, size in result["bytes_by_kind"].items()][:6]
    steps = [f"{step} {seconds:.2f}" for step, seconds in result["seconds"].items()]
    click.echo(f"snapshot  {result['name']}")
    click.echo(f"pause     {result['pause_s']:.2f} s, frozen {result['frozen_s']:.2f} s")
    click.echo(f"bytes     {result['image_bytes'] / _MIB:.1f} MiB: {', '.join(kinds)}")
    click.echo(f"weights   {result['weights_bytes'] / _MIB:.1f} MiB in a flat file")
    click.echo(f"seconds   {', '.join(steps)}")
    for note in result["notes"]:
        click.echo(f"note      {note}")


@cli.command()
@click.argument("name", default="")
@_backend
def snapshot_restore(name: str, backend: str) -> None:
    """Restart the engine from a snapshot, the newest that fits (`snapshot restore` is the same).

    Where it cannot be restored the engine goes on, or starts in another mode.
    """
    _restart("snapshot", _label(name, backend), as_json=False)


@cli.command()
@click.option(
    "--mode",
    type=click.Choice(["disk", "ipc_cache", "snapshot"]),
    help="This once in that mode; by default the fastest that works.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def restart(mode: str | None, as_json: bool) -> None:
    """Restart the engine; return when the new one serves.

    Where the mode is not to be had the engine goes on; where it fails, the next start is the usual
    one.
    """
    _restart(mode or "", "", as_json)


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure restarts of this container's engine, by mode (--help says more)."""
    from .bench.command import command

    command(list(arguments), prog_name="warmhold bench", standalone_mode=False)


def run_command(arguments: Sequence[str]) -> None:
    """Given a command line of ours, run it; raise EntrypointError for one that is none."""
    try:
        cli(list(arguments), standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        fault = Fault("usage.command", error.format_message(), "see `warmhold --help`")
        raise EntrypointError([fault]) from error
    except click.Abort as error:
        raise KeyboardInterrupt from error


def _label(name: str, backend: str) -> str:
    """Given a name and who makes or restores it, return the name as the runner knows it."""
    from warmhold_snapshot.upstream import LABEL

    return LABEL + name.removeprefix(LABEL) if backend == "vllm" else name


def _restart(mode: str, name: str, as_json: bool) -> None:
    """Given a mode, and for a snapshot its name, restart the engine and say how long it took."""
    from .running.orders import RESTART

    result = _order(RESTART, name, Exit.RESTORE, mode)
    if as_json:
        import json

        click.echo(json.dumps(result, indent=2))
        return
    steps = [f"{step} {seconds:.2f}" for step, seconds in result["seconds"].items()]
    what = result["name"] or f"in mode {result['mode']}"
    verb = "restored" if result["name"] else "restarted"
    click.echo(f"{verb}  {what} in {result['total_s']:.2f} s: {', '.join(steps)}")


def _order(act: str, name: str, code: Exit, mode: str = "") -> dict[str, Any]:
    """Given an order to the runner, return what came of it; raise EntrypointError."""
    from .running.orders import give_order

    result = give_order(read_run_dir(), act, name, _ORDER_TIMEOUT_S, mode)
    if result["ok"]:
        return result
    fault = Fault.of(result)
    kind = fault.code.partition(".")[0]
    if fault.code == "snapshot.rights":
        code = Exit.RIGHTS
    raise EntrypointError([fault], code if kind == "snapshot" else None)


def _hide_secrets(variable: str, value: str) -> str:
    if variable not in ("WARMHOLD_ENGINE_ARGS", "WARMHOLD_PRELOAD_ARGS"):
        return value
    try:
        return shlex.join(redact_argv(shlex.split(value)))
    except ValueError:  # cannot be split, so what is secret in it is not known
        return "***"
