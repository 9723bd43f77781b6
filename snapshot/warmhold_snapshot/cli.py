# SPDX-License-Identifier: Apache-2.0
"""The command `snapshot`: what can be made here, and what there is.

The only place of the package that catches SnapshotError and ends with an exit code: 0, 1 (a
question answered with no), 2 (usage), 77 (a right is missing).
"""

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from . import check as checks
from . import upstream
from .artifact import Listed, Store
from .errors import SnapshotError
from .manifest import Manifest
from .mark import read_mark

_FAILED, _USAGE, _RIGHTS = 1, 2, 77


def _find_folder() -> Path:
    """Where this container's artifacts lie: asked for by a command line alone, never by a leaf."""
    return Path(os.environ.get("WARMHOLD_STATE_DIR") or "/var/lib/warmhold") / "snapshots"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=_find_folder,
    show_default="snapshots in WARMHOLD_STATE_DIR",
    help="Where snapshots lie.",
)
@click.pass_context
def cli(context: click.Context, folder: Path) -> None:
    """Snapshots of the running engine."""
    context.obj = folder


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option(
    "--estimate-mib", type=click.IntRange(0), default=0, help="Expected size and weights, MiB."
)
@click.option("--other-uid", is_flag=True, help="The engine runs as another user than root.")
@click.option(
    "--above-pid", type=click.IntRange(0), default=0, help="The engine's PIDs are higher."
)
@click.option(
    "--plugins",
    type=click.Path(path_type=Path),
    help="The engine is on a GPU: where criu's plug-ins lie (/usr/local/lib/criu in the image).",
)
@click.pass_obj
def check(
    folder: Path,
    as_json: bool,
    estimate_mib: int,
    other_uid: bool,
    above_pid: int,
    plugins: Path | None,
) -> None:
    """Tell whether this container can make and restore snapshots."""
    found = checks.read_found(folder)
    points = checks.conclude(found, estimate_mib << 20, other_uid, above_pid, plugins)
    answer = json.dumps(checks.to_json(points), indent=2) if as_json else checks.render(points)
    click.echo(answer)
    sys.exit(0 if all(point.ok for point in points) else _RIGHTS)


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def create(arguments: tuple[str, ...]) -> None:
    """Make a snapshot of the running engine: [--name NAME] [--backend vllm] [--json]."""
    _ask_runner("snapshot-create", arguments)


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def restore(arguments: tuple[str, ...]) -> None:
    """Restart the engine from a snapshot: [NAME], by default the newest; [--backend vllm]."""
    _ask_runner("snapshot-restore", arguments)


@cli.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def list_(folder: Path, as_json: bool) -> None:
    """List the snapshots, the newest first; then upstream's."""
    rows = Store(folder).rows() + upstream.list_upstream(upstream.find_folder(folder))
    click.echo(msgspec.json.encode(rows).decode() if as_json else render(rows))


@cli.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON.")
@click.option("--verify", is_flag=True, help="Compare every byte with its checksum.")
@click.pass_obj
def inspect(folder: Path, name: str, as_json: bool, verify: bool) -> None:
    """Show what a snapshot is, and whether all of it is there; of upstream's, its manifest."""
    if upstream.is_upstreams(name):
        click.echo(upstream.inspect_upstream(upstream.find_folder(folder), name))
        return
    store = Store(folder)
    manifest = store.read(name)
    store.verify(manifest, checksums=verify)
    weights = store.judge_weights(manifest)
    if weights != "absent":  # the vault may hold them
        for generation_id in manifest.weights:
            store.flat.verify(generation_id, checksums=verify)
    mark = read_mark(store.path(name))
    if as_json:
        shown = {"manifest": manifest, "failed": mark, "verified": verify, "weights": weights}
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
        return
    click.echo(describe(manifest))
    size = f"{sum(manifest.weights.values()) / (1 << 20):.1f} MiB"
    click.echo(f"weights   {weights}: {size} in {', '.join(manifest.weights) or 'no flat file'}")
    click.echo(f"files     {len(manifest.files)}, {'every byte' if verify else 'sizes'} as written")
    if mark:
        click.echo(f"failed    {mark.at} {mark.code}: {mark.detail}")


@cli.command()
@click.option("--keep", type=click.IntRange(0), required=True, help="How many usable ones stay.")
@click.pass_obj
def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest usable snapshots, of ours and of upstream's, and flat weights that
    none needs."""
    of_upstream = upstream.find_folder(folder)
    for name in [*Store(folder).prune(keep), *upstream.prune_upstream(of_upstream, keep)]:
        click.echo(f"removed {name}")


def _ask_runner(command: str, arguments: tuple[str, ...]) -> NoReturn:
    """The engine is the runner's, so that its own command does it."""
    try:
        os.execvp("warmhold", ["warmhold", command, *arguments])  # noqa: S606 - one program, no shell
    except OSError as error:
        detail = f"warmhold cannot be started: {error.strerror}"
        raise SnapshotError("snapshot.no-runner", detail, "use the warmhold image") from error


def render(rows: list[Listed]) -> str:
    """Given rows, return them as a table."""
    table = [("NAME", "STATE", "CREATED", "MIB", "WEIGHTS MIB", "DETAIL")]
    for row in rows:
        size = str(row.image_bytes >> 20)
        weights = f"{row.weights_bytes >> 20} {row.weights}"
        table.append((row.name, row.state, row.created[:19] + "Z", size, weights, row.detail))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def describe(manifest: Manifest) -> str:
    """Given a manifest, return what it says as lines; identity fields are cut at 100 characters."""
    mib = 1 << 20
    by_kind = [f"{kind} {size / mib:.1f}" for kind, size in manifest.bytes_by_kind.items()][:6]
    threads = sum(len(process.threads) for process in manifest.processes)
    lines = [
        f"name      {manifest.name}",
        f"created   {manifest.created}",
        f"bytes     {manifest.image_bytes / mib:.1f} MiB: {', '.join(by_kind)}",
        f"processes {len(manifest.processes)}, {threads} threads, first PID {manifest.root_pid}",
        *(
            f"          {process.pid} {process.name}: "
            f"{manifest.bytes_by_process.get(process.pid, 0) / mib:.1f} MiB"
            for process in manifest.processes
        ),
        f"shm       {len(manifest.shm)} file(s)",
        f"seconds   {', '.join(f'{name} {s:.2f}' for name, s in manifest.timings.items())}",
        *(f"identity  {name}={text[:100]}" for name, text in sorted(manifest.identity.items())),
    ]
    return "\n".join(lines)


def main() -> NoReturn:
    """Run the command line; end with the exit code that the error's code has."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _say("usage.command", error.format_message(), "see `snapshot --help`")
        sys.exit(_USAGE)
    except SnapshotError as error:
        _say(error.code, error.detail, error.remedy)
        sys.exit(_RIGHTS if error.code == "snapshot.rights" else _FAILED)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(0)


def _say(code: str, detail: str, remedy: str) -> None:
    click.echo(f"error: {code}: {detail}", err=True)
    if remedy:
        click.echo(f"fix: {remedy}", err=True)


if __name__ == "__main__":
    main()
