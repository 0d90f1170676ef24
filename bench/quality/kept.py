"""What a results file keeps of a run: what tables, figures and notes read, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MEASURES = ("share", "worst_head", "recall", "output_error")


def _one(line: dict[str, dict[str, Any]], measure: str) -> dict[str, Any]:
    """One measure of each column."""
    return {column: at[measure] for column, at in line.items()}


def _grid(found: dict[str, Any]) -> dict[str, Any]:
    return {row: _one(line, "share") for row, line in found.items()}


def _size(found: dict[str, Any]) -> dict[str, Any]:
    names = ("tokens", "long", "prompt", "decoded", "seeds", "steps")
    return {name: found[name] for name in names}


def _drift(found: dict[str, Any]) -> dict[str, Any]:
    curves: dict[str, Any] = {"positions": found["positions"]}
    for measure in ("recall", "share"):
        curves[measure] = {
            name: [at[measure] for at in points] for name, points in found["methods"].items()
        }
    return curves


def _switched_on(found: dict[str, Any]) -> dict[str, Any]:
    """Recall before and after."""
    return {
        kind: {name: [at["recall"] for at in ends] for name, ends in stages.items()}
        for kind, stages in found.items()
    }


def _alpha(found: dict[str, Any]) -> dict[str, Any]:
    """Of all keys, where nothing but the estimate decides."""
    return {
        on: {name: line["1.0"][name] for name in ("recall", "logit_error")}
        for on, line in found.items()
    }


def _design_space(found: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("part", "codebook", "radii", "bits_per_key", "recall", "share")
    return [{name: row[name] for name in names} for row in found["rows"]]


def _tiers(found: dict[str, Any]) -> dict[str, Any]:
    """Out of a tenth of the keys."""
    return {
        count: {name: line["0.1"][name] for name in ("recall", "tied")}
        for count, line in found.items()
    }


def _lengths(found: dict[str, Any]) -> dict[str, Any]:
    return {
        measure: {score: _one(line, measure) for score, line in found.items()}
        for measure in ("recall_at_.1", "needed_mass")
    }


SYNTHETIC: dict[str, Callable[[Any], Any]] = {
    "size": _size,
    "workload": dict,
    "ingredients": _grid,
    "slow_drift": _drift,
    "switch": _drift,
    "switched_on": _switched_on,
    "alpha": _alpha,
    "design_space": _design_space,
    "tiers": _tiers,
    "lengths": _lengths,
    "budgets": _grid,
}


def of_synthetic(results: dict[str, Any]) -> dict[str, Any]:
    """Of the experiments that were done."""
    return {name: keep(results[name]) for name, keep in SYNTHETIC.items() if name in results}


def _run(found: dict[str, Any], costs: dict[str, Any]) -> dict[str, Any]:
    """One method or setting at one budget; over_…: by how much it needs more bits than that."""
    names = ("top_k", "candidate_share", "prompts", "bits_per_byte", *_MEASURES)
    kept = {name: found[name] for name in names if name in found}
    for whom, cost in costs.items():
        name = f"over_{whom.split()[0]}"
        kept |= {name: cost["more"], f"{name}_error": cost["error"]}
    return kept


def of_model(results: dict[str, Any]) -> dict[str, Any]:
    """Of what quality.lm has written; a section that failed or had no time is left out."""
    names = ("prompts", "prompt", "steps", "writers", "written", "seconds")
    over, curves = results.get("over", {}), results.get("drift", {})
    return {
        "settings": {name: results["settings"][name] for name in names},
        "machine": results["machine"],
        "failed": list(results["errors"]),
        "methods": {
            name: {rows: _run(at, over.get(f"{name}, {rows}", {})) for rows, at in by_rows.items()}
            for name, by_rows in results["methods"].items()
        },
        "engine": {
            name: _run(at, over.get(f"engine, {name}", {}))
            for name, at in results["engine"].items()
        },
        "drift": {
            "tokens": next(iter(curves.values()), {"tokens": []})["tokens"],
            "share": _one(curves, "share"),
            "ends": {
                name: {part: curve[part] for part in ("share_first", "share_last", "lost")}
                for name, curve in curves.items()
            },
        },
    }


def of_training(results: dict[str, Any]) -> dict[str, Any]:
    """Of what quality.train has written."""
    names = ("steps", "tokens", "training_bytes", "machine", "bits_per_byte")
    return {name: results[name] for name in names}
