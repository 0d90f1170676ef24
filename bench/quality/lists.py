"""What RESULTS.md has besides tables: where peers win, figures, what ran where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quality.sources import Sources

FIGURES = Path(__file__).resolve().parent / "figures"
_OURS = "pariskv_core"
_NOT_PEERS = ("oracle", "full attention", "4-bit", _OURS)

# For each place on the page the best that is there.
_PLACES = (
    (("candidates", "Share by the keys that are reranked"),),
    (
        ("drift_written", "Share while the model writes"),
        ("drift_slow", "Recall and share in drift"),
    ),
    (("bits", "Bits per byte by rows"), ("mass", "Attention caught by rows")),
    (("one_by_one", "The paper's ideas one by one"),),
)


def _share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _best_peer(line: dict[str, Any], measure: str) -> tuple[str, float]:
    peers = {
        name: at[measure] for name, at in line.items() if at and not name.startswith(_NOT_PEERS)
    }
    best = max(peers, key=lambda name: peers[name])
    return best.replace("x", "×"), peers[best]


def peers_win(sources: Sources) -> str:
    """Every workload, budget and position at which somebody else's share is larger than ours."""
    cases: dict[str, dict[str, Any]] = {}
    if sources.synthetic:
        s = sources.synthetic
        for name, line in s["ingredients"].items():
            cases[f"synthetic keys, {name}"] = line
        for rows in s["budgets"]["oracle"]:
            line = {name: at[rows] for name, at in s["budgets"].items()}
            cases[f"synthetic keys, {s['size']['long'] // 1024}K, k = {int(rows):,}"] = line
        for kind, what in (("slow_drift", "slow drift"), ("switch", "switch")):
            for i, position in enumerate(s[kind]["positions"]):
                line = {name: curve[i] for name, curve in s[kind]["methods"].items()}
                cases[f"synthetic keys, {what}, at {position // 1024}K"] = line
    if sources.model:
        engine = sources.model["engine"]
        for rows in sources.model["settings"]["budgets"]:
            line = {name: by.get(str(rows)) for name, by in sources.model["methods"].items()}
            line = {name: at for name, at in line.items() if at and "share" in at}
            ours = engine.get(f"default, {rows} rows")
            if ours and any(not name.startswith(_NOT_PEERS) for name in line):
                cases[f"language model, k = {rows:,}"] = {**line, _OURS: ours}
    found = []
    for what, line in cases.items():
        ours = next(at["share"] for name, at in line.items() if name.startswith(_OURS))
        name, share = _best_peer(line, "share")
        if share > ours:
            found.append(f"- {what}: {name} {_share(share)}, ours {_share(ours)}\n")
    return "".join(found) or "- nowhere in these runs\n"


def figures(sources: Sources) -> str:
    """The figures of the page; the rest lies beside them."""
    shown = []
    for place in _PLACES:
        there = [(name, what) for name, what in place if (FIGURES / f"{name}.png").exists()]
        if there:
            name, what = there[0]
            shown.append(f"![{what}](figures/{name}.png)\n")
    return "\n".join(shown)


def measured_on(sources: Sources) -> str:
    """What ran where."""
    names = {
        "synthetic": "synthetic keys",
        "model": "language model",
        "times": "times of decode steps",
    }
    return "".join(f"- {names[part]}: {said}\n" for part, said in sources.where.items())
