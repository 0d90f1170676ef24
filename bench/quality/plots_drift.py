"""What is found while keys change: synthetic ones, and a model's own."""

from __future__ import annotations

from pathlib import Path

from quality.figures import (
    SHARE,
    SHARES,
    counts,
    draw,
    measured,
    name_lines,
    per_cent,
    sheet,
    thousands,
)
from quality.sources import Sources

# --- Drift ---------------------------------------------------------------------------------------

_WHILE_DRIFTING = (
    "pariskv_core 10%, blocks",
    "published 10%",
    "PQCache 16x8",
    "PQCache 16x8, refreshed",
    "MagicPIG",
    "Quest",
    "SnapKV",
)


def _synthetic_drift(sources: Sources, path: Path, kind: str, title: str) -> None:
    found, size = sources.synthetic[kind], sources.synthetic["size"]
    at = [position / 1024 for position in found["positions"]]
    how = "move all the while" if kind == "slow_drift" else "change half way"
    note = (
        f"Synthetic keys that {how}; prompt of {thousands(size['prompt'])},"
        f" then {thousands(size['decoded'])} decoded."
        "\n100 rows of the zone; ours and the published setting rerank 10 % of it."
    )
    with sheet(path, title, note, panels=2, gap=0.14) as axes:
        for axis, measure, what in (
            (axes[0], "recall", "of the best 100 rows"),
            (axes[1], "share", "of their attention"),
        ):
            for name in _WHILE_DRIFTING:
                draw(
                    axis,
                    name,
                    at,
                    found[measure][name],
                    markersize=0,
                )
            measured(axis, what)
            axis.set_xlim(at[0], at[-1])
            axis.set_xticks([at[0], (at[0] + at[-1]) / 2, at[-1]])
            axis.set_ylim(0, 1)
            per_cent(axis.yaxis, SHARES)
            axis.set_xlabel("position, K tokens")
        axes[1].tick_params(labelleft=False)
        ends = {name: found["share"][name][-1] for name in _WHILE_DRIFTING}
        name_lines(axes[1], ends, gap=0.09)


def drift_slow(sources: Sources, path: Path) -> None:
    _synthetic_drift(sources, path, "slow_drift", "What is found while keys drift slowly")


def drift_switch(sources: Sources, path: Path) -> None:
    _synthetic_drift(sources, path, "switch", "What is found when keys change at once")


def drift_written(sources: Sources, path: Path) -> None:
    curves, settings = sources.model["drift"], sources.model["settings"]
    reranked = sources.model["engine"]["default, 100 rows"]["candidate_share"]
    note = (
        f"{settings['writers']} prompts of {thousands(settings['prompt'])} held-out source text,"
        " written on with ours in every layer."
        f"\n100 rows; ours reranks {100 * reranked:.0f} % of the keys."
        " k-means is learnt from the prompt."
    )
    lines = {name: line for name, line in curves["share"].items() if name != "oracle"}
    with sheet(path, "While a language model writes", note) as (axis,):
        for name, line in lines.items():
            draw(axis, name, curves["tokens"], line, markersize=0)
        last = curves["tokens"][-1]
        axis.set_xlim(0, last)
        axis.set_ylim(0, 1)
        per_cent(axis.yaxis, SHARES)
        counts(axis.xaxis, [last * i // 4 for i in range(5)])
        axis.set_xlabel("tokens generated")
        measured(axis, SHARE)
        name_lines(axis, {name: line[-1] for name, line in lines.items()})
