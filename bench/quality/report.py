"""The results as tables in a terminal."""

from __future__ import annotations

from typing import Any

import harness

_HEADS = {
    "pariskv_core": "ours",
    "StreamingLLM": "Stream\ning",
    "PQCache": "PQ\nCache",
    "MagicPIG": "Magic\nPIG",
    "refreshed": "re-\nfresh",
    "published": "publ.",
}
_NOTE = "share: attention caught over what the best rows would catch; 100 rows unless it says else."


def _grid(title: str, table: dict[str, dict[str, dict[str, float]]], measure: str) -> None:
    """A table of one measure: rows by columns."""
    # The oracle's share is one by definition.
    columns = [name for name in next(iter(table.values())) if name != "oracle"]
    rows = [
        [name, *(f"{line[column][measure]:.2f}".lstrip("0") for column in columns)]
        for name, line in table.items()
    ]
    harness.show(f"{title}: {measure.replace('_', ' ')}", ["", *map(_narrow, columns)], rows, _NOTE)


def _narrow(column: str) -> str:
    for name, short in _HEADS.items():
        column = column.replace(name, short)
    return column.replace(", ", "\n").replace(" ", "\n")


def _lines(title: str, lines: list[dict[str, Any]], columns: list[str]) -> None:
    def text(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    rows = [[text(line[column]) for column in columns] for line in lines]
    harness.show(title, [column.replace("_", "\n") for column in columns], rows, "")


def _curves(title: str, found: dict[str, Any], measure: str) -> None:
    table = {
        name: {f"{p // 1024}K": at for p, at in zip(found["positions"], points, strict=True)}
        for name, points in found["methods"].items()
    }
    _grid(title, table, measure)


def pretrained(run: dict[str, Any]) -> None:
    """One model's shares."""
    lines = [{"reranked": name, **numbers} for name, numbers in run["methods"].items()]
    _lines(f"{run['model']}, {run['tokens']:,} tokens", lines, list(lines[0]))


def show(results: dict[str, Any]) -> None:
    """All that there is in them."""
    if "ingredients" in results:
        for measure in ("share", "recall"):
            _grid("Workloads by methods", results["ingredients"], measure)
    for name, title in (("slow_drift", "Slow drift"), ("switch", "Abrupt switch")):
        if name in results:
            for measure in ("recall", "share"):
                _curves(f"{title}, by position", results[name], measure)
    if "switched_on" in results:
        lines = [
            {
                "keys": keys,
                "coarse stage": name,
                "coarse_before": before["coarse_recall"],
                "coarse_after": after["coarse_recall"],
                "final_before": before["recall"],
                "final_after": after["recall"],
            }
            for keys, stages in results["switched_on"].items()
            for name, (before, after) in stages.items()
        ]
        _lines("Recall before and after a slow drift", lines, list(lines[0]))
    for name, title in (
        ("alpha", "alpha-correction, by candidates"),
        ("tiers", "Tiers, by candidates"),
        ("budgets", "Rows fetched"),
        ("candidates", "Candidates"),
    ):
        if name in results:
            for measure in ("share", "recall"):
                _grid(title, results[name], measure)
    if "alpha" in results:
        _grid("alpha-correction", results["alpha"], "logit_error")
    if "tiers" in results:
        _grid("Tiers", results["tiers"], "tied")
    if "design_space" in results:
        lines = results["design_space"]["rows"]
        columns = ["part", "codebook", "radii", "bits_per_key", "recall", "share"]
        _lines("Subspaces and codebooks", lines, columns)
    if "lengths" in results:
        lines = [
            {"coarse score": name, "tokens": tokens, **numbers}
            for name, line in results["lengths"].items()
            for tokens, numbers in line.items()
        ]
        _lines("Candidates needed, by length", lines, list(lines[0]))
