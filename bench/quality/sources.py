"""The results that plots and tables are made of, as files under bench/results hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, mode
from typing import Any

# Of a run that was cut short nothing is shown.
_SYNTHETIC = (
    "ingredients slow_drift switch switched_on alpha design_space tiers lengths budgets candidates"
).split()
RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Timed:
    """A decode step as bench_cuda.py measured it, one layer of 8 kv heads."""

    settings: dict[str, Any]  # of the config, where they are not the defaults
    tokens: int
    candidates: float  # share of the tokens
    microseconds: float
    dense: float | None  # torch's best way to attend to everything


@dataclass
class Sources:
    """Each part is empty where nobody has measured it yet."""

    synthetic: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)  # what quality.lm writes
    training: dict[str, Any] = field(default_factory=dict)  # what quality.train writes
    times: list[Timed] = field(default_factory=list)
    where: dict[str, str] = field(default_factory=dict)  # part -> machine, commit


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    assert isinstance(found, dict)
    return found


def _said(record: dict[str, Any]) -> str:
    facts = record["environment"]
    commit = facts["commit"][:12] + (" and changes" if facts["uncommitted_changes"] else "")
    return f"{facts.get('gpu', facts['cpu'])}, {commit}"


def timed(records: Iterable[dict[str, Any]]) -> list[Timed]:
    """Decode steps of batch 1 out of any number of bench_cuda.py's files.

    Such a file is of one setting (`--set NAME=VALUE --name FILE`), so a front is some files.
    """
    return [
        Timed(
            record["results"]["settings"],
            row["tokens"],
            row["candidates_per_head"] / row["tokens"],
            median(row["microseconds"]),
            min((median(taken) for taken in row.get("dense", {}).values()), default=None),
        )
        for record in records
        for row in record["results"].get("decode", [])
        if row["batch"] == 1
    ]


def _of_one_tree(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the commit that most are of: a front of several trees would show their distance."""
    usual = mode(map(_said, records)) if records else ""
    return [record for record in records if _said(record) == usual]


def load(synthetic: str | None = None, lm: Path | None = None) -> Sources:
    """All that there is.

    synthetic  "cpu" or "gpu": whose workloads; left out, the GPU's, which are larger, if there are
    lm         a file of quality.lm's, instead of the evaluation that the GPU's run has kept
    """
    records = {on: read(RESULTS / f"quality-{on}.json") for on in ("cpu", "gpu")}
    sources = Sources()
    for on in [synthetic] if synthetic else ["gpu", "cpu"]:
        results = records[on].get("results", {})
        if not sources.synthetic and all(part in results for part in _SYNTHETIC):
            sources.synthetic = results
            sources.where["synthetic"] = _said(records[on])
    kept = records["gpu"].get("results", {})
    sources.training = kept.get("training", {})
    sources.model = read(lm) if lm else kept.get("model", {})
    if sources.model:
        sources.where["model"] = sources.model["machine"] if lm else _said(records["gpu"])
    times = _of_one_tree([read(path) for path in sorted(RESULTS.glob("cuda*.json"))])
    sources.times = timed(times)
    if times:
        sources.where["times"] = _said(times[0])
    return sources
