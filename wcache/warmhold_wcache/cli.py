# SPDX-License-Identifier: Apache-2.0
"""The command `wcache`: serve the vault, and look after what is resident.

The only place of the package that catches WcacheError and ends with an exit code: 0, 1 (a question
answered with no), 2 (usage), 69 (no vault answers).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from .checkpoint import check_checkpoint, make_reader
from .client import DEFAULT_SOCKET, VaultClient
from .errors import UnreachableError, WcacheError
from .verify import check_resident

_FAILED, _USAGE, _UNAVAILABLE = 1, 2, 69


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    "socket_path",
    type=click.Path(path_type=Path),
    default=DEFAULT_SOCKET,
    show_default=True,
    help="The vault's socket.",
)
@click.option("--timeout", "timeout_s", type=float, default=5.0, show_default=True, help="Seconds.")
@click.pass_context
def cli(context: click.Context, socket_path: Path, timeout_s: float) -> None:
    """Keep weights resident, and see what is."""
    context.obj = (socket_path, timeout_s)


@cli.command()
@click.option("--store", type=click.Path(path_type=Path), help="The fd store's socket.")
@click.pass_obj
def serve(given: tuple[Path, float], store: Path | None) -> None:
    """Serve the vault in the foreground."""
    argv = [sys.executable, "-m", "warmhold_wcache.serve", "--socket", str(given[0])]
    argv += [] if store is None else ["--store", str(store)]
    os.execv(argv[0], argv)  # noqa: S606 - the vault's process holds nothing of this command's


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, with the keys.")
@click.pass_obj
def status(given: tuple[Path, float], as_json: bool) -> None:
    """Show what is resident: bytes, last use, who holds it."""
    with VaultClient(*given) as client:
        rows = client.stat()
    click.echo(json.dumps(rows, indent=2) if as_json else render(rows))


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def preload(arguments: tuple[str, ...]) -> None:
    """Load weights into the vault and end: [MODEL] [ENGINE ARGUMENTS], by default the container's.

    The engine's arguments decide how weights are laid out; `warmhold` knows them.
    """
    try:
        os.execvp("warmhold", ["warmhold", "preload", *arguments])  # noqa: S606 - becomes it
    except OSError as error:
        detail = f"the program `warmhold` cannot be run: {error.strerror}"
        raise WcacheError("wcache.unsupported", detail, "run it in the image") from error


@cli.command()
@click.argument("generation_id")
@click.option("--force", is_flag=True, help="Also while an engine holds it.")
@click.pass_obj
def drop(given: tuple[Path, float], generation_id: str, force: bool) -> None:
    """Give up a generation; its memory goes when nobody maps it any more."""
    with VaultClient(*given) as client:
        client.drop(generation_id, force)
    click.echo(f"dropped {generation_id}")


@cli.command()
@click.pass_obj
def watch(given: tuple[Path, float]) -> None:
    """Print what is resident, then a line for each change, until Ctrl-C."""
    for event in VaultClient(*given).watch():
        if event["event"] == "resident":
            click.echo(" ".join(["resident", *event["ids"]]))
        else:
            click.echo(f"{event['event']} {event['id']} pid={event['pid']}")


@cli.command()
@click.option("--port", type=click.IntRange(1, 65535), help="Serve /health on 127.0.0.1 instead.")
@click.pass_obj
def health(given: tuple[Path, float], port: int | None) -> None:
    """End with 0 when the vault answers a round trip."""
    if port is not None:
        from .health import make_server

        make_server(port, *given).serve_forever()
    with VaultClient(*given) as client:
        answer = client.hello()
    click.echo(f"alive: pid {answer['pid']}, {answer['generations']} generation(s)")


@cli.command()
@click.argument("generation_id", required=False)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--resident-only", is_flag=True, help="Do not read the checkpoint on disk.")
@click.pass_obj
def verify(
    given: tuple[Path, float], generation_id: str | None, as_json: bool, resident_only: bool
) -> None:
    """Compare resident bytes with the checksums of their publishing, and the checkpoint on disk
    with what was published."""
    read_digest = make_reader(_show_progress if sys.stderr.isatty() else None)
    with VaultClient(*given) as client:
        rows = [row for row in client.stat() if generation_id in (None, row["id"])]
        if generation_id is not None and not rows:
            detail = f"generation {generation_id} is not resident"
            raise WcacheError("wcache.absent", detail, "see `wcache status`")
        # What may be unsupported here comes first.
        found = [None if resident_only else check_checkpoint(row, read_digest) for row in rows]
        reports = [check_resident(client, row) for row in rows]
    pairs = list(zip(reports, found, strict=True))
    if as_json:
        values = [
            {**report.to_json(), "checkpoint": finding and finding.to_json()}
            for report, finding in pairs
        ]
        click.echo(json.dumps(values, indent=2))
    else:
        for report, finding in pairs:
            click.echo(f"{report.line()}; {finding.line()}" if finding else report.line())
    failed = any(not report.sound or (finding and finding.failed) for report, finding in pairs)
    sys.exit(_FAILED if failed else 0)


def _show_progress(done_bytes: int, total_bytes: int) -> None:
    """Say on one line of the terminal how much of a checkpoint was read; at the end, wipe it."""
    text = f"reading the checkpoint: {100 * done_bytes // total_bytes} %"
    click.echo(f"\r{text if done_bytes < total_bytes else ' ' * len(text)}\r", err=True, nl=False)


def render(rows: list[dict[str, Any]]) -> str:
    """Given rows of `stat`, return them as a table."""
    import time

    head = ("ID", "MODEL", "BYTES", "SEGMENTS", "LAST USE", "HELD BY")
    table = [head]
    for row in rows:
        used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row["last_use"]))
        holders = ",".join(str(pid) for pid in row["holders"]) or "-"
        table.append(
            (row["id"], row["model"], str(row["bytes"]), str(row["segments"]), used, holders)
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def main() -> NoReturn:
    """Run the command line; end with the exit code that the error's code has."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _say("usage.command", error.format_message(), "see `wcache --help`")
        sys.exit(_USAGE)
    except WcacheError as error:
        _say(error.code, error.detail, error.remedy)
        away = isinstance(error, UnreachableError) or error.code == "wcache.other-uid"
        sys.exit(_UNAVAILABLE if away else _FAILED)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(0)


def _say(code: str, detail: str, remedy: str) -> None:
    click.echo(f"error: {code}: {detail}", err=True)
    if remedy:
        click.echo(f"fix: {remedy}", err=True)


if __name__ == "__main__":
    main()
