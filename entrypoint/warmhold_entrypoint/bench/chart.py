# SPDX-License-Identifier: Apache-2.0
"""A result as a picture: a bar for each row, cut into phases, and the short ones once more, larger.

The card is opaque and light, so that it reads the same on dark pages.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib import rc, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .result import BASELINE, TIMES, UNACCOUNTED, Result, Row

INK, FAINT, CARD, ALARM = "#1f2328", "#59636e", "#ffffff", "#b42318"
# One colour for a phase, in every bar and in every picture.
COLOURS = {
    "stop": "#8c959f",
    "plan": "#bac3cc",
    "wait": "#d8dee4",
    "failed_attempt": "#d1242f",
    "vault": "#1b7c83",
    "flat": "#116329",
    "verify": "#2da44e",
    "image": "#0a3069",
    "imports": "#0969da",
    "engine_init": "#54aeff",
    "weights": "#e16f24",
    "compile": "#8250df",
    "warmup": "#c297ff",
    "kv": "#5e3bb5",
    "api": "#d4a72c",
    "canary": "#6e7011",
    "first_token": "#bf3989",
    UNACCOUNTED: "#eaeef2",
}
_LABELS = {"engine_init": "engine init", "warmup": "warm-up", "kv": "KV", "api": "API start"}
_OTHER = "#57606a"
# Below this share of the longest bar one is shown again on a scale of its own.
_SHORT = 0.15
_LEGEND_ROWS, _LEGEND_COLUMNS, _LINE_POINTS = 2.2, 7, 11
# A number fits where its piece is so wide a part of the axis.
_FITS = 0.045


def write_chart(result: Result, folder: Path) -> list[Path]:
    """Given a result and a folder, write `bench.svg` and `bench.png` there; return their paths."""
    with style():
        return save(draw(result), folder, "bench")


@contextmanager
def style() -> Iterator[None]:
    """Within it pictures have our fonts and colours; text stays text in an SVG."""
    with rc_context():
        rc("font", family="DejaVu Sans", size=10)
        rc("svg", fonttype="none", hashsalt="warmhold")
        rc("text", color=INK)
        rc("axes", labelcolor=FAINT)
        rc("xtick", color=FAINT)
        rc("ytick", color=INK)
        yield


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Given a figure, write it as SVG and PNG; return the paths."""
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], facecolor=CARD, metadata={"Date": None})
    figure.savefig(paths[1], facecolor=CARD, dpi=160)
    return paths


def draw(result: Result, baseline_name: str = BASELINE) -> Figure:
    """Given a result and the baseline of its rows, return their figure."""
    longest_s = max((row.median_s or 0.0 for row in result.rows), default=0.0) or 1.0
    short = [row for row in result.rows if row.median_s and row.median_s < _SHORT * longest_s]
    heights = [len(result.rows) + 0.6, *([len(short) + 0.6] if short else []), _LEGEND_ROWS]
    figure = Figure(figsize=(10, 1.6 + 0.5 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_rows(axes[0], result.rows, longest_s)
    if short:
        _draw_rows(axes[1], short, max(row.median_s or 0.0 for row in short))
        axes[1].set_title("the short ones, magnified", loc="left", fontsize=10, color=FAINT)
    _draw_legend(axes[-1], result)
    figure.suptitle(
        f"vLLM restart, start → first token: {result.model},"
        f" medians ({TIMES}: than {baseline_name})",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def build_footer(result: Result) -> str:
    """Given a result, return the line below its pictures: command, versions, machine, date."""
    versions, machine = result.versions, result.machine
    gpus = "" if machine["gpus"] == "none" else f", {machine['gpus']}"
    return (
        f"{result.command}\nwarmhold {versions['warmhold']}, vLLM {versions['vllm']}, kernel"
        f" {versions['kernel']}; {machine['cpus']} CPUs, {machine['cpu']}{gpus}; {result.date[:10]}"
    )


def _draw_legend(axes: Axes, result: Result) -> None:
    """Colours of the phases that occur, and the footer below them."""
    used = list(dict.fromkeys(name for row in result.rows for name in row.phases))
    order = [name for name in COLOURS if name in used] + [n for n in used if n not in COLOURS]
    axes.axis("off")
    axes.legend(
        handles=[Patch(facecolor=_colour(name), label=_label(name)) for name in order],
        loc="upper left",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=9,
        borderaxespad=0.0,
    )
    for index, line in enumerate(reversed(build_footer(result).splitlines())):
        axes.annotate(
            line,
            xy=(0, 0),
            xytext=(0, _LINE_POINTS * index),
            textcoords="offset points",
            fontsize=7.5,
            color=FAINT,
        )


def _draw_rows(axes: Axes, rows: Sequence[Row], longest_s: float) -> None:
    for index, row in enumerate(rows):
        left = 0.0
        for name, seconds in row.phases.items():
            if row.median_s is None:
                break
            piece = axes.barh(
                index, seconds, left=left, height=0.62, color=_colour(name), linewidth=0
            )
            if seconds > _FITS * longest_s:
                colour = _ink_on(_colour(name))
                axes.bar_label(piece, [_number(seconds)], label_type="center", color=colour)
            left += seconds
        text, colour = _summary(row)
        axes.text(left + 0.008 * longest_s, index, text, va="center", color=colour)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, longest_s * 1.2)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#d0d7de")
    axes.tick_params(axis="y", length=0)


def _summary(row: Row) -> tuple[str, str]:
    """What stands behind a bar, and its colour."""
    if row.median_s is None:
        return "not counted: " + "; ".join(row.faults)[:90], ALARM
    ratio = f", {row.speedup:.1f}{TIMES} faster" if row.speedup and row.speedup > 1.0 else ""
    lost = f" ({row.failed} of {row.count} not counted)" if row.failed else ""
    return f"{row.median_s:.2f} s{ratio}{lost}", INK


def _number(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1.0 else f"{seconds:.2f}"


def _colour(phase: str) -> str:
    return COLOURS.get(phase, _OTHER)


def _label(phase: str) -> str:
    return _LABELS.get(phase, phase.replace("_", " "))


def _ink_on(colour: str) -> str:
    """Black or white, whichever reads on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#ffffff"
