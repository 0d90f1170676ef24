"""The results that tables are made of, as files under bench/results hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pariskv_core.cli.weights import MODELS

RESULTS = Path(__file__).resolve().parents[1] / "results"
# Each part's file, and what the page calls it.
_FILES = {
    "synthetic": ("quality-cpu.json", "synthetic keys"),
    "structured": ("quality-structured-cpu.json", "keys with a structure"),
    "pretrained": ("quality-models-cpu.json", "keys of pretrained models"),
    "keys": (
        "quality-keys-cpu.json",
        "text that is written, long zones and policies on these keys",
    ),
    "inside": ("quality-inside-cpu.json", "inside pretrained models"),
    "predicted": ("quality-predicted-cpu.json", "predicted errors"),
}
WORST = ", worst step"  # after a method's name: its worst step, beside the mean or the median
Run = dict[str, Any]


@dataclass
class Sources:
    """Each part is empty where nobody has measured it yet."""

    synthetic: Run = field(default_factory=dict)  # experiment -> shares
    structured: Run = field(default_factory=dict)  # kind of keys -> errors
    pretrained: dict[str, Run] = field(default_factory=dict)  # by "model, text, tokens"
    keys: dict[str, dict[str, Run]] = field(default_factory=dict)  # part -> model -> run
    inside: dict[str, Run] = field(default_factory=dict)  # by "model, text, tokens"
    predicted: dict[str, Run] = field(default_factory=dict)  # "structured", or a model -> run
    where: dict[str, str] = field(default_factory=dict)  # part -> machine, commit

    def of(self, part: str) -> list[Run]:
        """Runs on captured keys, a model each."""
        return list(self.keys.get(part, {}).values())

    def reading(self, text: str = "documentation") -> list[Run]:
        """Runs inside models that have read this text."""
        return [run for key, run in self.inside.items() if key.split(", ")[1] == text]


def means(line: dict[str, float]) -> dict[str, float]:
    """Of a line by method, without the worst steps that stand beside."""
    return {name: at for name, at in line.items() if not name.endswith(WORST)}


def named(run: Run) -> str:
    """A model's name without that of its quantisation."""
    return str(run["model"]).rpartition(" ")[0].removesuffix("-Instruct")


def sized(run: Run) -> str:
    """A model's name, and how many tokens it has read."""
    return f"{named(run)}, {run['tokens']:,}"


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    assert isinstance(found, dict)
    return found


def results_of(part: str, folder: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = read((folder or RESULTS) / _FILES[part][0]).get("results", {})
    return found


def _in_order(runs: dict[str, Run]) -> dict[str, Run]:
    """Runs on pretrained models, in the models' order."""
    places = {name: i for i, name in enumerate(MODELS)}
    return dict(sorted(runs.items(), key=lambda run: places.get(run[0].split(", ")[0], 99)))


def load(folder: Path | None = None) -> Sources:
    """All that there is."""
    sources = Sources(
        results_of("synthetic", folder),
        results_of("structured", folder),
        _in_order(results_of("pretrained", folder)),
        {part: _in_order(runs) for part, runs in results_of("keys", folder).items()},
        _in_order(results_of("inside", folder)),
        _in_order(results_of("predicted", folder)),
    )
    for file, said in _FILES.values():
        record = read((folder or RESULTS) / file)
        if record:
            facts = record["environment"]
            commit = facts["commit"][:12]
            changes = " and changes" if facts["uncommitted_changes"] else ""
            sources.where[said] = f"{facts['cpu']}, {commit}{changes}"
    return sources
