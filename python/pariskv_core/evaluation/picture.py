"""Scores by length, a line for each setting. Matplotlib is loaded by it alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pariskv_core.evaluation.record import AVERAGE, Cell

_COLOURS = ("#111827", "#0f766e", "#d97706", "#2563eb", "#be185d", "#65a30d", "#7c3aed")
_APART = 0.012  # of a length, so that intervals do not hide each other


def draw(cells: Sequence[Cell], path: Path, title: str) -> bool:
    """False: matplotlib is not installed, and there is no picture."""
    try:
        import matplotlib
    except ImportError:
        return False
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "pariskv"
    shown = _shown(cells)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.gca()
    settings = list(dict.fromkeys(cell.setting for cell in shown))
    for i, setting in enumerate(settings):
        own = [cell for cell in shown if cell.setting == setting]
        shift = 1 + _APART * (2 * i + 1 - len(settings))
        scores = [100 * cell.score for cell in own]
        below = [100 * (cell.score - cell.within.low) for cell in own]
        above = [100 * (cell.within.high - cell.score) for cell in own]
        axes.errorbar(
            [cell.length * shift for cell in own],
            scores,
            yerr=[below, above],
            label=setting,
            color=_COLOURS[i % len(_COLOURS)],
            marker="o",
            markersize=4,
            linewidth=1.6,
            elinewidth=0.8,
            capsize=2,
        )
    lengths = sorted({cell.length for cell in shown})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.minorticks_off()
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 1.4, lengths[0] * 1.4)
    axes.set(xlabel="tokens", ylabel="score, and 95 % of it", ylim=(-3, 103))
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=150)
    return True


def _shown(cells: Sequence[Cell]) -> list[Cell]:
    """All tasks together; the task, where there is one."""
    together = [cell for cell in cells if cell.task == AVERAGE]
    return together or list(cells)


def _short(tokens: int) -> str:
    return f"{tokens >> 10}K" if tokens % 1024 == 0 else f"{tokens:,}"
