"""The results that figures and tables are made of, as files under bench/results hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pariskv_core.cli.weights import MODELS

from quality import kept

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass
class Sources:
    """Each part is empty where nobody has measured it yet."""

    synthetic: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    pretrained: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)  # part -> model -> what was measured
    where: dict[str, str] = field(default_factory=dict)  # part -> machine, commit


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    assert isinstance(found, dict)
    return found


def _said(record: dict[str, Any]) -> str:
    facts = record["environment"]
    commit = facts["commit"][:12] + (" and changes" if facts["uncommitted_changes"] else "")
    return f"{facts.get('gpu', facts['cpu'])}, {commit}"


def _in_order(runs: dict[str, Any]) -> dict[str, Any]:
    """Runs on pretrained models, "name, text, tokens", in the models' order."""
    names = list(MODELS)
    known = {name: i for i, name in enumerate(names)}
    return dict(sorted(runs.items(), key=lambda run: known.get(run[0].split(", ")[0], len(names))))


def load(synthetic: str | None = None, lm: Path | None = None, results: Path = RESULTS) -> Sources:
    """All that there is.

    synthetic  "cpu" or "gpu": whose workloads; left out, the GPU's, which are larger, if there are
    lm         a file of quality.lm's, instead of the evaluation that the GPU's run has kept
    """
    records = {on: read(results / f"quality-{on}.json") for on in ("cpu", "gpu")}
    sources = Sources()
    for on in [synthetic] if synthetic else ["gpu", "cpu"]:
        found = records[on].get("results", {})
        # Of a run that was cut short nothing is shown.
        if not sources.synthetic and all(part in found for part in kept.SYNTHETIC):
            sources.synthetic = found
            sources.where["synthetic"] = _said(records[on])
    sources.model = (
        kept.of_model(read(lm)) if lm else records["gpu"].get("results", {}).get("model", {})
    )
    if sources.model:
        sources.where["model"] = sources.model["machine"] if lm else _said(records["gpu"])
    for part, name in (("pretrained", "models"), ("inside", "inside")):
        record = read(results / f"quality-{name}-cpu.json")
        setattr(sources, part, _in_order(record.get("results", {})))
        if record:
            sources.where[part] = _said(record)
    record = read(results / "quality-keys-cpu.json")
    sources.keys = {part: _in_order(runs) for part, runs in record.get("results", {}).items()}
    if record:
        sources.where["keys"] = _said(record)
    return sources
