"""The figures, each of what there are results for: python -m quality plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quality import lists
from quality.figures import (
    measured,
    ranges,
    sheet,
    thousands,
)
from quality.plots_budget import bits, candidates
from quality.plots_drift import drift_slow, drift_switch, drift_written
from quality.sources import Sources


def one_by_one(sources: Sources, path: Path) -> None:
    prompt, decoded = (thousands(sources.synthetic["size"][name]) for name in ("prompt", "decoded"))
    note = (
        f"Recall of the best 100 among 10 % candidates; ○ after the prompt of {prompt},"
        f" ● {decoded} decoded tokens later."
        "\nN: keys normalised, R: rotated, T: centroids from theory."
        " k-means: learnt from the prompt, then frozen."
    )
    kinds = sources.synthetic["switched_on"]
    title = "The paper's ideas one by one, and ours"
    with sheet(path, title, note, panels=3, left=0.26, right=0.96, gap=0.2) as axes:
        for axis, (kind, stages) in zip(axes, kinds.items(), strict=True):
            ranges(axis, [(name, *ends) for name, ends in stages.items()])
            measured(axis, kind.replace(", ", ",\n"))
            axis.set_xlim(0, 1)
            axis.set_xticks((0, 0.5, 1), ("0", "50 %", "100"))
            axis.tick_params(labelleft=axis is axes[0])


# What each is made of; one without its results is left out.
FIGURES: dict[Callable[[Sources, Path], None], tuple[str, ...]] = {
    drift_slow: ("synthetic",),
    drift_switch: ("synthetic",),
    drift_written: ("model",),
    candidates: ("model",),
    bits: ("model",),
    one_by_one: ("synthetic",),
}


def all_of(sources: Sources, folder: Path = lists.FIGURES) -> dict[str, str]:
    """Draws what can be drawn; says of each figure what became of it."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {}
    for figure, parts in FIGURES.items():
        missing = [part for part in parts if not getattr(sources, part)]
        try:
            if missing:
                raise KeyError(f"no results of: {', '.join(missing)}")
            figure(sources, folder / f"{figure.__name__}.png")
            said[figure.__name__] = "drawn"
        except KeyError as error:
            said[figure.__name__] = f"left out, {error.args[0]}"
    return said
