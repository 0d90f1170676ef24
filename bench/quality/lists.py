"""What RESULTS.md has besides tables: where peers win, figures, what ran where."""

from __future__ import annotations

from pathlib import Path

from quality.sources import Sources

FIGURES = Path(__file__).resolve().parent / "figures"
_OURS = "pariskv_core"
_NOT_PEERS = ("oracle", "full attention", "4-bit", _OURS)

_SHOWN = {
    "candidates": "Share by the keys that are reranked",
    "drift_written": "Share while the model writes",
    "bits": "Bits per byte by rows",
    "one_by_one": "The paper's ideas one by one",
}


def _share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _best_peer(line: dict[str, float]) -> tuple[str, float]:
    peers = {name: share for name, share in line.items() if not name.startswith(_NOT_PEERS)}
    best = max(peers, key=lambda name: peers[name])
    return best.replace("x", "×"), peers[best]


def peers_win(sources: Sources) -> str:
    """Every workload, budget and position at which somebody else's share is larger than ours."""
    cases: dict[str, dict[str, float]] = {}  # shares by method
    if sources.synthetic:
        s = sources.synthetic
        for name, line in s["ingredients"].items():
            cases[f"synthetic keys, {name}"] = line
        for rows in s["budgets"]["oracle"]:
            line = {name: at[rows] for name, at in s["budgets"].items()}
            cases[f"synthetic keys, {s['size']['long'] // 1024}K, k = {int(rows):,}"] = line
        for kind, what in (("slow_drift", "slow drift"), ("switch", "switch")):
            for i, position in enumerate(s[kind]["positions"]):
                line = {name: curve[i] for name, curve in s[kind]["share"].items()}
                cases[f"synthetic keys, {what}, at {position // 1024}K"] = line
    if sources.model:
        methods, engine = sources.model["methods"], sources.model["engine"]
        for rows in methods["oracle"]:
            runs = {name: by.get(rows, {}) for name, by in methods.items()}
            runs[_OURS] = engine.get(f"default, {rows} rows", {})
            line = {name: at["share"] for name, at in runs.items() if "share" in at}
            if _OURS in line and any(not name.startswith(_NOT_PEERS) for name in line):
                cases[f"language model, k = {int(rows):,}"] = line
    found = []
    for what, line in cases.items():
        ours = max(share for name, share in line.items() if name.startswith(_OURS))
        name, share = _best_peer(line)
        if share > ours:
            found.append(f"- {what}: {name} {_share(share)}, ours {_share(ours)}\n")
    return "".join(found) or "- nowhere in these runs\n"


def figures(sources: Sources) -> str:
    """The figures of the page that are there; others are linked where they are spoken of."""
    there = [(name, what) for name, what in _SHOWN.items() if (FIGURES / f"{name}.png").exists()]
    return "\n".join(f"![{what}](figures/{name}.png)\n" for name, what in there)


def measured_on(sources: Sources) -> str:
    """What ran where."""
    names = {
        "synthetic": "synthetic keys",
        "model": "language model",
        "pretrained": "keys of pretrained models",
        "inside": "inside pretrained models",
        "keys": "drift, lengths and policies on these keys",
    }
    return "".join(f"- {names[part]}: {said}\n" for part, said in sources.where.items())
