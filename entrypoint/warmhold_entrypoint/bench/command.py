# SPDX-License-Identifier: Apache-2.0
"""The command `warmhold bench`: what it is asked, what it writes, and its exit code."""

import shutil
import sys
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from ..errors import EntrypointError, Exit, Fault
from ..files import read_run_dir
from .container import Container
from .result import Result
from .run import Bench, Options, check_modes
from .table import print_table

RESULT = "bench.json"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=3, show_default=True, help="Starts in each mode.")
@click.option(
    "--modes",
    default="disk,ipc_cache,snapshot",
    show_default=True,
    help="Which, in which order; disk has to be among them.",
)
@click.option("--cold", default=0, help="So many starts with empty compile caches besides.")
@click.option("--peer", default=0, help="So many starts of plain `vllm serve` besides.")
@click.option(
    "--page-cache",
    type=click.Choice(["warm", "cold"]),
    default="warm",
    show_default=True,
    help="cold: weight files and snapshots are read from the disk each time.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for JSON, SVG and PNG.")
@click.option("--json", "as_json", is_flag=True, help="JSON in place of the table.")
def command(
    rounds: int, modes: str, cold: int, peer: int, page_cache: str, out: Path | None, as_json: bool
) -> None:
    """Measure restarts of this container's engine, by mode: its clients are not served meanwhile.

    Each start has to prove what it is; one that does not is shown as failed, and ends this with 1.
    """
    options = Options(rounds, tuple(modes.split(",")), cold, peer, page_cache)
    if not run_bench(read_run_dir(), options, out, as_json):
        sys.exit(Exit.FAILED)


def run_bench(run_dir: Path, options: Options, out: Path | None, as_json: bool) -> bool:
    """Given the run directory, measure, print the table (or JSON), and write JSON and pictures into
    `out` (by default below the state directory); return whether every row proved itself.

    Raise EntrypointError where nothing can be measured.
    """
    try:
        check_modes(options.modes)
    except ValueError as error:
        raise EntrypointError([Fault("usage.command", str(error), "see --help")]) from error
    said = Console(stderr=True, highlight=False)
    container = Container(run_dir)
    folder = out or container.settings.env.state_dir / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(container, options, folder, partial(said.print, markup=False, soft_wrap=True))
    try:
        result = bench.run()
    finally:
        container.remove_snapshot()
        shutil.rmtree(folder / "peer", ignore_errors=True)
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    (folder / RESULT).write_bytes(text + b"\n")
    if as_json:
        sys.stdout.write(text.decode() + "\n")
    else:
        print_table(result, Console(highlight=False))
    from .chart import write_chart

    for path in [folder / RESULT, *write_chart(result, folder)]:
        said.print(f"written: {path}", markup=False, soft_wrap=True)
    return all(not row.faults for row in result.rows)


def read_result(path: Path) -> Result:
    """Given a file that a benchmark wrote, return the result; raise msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=Result)
