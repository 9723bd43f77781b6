# SPDX-License-Identifier: Apache-2.0
"""How restarts grow with the model's weights and with a snapshot's bytes: points, lines, a picture.

    python -m warmhold_entrypoint.bench.scaling FOLDER IMAGES.json BENCH.json...

Made of one benchmark's result for each size of a model, and of `bench/restore_bytes.py`'s rows.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import Struct

from .chart import COLOURS, FAINT, INK, save, style
from .command import read_result
from .result import Result, Start

_GB = 1e9
_GREY, _DARK = "#8c959f", "#59636e"


class Size(Struct, frozen=True, forbid_unknown_fields=True):
    """One model: seconds of its weight phase from disk and as a hit, and of its restore."""

    weight_bytes: int
    disk_weights_s: float
    hit_weights_s: float
    restore_s: float
    image_bytes: int


class Image(Struct, frozen=True, forbid_unknown_fields=True):
    """One image: seconds of its restore, in the page cache and dropped from it, and of plain reads
    of the same files by one thread."""

    image_bytes: int
    warm_s: float
    warm_verify_s: float
    warm_criu_s: float
    cold_s: float
    memory_read_s: float
    disk_read_s: float


class Line(Struct, frozen=True, forbid_unknown_fields=True):
    """The straight line of least squares: seconds per 10**9 bytes, and at none."""

    slope_s_per_gb: float
    intercept_s: float


class Scaling(Struct, frozen=True, forbid_unknown_fields=True):
    """Points, and a line through each series of them, by name."""

    date: str
    versions: dict[str, str]
    machine: dict[str, str]
    sizes: list[Size]
    images: list[Image]
    lines: dict[str, Line]
    format: Literal[1] = 1


# Series by name: of which points, their label, their colour.
_OF_SIZES = {
    "disk_weights_s": ("from disk", COLOURS["weights"]),
    "hit_weights_s": ("out of the vault", COLOURS["vault"]),
    "restore_s": ("whole restore, snapshot", COLOURS["image"]),
}
_OF_IMAGES = {
    "cold_s": ("restore, image on disk", COLOURS["imports"]),
    "warm_s": ("restore, image in memory", COLOURS["image"]),
    "disk_read_s": ("plain read from disk", _DARK),
    "memory_read_s": ("plain read from memory", _GREY),
}


def build(results: Sequence[Result], images: Sequence[Image]) -> Scaling:
    """Given results of at least two sizes and at least two images, return points and lines. Raise
    ValueError where a size lacks a start that proved itself."""
    sizes = sorted(map(_read_size, results), key=lambda size: size.weight_bytes)
    lines = {
        name: fit([(size.weight_bytes, getattr(size, name)) for size in sizes])
        for name in _OF_SIZES
    }
    lines |= {
        name: fit([(image.image_bytes, getattr(image, name)) for image in images])
        for name in _OF_IMAGES
    }
    last = results[-1]
    return Scaling(last.date, last.versions, last.machine, sizes, list(images), lines)


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """Given pairs of bytes and seconds, return their line; raise statistics.StatisticsError for
    less than two different sizes."""
    found = statistics.linear_regression([x / _GB for x, _ in points], [y for _, y in points])
    return Line(found.slope, found.intercept)


def draw(scaling: Scaling) -> Figure:
    """Given points and lines, return the figure: by weights, and by image."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_panel(left, scaling.sizes, [size.weight_bytes for size in scaling.sizes], scaling.lines)
    left.set_xlabel("weights, GB")
    left.set_title("weight phase, and a restore", loc="left", fontsize=11)
    _draw_panel(right, scaling.images, [made.image_bytes for made in scaling.images], scaling.lines)
    right.set_xlabel("image, GB")
    right.set_title("restore of a plain process, and the machine's floor", loc="left", fontsize=11)
    machine, versions = scaling.machine, scaling.versions
    footer = (
        f"vLLM {versions['vllm']}, kernel {versions['kernel']}; {machine['cpus']} CPUs,"
        f" {machine['cpu']}; {scaling.date[:10]}"
    )
    figure.supxlabel(footer, fontsize=7.5, color=FAINT, x=0.01, ha="left")
    return figure


def _draw_panel(
    axes: Axes,
    points: Sequence[Size] | Sequence[Image],
    sizes: Sequence[int],
    lines: Mapping[str, Line],
) -> None:
    """The series that points of this kind have, over their sizes in bytes."""
    for name, (label, colour) in (_OF_SIZES | _OF_IMAGES).items():
        if not hasattr(points[0], name):
            continue
        line = lines[name]
        shown = f"{label}: {line.intercept_s:.2f} s + {line.slope_s_per_gb:.2f} s/GB"
        places = [size / _GB for size in sizes]
        axes.plot(
            places, [getattr(point, name) for point in points], "o", color=colour, label=shown
        )
        ends = [0.0, max(places)]
        axes.plot(ends, [line.intercept_s + line.slope_s_per_gb * x for x in ends], color=colour)
    axes.set_ylabel("seconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eaeef2")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def _read_size(result: Result) -> Size:
    disk, hit, restored = (_find(result, name) for name in ("disk", "ipc_cache", "snapshot"))
    if result.snapshot is None or restored.ready_s is None:
        raise ValueError(f"{result.model}: no snapshot")
    return Size(
        weight_bytes=result.weight_bytes,
        disk_weights_s=disk.proof["weights_s"],
        hit_weights_s=hit.proof["weights_s"],
        restore_s=restored.ready_s,
        image_bytes=result.snapshot.image_bytes,
    )


def _find(result: Result, name: str) -> Start:
    for start in result.starts:
        if start.name == name and not start.faults:
            return start
    raise ValueError(f"{result.model}: no start {name} that proved itself")


def main() -> None:
    """Read what the command line names; write `scaling.json`, `.svg` and `.png`."""
    folder, images, *results = map(Path, sys.argv[1:])
    rows = msgspec.json.decode(images.read_bytes(), type=list[Image])
    scaling = build([read_result(path) for path in results], rows)
    text = msgspec.json.format(msgspec.json.encode(scaling), indent=2)
    (folder / "scaling.json").write_bytes(text + b"\n")
    with style():
        save(draw(scaling), folder, "scaling")


if __name__ == "__main__":
    main()
