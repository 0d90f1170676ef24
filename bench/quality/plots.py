"""The figures, each of what there are results for: python -m quality plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quality import lists
from quality.figures import (
    SHARE,
    SHARES,
    counts,
    draw,
    measured,
    name_lines,
    per_cent,
    ranges,
    sheet,
    thousands,
)
from quality.plots_budget import bits, candidates, front, mass
from quality.plots_drift import drift_slow, drift_switch, drift_written
from quality.sources import Sources

_TOP_K = "100"

# --- The paper's ---------------------------------------------------------------------------------

_SCORES = ("sign × norm, now", "sign × norm, first", "votes", "votes, mean query")


def lengths(sources: Sources, path: Path) -> None:
    found = {name: sources.synthetic["lengths"][name] for name in _SCORES}
    note = (
        "Synthetic keys. Candidates, best coarse score first, until they hold 95 % of the"
        "\nattention that the best 100 rows catch."
    )
    with sheet(path, "Longer contexts need a smaller share", note, right=0.69) as (axis,):
        for name, line in found.items():
            draw(axis, name, [int(n) for n in line], [at["needed_mass"] for at in line.values()])
        tokens = [int(n) for n in found[_SCORES[0]]]
        axis.set_xscale("log")
        axis.set_xlim(tokens[0] * 0.95, tokens[-1] * 1.05)
        axis.set_ylim(0, None)
        counts(axis.xaxis, tokens)
        top = axis.get_ylim()[1]
        per_cent(axis.yaxis, [place / 10 for place in range(11) if place / 10 <= top])
        axis.set_xlabel("tokens")
        measured(axis, "of all keys, candidates needed")
        name_lines(
            axis, {name: list(line.values())[-1]["needed_mass"] for name, line in found.items()}
        )


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
            ranges(
                axis, [(name, *(at["recall"] for at in found)) for name, found in stages.items()]
            )
            measured(axis, kind.replace(", ", ",\n"))
            axis.set_xlim(0, 1)
            axis.set_xticks((0, 0.5, 1), ("0", "50 %", "100"))
            axis.tick_params(labelleft=axis is axes[0])


def worst_head(sources: Sources, path: Path) -> None:
    if sources.model:
        engine = sources.model["engine"]
        found = {
            name: rows[_TOP_K] for name, rows in sources.model["methods"].items() if _TOP_K in rows
        }
        found["pariskv_core"] = engine["default, 100 rows"]
        found["published 10%"] = engine["published, 100 rows"]
        heads = len(found["pariskv_core"]["share_by_head"])
        length = thousands(sources.model["settings"]["prompt"])
        note = (
            f"A language model, {length} of held-out source text; 100 rows."
            f"\n● the mean of {heads} kv heads, ○ the query head of all that fares worst."
        )
    else:
        found = sources.synthetic["ingredients"]["all of it"]
        length = thousands(sources.synthetic["size"]["tokens"])
        note = (
            f"Synthetic keys, a prompt of {length}; 100 rows."
            "\n● the mean over a group of 4 heads, ○ the head of it that fares worst."
        )
    rows = [
        (name, at["worst_head"], at["share"])
        for name, at in sorted(found.items(), key=lambda item: -item[1].get("share", 0))
        if name not in ("oracle", "mean pages", "full attention")
    ]
    with sheet(path, "No head left behind?", note, left=0.27, right=0.95) as (axis,):
        ranges(axis, rows)
        axis.set_xlim(-0.01, 1)
        per_cent(axis.xaxis, SHARES)
        measured(axis, SHARE)


# What each is made of; one without its results is left out.
FIGURES: dict[Callable[[Sources, Path], None], tuple[str, ...]] = {
    drift_slow: ("synthetic",),
    drift_switch: ("synthetic",),
    drift_written: ("model",),
    candidates: (),
    mass: (),
    bits: ("model",),
    lengths: ("synthetic",),
    one_by_one: ("synthetic",),
    worst_head: (),
    front: ("model", "times"),
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
