"""What is found against what it takes: candidates and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quality.figures import (
    INK,
    counts,
    draw,
    look,
    measured,
    name_lines,
    per_cent,
    sheet,
    thousands,
)
from quality.sources import Sources

_TOP_K = "100"
_ASKED = {0.05: 0.95, 0.02: 0.90}  # share at so many candidates, on the real model


def _by_ratio(engine: dict[str, Any], setting: str) -> dict[float, dict[str, Any]]:
    """The engine's runs of one setting, by the share of the keys that was reranked."""
    runs = [run for name, run in engine.items() if name.startswith(f"{setting} at ")]
    return {run["candidate_share"]: run for run in runs}


def candidates(sources: Sources, path: Path) -> None:
    engine = sources.model["engine"]
    lines = {
        "pariskv_core": _by_ratio(engine, "default"),
        "published": _by_ratio(engine, "published"),
    }
    ceiling = sources.model["methods"]["4-bit estimates of all keys"][_TOP_K]
    length = thousands(sources.model["settings"]["prompt"])
    note = (
        f"A language model's heads, {length} of held-out source text; 100 rows."
        " Diamonds: what was asked."
    )
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
        for ratio, share in _ASKED.items():
            axes[1].plot(ratio, share, "D", ms=9, mfc="none", mec=INK, mew=1.3, zorder=6)
        ends = {name: list(line.values())[-1]["share"] for name, line in lines.items()}
        name_lines(axes[1], {**ends, "4-bit": ceiling["share"]})


def _budget_lines(sources: Sources) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by method and number of rows."""
    model = sources.model
    lines = {
        name: {int(rows): at for rows, at in found.items()}
        for name, found in model["methods"].items()
        if name not in ("full attention", "4-bit estimates of all keys")
    }
    for name, setting in (("pariskv_core", "default"), ("published 10%", "published")):
        runs = [at for run, at in model["engine"].items() if run.startswith(f"{setting}, ")]
        lines[name] = {at["top_k"]: at for at in sorted(runs, key=lambda at: at["top_k"])}
    return lines


def bits(sources: Sources, path: Path) -> None:
    runs = _budget_lines(sources)
    # By way of the best rows: peers had time for some of the prompts, which differ more.
    best = {rows: at["over_full"] for rows, at in runs["oracle"].items()}
    lines = {
        name: {
            rows: 100 * ((1 + at["over_oracle"]) * (1 + best[rows]) - 1)
            for rows, at in line.items()
        }
        for name, line in runs.items()
    }
    full = next(iter(sources.model["methods"]["full attention"].values()))["bits_per_byte"]
    settings = sources.model["settings"]
    note = (
        f"A language model, {thousands(settings['prompt'])} of held-out source text,"
        f" the {settings['steps']:,} bytes after it, each method in every layer."
        f"\nFull attention needs {full:.3f} bits per byte. The scale is linear up to 0.5 %."
    )
    with sheet(path, "What a model loses by seeing some rows alone", note, left=0.12) as (axis,):
        axis.axhline(0, color="black", lw=1.2)
        for name, line in lines.items():
            draw(axis, name, list(line), list(line.values()))
        axis.set_xscale("log")
        budgets = sorted(lines["oracle"])
        axis.set_xlim(budgets[0] * 0.95, budgets[-1] * 1.05)
        counts(axis.xaxis, budgets)
        axis.set_xlabel("rows fetched per kv head")
        axis.set_yscale("symlog", linthresh=0.5, linscale=0.8)
        values = [more for line in lines.values() for more in line.values()]
        places = [-0.5, -0.2, 0, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
        low = max(place for place in places if place <= max(min([0, *values]), -0.5))
        high = min(place for place in places if place >= min(max(values), 50))
        axis.set_ylim(low - 0.1, high)
        axis.set_yticks(places, [f"+{p:g} %" if p > 0 else f"{p:g} %" for p in places])
        axis.set_yticks([], minor=True)
        axis.set_ylim(low - 0.1, high)
        measured(axis, "bits per byte, over full attention")
        name_lines(axis, {name: list(line.values())[-1] for name, line in lines.items()})
