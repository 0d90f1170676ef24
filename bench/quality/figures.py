"""The look of all figures: one sheet, one colour per method, names beside lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

# Half of a slide, at twice the usual dots per inch.
SIZE, DPI = (6.4, 3.6), 200
SHARE = "attention caught, of what the best rows catch"
SHARES = (0, 0.2, 0.4, 0.6, 0.8, 1)
_COLOURS = 96
INK, QUIET, FAINT = "#222222", "#6b6b6b", "#dddddd"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Look:
    label: str  # empty: the name itself
    color: str = "#8c8c8c"
    marker: str = "o"
    dash: str = "-"
    ours: bool = False

    def line(self) -> dict[str, Any]:
        return {
            "color": self.color,
            "marker": self.marker,
            "linestyle": self.dash,
            "linewidth": 3.2 if self.ours else 1.8,
            "markersize": 7 if self.ours else 5,
            "zorder": 5 if self.ours else 3,
            "clip_on": False,
        }


# Colours that colour-blind people can tell apart (Okabe and Ito); each has a marker of its own too.
_OURS, _PUBLISHED, _LEARNT, _LINE = "#d55e00", "#0072b2", "#009e73", "#444444"
# By the beginning of a name; the first that fits.
_LOOKS = (
    ("pariskv_core", Look("ours", _OURS, ours=True)),
    ("sign × norm, now", Look("ours: sign × norm", _OURS, ours=True)),
    ("sign × norm, first", Look("ours, first version", _OURS, "o", ":")),
    ("published", Look("ParisKV, published", _PUBLISHED, "s")),
    ("signs, N+R+T", Look("signs, N+R+T (paper)", _PUBLISHED, "s")),
    ("signs, N (T", Look("signs, N alone", _PUBLISHED, "s")),
    ("k-means", Look("", _LEARNT, "^")),
    ("PQCache 16x8, refreshed", Look("k-means, relearnt", _LEARNT, "^", ":")),
    ("PQCache 16x8", Look("k-means (PQCache)", _LEARNT, "^")),
    ("PQCache", Look("k-means, 2×6 bits", "#7fc9b0", "v")),
    ("oracle", Look("the best rows", _LINE, "", "--")),
    ("4-bit", Look("4-bit estimates of all", _LINE, "", "--")),
    ("Quest", Look("Quest", "#cc79a7", "D")),
    ("MagicPIG", Look("MagicPIG", "#56b4e9", "P")),
    ("ArkVale", Look("ArkVale", "#e69f00", "X")),
    ("SnapKV", Look("SnapKV", "#8c8c8c", "h")),
    ("StreamingLLM", Look("StreamingLLM", "#b0b0b0", ".")),
)


def look(name: str) -> Look:
    found = next((found for begin, found in _LOOKS if name.startswith(begin)), Look(""))
    return found if found.label else replace(found, label=name)


# --- A sheet -------------------------------------------------------------------------------------


@contextmanager
def sheet(
    path: Path,
    title: str,
    note: str,
    panels: int = 1,
    left: float = 0.10,
    right: float = 0.72,
    gap: float = 0.12,
) -> Iterator[Sequence[Axes]]:
    """A figure with a title and, below, what was measured; written to `path` at the end.

    left, right  where the panels are, in parts of the sheet; names of lines take the rest
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=SIZE, dpi=DPI)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        figure.subplots_adjust(left=left, right=right, top=0.81, bottom=0.25, wspace=gap)
        figure.text(0.02, 0.975, title, size=13, weight="bold", color=INK, va="top")
        figure.text(0.02, 0.025, note, size=8.5, color=QUIET, va="bottom")
        yield axes
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
        # A palette is enough for a few colours and their edges, and a third of the bytes.
        few = picture.convert("RGB").quantize(_COLOURS, Image.Quantize.MEDIANCUT, dither=0)
        few.save(path, optimize=True)


def draw(axis: Axes, name: str, x: Sequence[float], y: Sequence[float], **changes: Any) -> None:
    axis.plot(x, y, **{**look(name).line(), **changes})


def measured(axis: Axes, what: str) -> None:
    """What a panel shows, above it."""
    axis.set_title(what, size=10.5, loc="left", color=QUIET, pad=8)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, ascending, no two nearer than `gap`, within low and high."""
    groups: list[list[float]] = []  # of neighbours that touch: middle, count
    for place in wanted:
        groups.append([place, 1])
        while True:
            for group in groups:
                reach = gap * (group[1] - 1) / 2
                group[0] = min(max(group[0], low + reach), high - reach)
            if len(groups) < 2:
                break
            (a, n), (b, m) = groups[-2:]
            if b - a >= gap * (n + m) / 2:
                break
            groups[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    return [mid + gap * (i - (n - 1) / 2) for mid, n in groups for i in range(int(n))]


def name_lines(axis: Axes, ends: dict[str, float], gap: float = 0.082, size: float = 10) -> None:
    """Names to the right of where lines end, spread apart; the axis must have its limits by now."""
    scale = axis.transAxes.inverted()
    ordered = sorted(ends, key=lambda name: ends[name])
    edge = axis.get_xlim()[1]
    at = [float(scale.transform(axis.transData.transform((edge, ends[n])))[1]) for n in ordered]
    # A name of two lines takes the room of one and a half.
    for name, here, place in zip(ordered, at, spread(at, gap, -0.04, 1.04), strict=True):
        shown = look(name)
        axis.annotate(
            shown.label,
            xy=(1.015, min(max(here, 0), 1)),
            xytext=(1.065, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=shown.color,
            size=size + shown.ours,
            weight="bold" if shown.ours else "normal",
            va="center",
            linespacing=0.95,
            arrowprops={
                "arrowstyle": "-",
                "color": shown.color,
                "lw": 0.8,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def per_cent(axis: Any, places: Sequence[float]) -> None:
    """Shares as per cent at these places, and at no others."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def counts(axis: Any, places: Sequence[float]) -> None:
    """Whole numbers, thousands as K, at these places and at no others."""

    def text(value: float, _: int) -> str:
        return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"

    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(text))


def ranges(axis: Axes, rows: Sequence[tuple[str, float, float]]) -> None:
    """A row each, from above: name, an open dot here, a full dot there, a line between them."""
    for place, (name, begin, end) in enumerate(reversed(rows)):
        shown = look(name)
        width = 3.2 if shown.ours else 1.8
        size = 70 if shown.ours else 42
        axis.plot([begin, end], [place, place], color=shown.color, lw=width, zorder=3)
        dots = {"s": size, "edgecolors": shown.color, "linewidths": 1.8, "clip_on": False}
        axis.scatter([begin], [place], facecolors="white", zorder=4, **dots)
        axis.scatter([end], [place], facecolors=shown.color, zorder=5, **dots)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.grid(axis="y", visible=False)
    axis.yaxis.set_major_locator(FixedLocator(list(range(len(rows)))))
    names = [look(name).label for name, _, _ in reversed(rows)]
    axis.set_yticklabels(names, size=10)
    axis.tick_params(axis="y", length=0)
    for text, (name, _, _) in zip(axis.get_yticklabels(), reversed(rows), strict=True):
        text.set_color(INK)
        text.set_weight("bold" if look(name).ours else "normal")


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}K"
