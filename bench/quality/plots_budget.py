"""What is found against what it takes: candidates, rows, time."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from quality.figures import (
    INK,
    QUIET,
    SHARE,
    counts,
    draw,
    look,
    measured,
    name_lines,
    per_cent,
    sheet,
    thousands,
)
from quality.sources import Sources, Timed

_TOP_K = "100"
_ASKED = {0.05: 0.95, 0.02: 0.90}  # share at so many candidates, on the real model

# --- Candidates and budgets ----------------------------------------------------------------------


def _by_ratio(engine: dict[str, Any], setting: str) -> dict[float, dict[str, Any]]:
    """The engine's runs of one setting at given candidate ratios."""
    return {
        kept["changes"]["schedule"][0][1]: kept
        for name, kept in engine.items()
        if name.startswith(f"{setting} at ")
    }


def _candidate_lines(
    sources: Sources,
) -> tuple[dict[str, dict[float, dict[str, Any]]], dict[str, Any], str]:
    """By setting and share of the keys, what estimates of all keys reach, and what of."""
    if not sources.model:
        found = sources.synthetic["candidates"]
        lines = {
            name: {float(ratio): at for ratio, at in line.items() if ratio != "1.0"}
            for name, line in found.items()
        }
        length = thousands(sources.synthetic["size"]["long"])
        return lines, found["pariskv_core"]["1.0"], f"Synthetic keys, a prompt of {length}"
    engine = sources.model["engine"]
    settings = (
        ("pariskv_core", _by_ratio(engine, "default")),
        ("published", _by_ratio(engine, "published")),
    )
    lines = {name: {kept["candidate_share"]: kept for kept in by.values()} for name, by in settings}
    length = thousands(sources.model["settings"]["prompt"])
    note = f"A language model's heads, {length} of held-out source text"
    return lines, sources.model["methods"]["4-bit estimates of all keys"][_TOP_K], note


def candidates(sources: Sources, path: Path) -> None:
    lines, ceiling, what = _candidate_lines(sources)
    note = f"{what}; 100 rows."
    if sources.model:
        note += " Diamonds: what was asked."
    with sheet(path, "How many keys need a closer look?", note, panels=2, gap=0.14) as axes:
        for axis, measure, words in (
            (axes[0], "recall", "of the best 100 rows"),
            (axes[1], "share", "of their attention"),
        ):
            for name, line in lines.items():
                draw(axis, name, list(line), [at[measure] for at in line.values()])
            axis.axhline(ceiling[measure], **{**look("4-bit").line(), "linewidth": 1.4})
            axis.set_xscale("log")
            axis.set_xlim(0.0095, 0.52)
            axis.set_ylim(0, 1.02)
            per_cent(axis.yaxis, [place / 5 for place in range(6)])
            per_cent(axis.xaxis, (0.01, 0.05, 0.2))
            axis.set_xlabel("keys that are reranked")
            measured(axis, words)
        axes[1].tick_params(labelleft=False)
        if sources.model:
            for ratio, share in _ASKED.items():
                axes[1].plot(ratio, share, "D", ms=9, mfc="none", mec=INK, mew=1.3, zorder=6)
        ends = {name: list(line.values())[-1]["share"] for name, line in lines.items()}
        name_lines(axes[1], {**ends, "4-bit": ceiling["share"]})


def _budget_lines(sources: Sources) -> tuple[dict[str, dict[int, dict[str, Any]]], str]:
    """By method and number of rows, and what of."""
    if not sources.model:
        size = thousands(sources.synthetic["size"]["long"])
        found = sources.synthetic["budgets"]
        lines = {
            name: {int(rows): at for rows, at in found[name].items()}
            for name in found
            if name not in ("mean pages", "PQCache 2x6")
        }
        return lines, f"Synthetic keys, a prompt of {size}"
    model = sources.model
    lines = {
        name: {int(rows): {**at, "name": f"{name}, {rows}"} for rows, at in found.items()}
        for name, found in model["methods"].items()
        if name not in ("full attention", "4-bit estimates of all keys")
    }
    for name, setting in (("pariskv_core", "default"), ("published 10%", "published")):
        runs = {
            at["top_k"]: {**at, "name": f"engine, {run}"}
            for run, at in model["engine"].items()
            if run.startswith(f"{setting}, ")
        }
        lines[name] = dict(sorted(runs.items()))
    # Every method has written its own queries by the last layer: masses of one forward pass are
    # no measure for those of another, shares of the best rows' are.
    best = {rows: at["mass"] for rows, at in lines["oracle"].items()}
    for line in lines.values():
        for rows, at in line.items():
            at["mass"] = at["share"] * best[rows]
    return (
        lines,
        f"A language model, {thousands(model['settings']['prompt'])} of held-out source text",
    )


def mass(sources: Sources, path: Path) -> None:
    lines, what = _budget_lines(sources)
    note = f"{what}; four sinks and 256 recent tokens come on top."
    with sheet(path, "Attention that is caught, by rows fetched", note) as (axis,):
        _against_rows(axis, lines, "mass", 1)
        axis.set_ylim(0, None)
        top = axis.get_ylim()[1]
        per_cent(axis.yaxis, [place / 10 for place in range(11) if place / 10 <= top])
        measured(axis, "of all attention")
        name_lines(axis, {name: list(line.values())[-1]["mass"] for name, line in lines.items()})


def _against_rows(
    axis: Axes, lines: dict[str, dict[int, dict[str, Any]]], measure: str, times: float
) -> None:
    for name, line in lines.items():
        draw(axis, name, list(line), [times * at[measure] for at in line.values()])
    axis.set_xscale("log")
    budgets = sorted(next(iter(lines.values())))
    axis.set_xlim(budgets[0] * 0.95, budgets[-1] * 1.05)
    counts(axis.xaxis, budgets)
    axis.set_xlabel("rows fetched per kv head")


def bits(sources: Sources, path: Path) -> None:
    lines, what = _budget_lines(sources)
    over = sources.model["over"]
    full = next(iter(sources.model["methods"]["full attention"].values()))["bits_per_byte"]
    for line in lines.values():
        for rows, at in line.items():
            # By way of the best rows: peers had time for some of the prompts, which differ more.
            best = over[f"oracle, {rows}"]["full attention"]["more"]
            at["more"] = (1 + over[at["name"]]["oracle"]["more"]) * (1 + best) - 1
    steps = sources.model["settings"]["steps"]
    note = (
        f"{what}, the {steps:,} bytes after it, each method in every layer."
        f"\nFull attention needs {full:.3f} bits per byte. The scale is linear up to 0.5 %."
    )
    with sheet(path, "What a model loses by seeing some rows alone", note, left=0.12) as (axis,):
        axis.axhline(0, color="black", lw=1.2)
        _against_rows(axis, lines, "more", 100)
        axis.set_yscale("symlog", linthresh=0.5, linscale=0.8)
        values = [100 * at["more"] for line in lines.values() for at in line.values()]
        places = [-0.5, -0.2, 0, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
        low = max(place for place in places if place <= max(min([0, *values]), -0.5))
        high = min(place for place in places if place >= min(max(values), 50))
        axis.set_ylim(low - 0.1, high)
        axis.set_yticks(places, [f"+{p:g} %" if p > 0 else f"{p:g} %" for p in places])
        axis.set_yticks([], minor=True)
        axis.set_ylim(low - 0.1, high)
        measured(axis, "bits per byte, over full attention")
        ends = {name: 100 * list(line.values())[-1]["more"] for name, line in lines.items()}
        name_lines(axis, ends)


# --- Speed ---------------------------------------------------------------------------------------


def _quality_of(at: Timed, model: dict[str, Any]) -> float | None:
    """The share that the engine reached on the model with the settings that were timed."""
    wanted = {name: at.settings.get(name) for name in ("scorer", "group_rule")}
    near = [
        (abs(kept["candidate_share"] / at.candidates - 1), kept["share"])
        for kept in model["engine"].values()
        if {name: kept["changes"].get(name) for name in wanted} == wanted
        and kept["top_k"] == at.settings.get("top_k", 100)
    ]
    off, share = min(near, default=(1.0, 0.0))
    return share if off < 0.1 else None


# Behind a label: lines do not run through it.
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def front(sources: Sources, path: Path) -> None:
    tokens = sources.model["settings"]["prompt"]
    points: dict[str, list[tuple[float, float, float]]] = {}
    runs: list[float] = []  # torch's own, in each of them
    for at in sources.times:
        share = _quality_of(at, sources.model)
        if at.tokens == tokens and share is not None:
            name = "published" if at.settings.get("scorer") == "votes" else "pariskv_core"
            points.setdefault(name, []).append((at.microseconds, share, at.candidates))
            runs += [at.dense] if at.dense else []
    dense = median(runs) if runs else None
    if not points:
        raise KeyError("no times at this length")
    note = (
        f"Time: a step of one layer, 32 query heads, 8 kv heads, {thousands(tokens)} tokens,"
        f" batch 1; {sources.where['times'].split(',')[0]}."
        "\nShare: a language model's heads with as many tokens."
        " Beside the points: keys that are reranked."
    )
    with sheet(path, "Speed against quality", note, right=0.95) as (axis,):
        every = [point for line in points.values() for point in line]
        times = [point[0] for point in every] + ([dense] if dense else [])
        fastest, slowest = min(times), max(times)
        for name, line in points.items():
            line.sort()
            draw(axis, name, [p[0] for p in line], [p[1] for p in line])
            for i, (time, share, ratio) in enumerate(line):
                # Beside a close neighbour's label there is no room.
                close = (
                    i > 0
                    and time - line[i - 1][0] < 0.1 * (slowest - fastest)
                    and share - line[i - 1][1] < 0.04
                )
                axis.annotate(
                    f"{100 * ratio:.0f} %",
                    (time, share),
                    (9, -14) if close else (-9, 4),
                    textcoords="offset points",
                    ha="left" if close else "right",
                    size=10,
                    color=look(name).color,
                    bbox=_PAPER,
                )
            axis.annotate(
                look(name).label,
                line[-1][:2],
                (12, -4),
                textcoords="offset points",
                ha="left",
                weight="bold" if look(name).ours else "normal",
                color=look(name).color,
            )
        room = max(0.25 * (slowest - fastest), 5)
        axis.set_xlim(max(0, fastest - room), slowest + room)
        low = min(p[1] for p in every) - 0.06
        axis.set_ylim(low, 1.02)
        if dense:
            axis.axvline(dense, color="black", lw=1.4, ls="--")
            axis.annotate(
                f"dense, by torch: {dense:.0f} µs",
                (dense, (low + 1) / 2),
                (6, 0),
                textcoords="offset points",
                size=9.5,
                color=QUIET,
            )
        per_cent(axis.yaxis, [p / 20 for p in range(21) if low <= p / 20 <= 1])
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_xlabel("µs per decode step")
        measured(axis, SHARE)
