"""The tables of RESULTS.md, as markdown from the results: python -m quality tables [--write]."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quality import lists, tables_claims, tables_keys, tables_pretrained
from quality.markdown import share, table, verdict
from quality.sources import Sources

PAGE = Path(__file__).resolve().parent / "RESULTS.md"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
_NOT_YET = "*Not measured yet: `make quality-gpu`.*"
_NO_MODELS = "*Not measured yet: `make quality-models`.*"
_WHOM = {"oracle": "the best rows", "full": "full attention"}
_SYNTHETIC = (
    "pariskv_core 5%, blocks",
    "pariskv_core 5%",
    "published 10%",
    "PQCache 16x8",
    "MagicPIG",
    "Quest",
    "SnapKV",
)


def more(run: dict[str, float], whom: str) -> str:
    """How many more bits than that a run needs, with the error: +0.12 ± 0.03 %."""
    return f"{100 * run[f'over_{whom}']:+.2f} ± {100 * run[f'over_{whom}_error']:.2f} %"


def _display(name: str) -> str:
    return re.sub(r" (\d+)%", r", \1 %", name.replace("x", "×") if "PQ" in name else name)


# --- The real model ------------------------------------------------------------------------------


def _asked_shares(engine: dict[str, Any]) -> list[list[str]]:
    rows = []
    for ratio, asked in ((0.1, None), (0.05, 0.95), (0.02, 0.9)):
        found = [engine.get(f"{setting} at {ratio:g}") for setting in ("default", "published")]
        ours, theirs = (share(at["share"]) if at else "–" for at in found)
        met = verdict(found[0]["share"] >= asked) if asked and found[0] else ""
        least = f"≥ {share(asked)}" if asked else ""
        rows.append([f"share, {100 * ratio:g} % of the keys reranked", least, ours, theirs, met])
    return rows


def _asked_bits(engine: dict[str, Any]) -> list[list[str]]:
    rows = []
    for rows_fetched, run, whom, most in (
        (100, " at 0.1", "oracle", 0.0015),
        (100, " at 0.05", "oracle", 0.0015),
        (256, ", 256 rows", "oracle", 0.0005),
        (1024, ", 1024 rows", "oracle", 0.0005),
        (2048, ", 2048 rows", "oracle", 0.0005),
        (2048, ", 2048 rows", "full", 0.005),
    ):
        found = [engine.get(f"{setting}{run}", {}) for setting in ("default", "published")]
        ours, theirs = (more(at, whom) if f"over_{whom}" in at else "–" for at in found)
        met = verdict(found[0][f"over_{whom}"] <= most) if ours != "–" else ""
        what = f"bits per byte over {_WHOM[whom]}, k = {rows_fetched:,}"
        if run.startswith(" at "):
            what += f", {100 * float(run[4:]):g} % reranked"
        rows.append([what, f"≤ {100 * most:+.2f} %", ours, theirs, met])
    return rows


def targets(sources: Sources) -> str:
    """What was asked of the real model, and what came out; a dash where time ran out."""
    drift = sources.model["drift"]["ends"]
    lost = drift["pariskv_core"]["lost"]
    learnt = next(name for name in ("PQCache 16x8", "PQCache") if name in drift)
    kmeans = f"k-means: {share(drift[learnt]['lost'])}"
    what = "share lost while 4K tokens are generated"
    written = [what, "≤ .020", share(lost), kmeans, verdict(lost <= 0.02)]
    ceiling = sources.model["methods"]["4-bit estimates of all keys"]["100"]["share"]
    rows = [
        *_asked_shares(sources.model["engine"]),
        ["ceiling: share by the 4-bit estimates of all keys", "", share(ceiling), "", ""],
        written,
        *_asked_bits(sources.model["engine"]),
    ]
    return table(["", "asked", "ours", "published setting", "met"], rows)


def model(sources: Sources) -> str:
    """Every method on the real model at 100 rows."""
    methods, engine = sources.model["methods"], sources.model["engine"]
    rows = {name: by["100"] for name, by in methods.items() if "share" in by.get("100", {})}
    for name, run in (
        ("**ours**, 10 % reranked", "default at 0.1"),
        ("**ours**, 5 % reranked", "default at 0.05"),
        ("ParisKV as published, 10 %", "published, 100 rows"),
        ("votes, our group rule, 10 %", "votes, attention_mass"),
        ("our score, mean query, 10 %", "sign_norm, mean_query"),
    ):
        if run in engine:
            rows[name] = engine[run]
    return table(
        ["k = 100", "share", "worst head", "recall", "output error", "bits, over the best rows"],
        [
            [
                _display(name),
                share(at["share"]),
                share(at["worst_head"]),
                share(at["recall"]),
                share(at["output_error"]),
                more(at, "oracle"),
            ]
            for name, at in sorted(rows.items(), key=lambda row: -row[1]["share"])
        ],
    )


def written(sources: Sources) -> str:
    """The real model's own text: shares at its beginning and at its end."""
    rows = sorted(sources.model["drift"]["ends"].items(), key=lambda row: -row[1]["share_last"])
    return table(
        ["share, while the model writes", "first 512 tokens", "last 512", "lost"],
        [
            [
                "**ours**" if name == "pariskv_core" else _display(name),
                share(curve["share_first"]),
                share(curve["share_last"]),
                share(curve["lost"]),
            ]
            for name, curve in rows
            if name != "oracle"
        ],
    )


# --- Synthetic keys ------------------------------------------------------------------------------


def workloads(sources: Sources) -> str:
    """Share by workload and method; the best of a row stands out."""
    rows = []
    for name, line in sources.synthetic["ingredients"].items():
        shares = {method: line[method] for method in _SYNTHETIC}
        best = max(shares.values())
        cells = [f"**{share(s)}**" if s == best else share(s) for s in shares.values()]
        rows.append([name, *cells])
    return table(["share, 100 rows", *map(_display, _SYNTHETIC)], rows)


def budgets(sources: Sources) -> str:
    """Share by budget, where k-means comes closest."""
    found = sources.synthetic["budgets"]
    names = [name for name in _SYNTHETIC if name in found]
    return table(
        ["share", *(f"k = {int(rows):,}" for rows in found[names[0]])],
        [[_display(name), *map(share, found[name].values())] for name in names],
    )


def one_by_one(sources: Sources) -> str:
    """Recall before and after a slow drift, the paper's ideas one by one."""
    kinds = sources.synthetic["switched_on"]
    stages = next(iter(kinds.values()))
    cells = {name: [" → ".join(map(share, kinds[kind][name])) for kind in kinds] for name in stages}
    return table(
        ["recall@100 of 10 % candidates", *kinds], [[name, *line] for name, line in cells.items()]
    )


def paper(sources: Sources) -> str:
    """Single figures of the paper beside ours."""
    s = sources.synthetic
    tenth = s["lengths"]["recall_at_.1"]
    votes, ours = tenth["votes, mean query"], tenth["sign × norm, now"]
    ends = min(votes, key=int), max(votes, key=int)
    on, off = s["alpha"]["on"], s["alpha"]["off"]
    signs = next(
        row
        for row in s["design_space"]
        if (row["part"], row["codebook"], row["radii"]) == (8, "256 directions", 1)
    )
    one, six = s["tiers"]["1"], s["tiers"]["6"]

    def at(line: dict[str, float]) -> str:
        return ", ".join(f"{share(line[e])} ({int(e) // 1024}K)" for e in ends)

    return table(
        ["", "paper", "here", "ours instead"],
        [
            ["recall@100 at 10 %, by length", ".610 (5K), .838 (100K)", at(votes), at(ours)],
            [
                "α-correction, recall@100",
                "+.015 to +.024",
                f"+{share(on['recall'] - off['recall'])}",
                "kept",
            ],
            [
                "error of logits by α",
                "less",
                f"{share(off['logit_error'])} → {share(on['logit_error'])}",
                "kept",
            ],
            ["recall of 16 parts × 256 directions", ".727", share(signs["recall"]), "signs alone"],
            [
                "6 tiers instead of 1: ties per candidate",
                "fewer",
                f"{one['tied']:.2f} → {six['tied']:.2f}",
                "no votes",
            ],
            [
                "6 tiers instead of 1: recall@100 at 10 %",
                "",
                f"{share(one['recall'])} → {share(six['recall'])}",
                "",
            ],
        ],
    )


TABLES: dict[str, tuple[Callable[[Sources], str], str]] = {
    "targets": (targets, "model"),
    "model": (model, "model"),
    "written": (written, "model"),
    "pretrained": (tables_pretrained.pretrained, "pretrained"),
    "pretrained_peers": (tables_pretrained.pretrained_peers, "pretrained"),
    "goals": (tables_pretrained.goals, "pretrained"),
    "inside": (tables_pretrained.inside, "inside"),
    "inside_longer": (tables_pretrained.inside_longer, "inside"),
    "mass": (tables_pretrained.mass, "inside"),
    "facts": (tables_pretrained.facts, "inside"),
    "ruler": (tables_pretrained.ruler, "inside"),
    "while_writing": (tables_keys.while_writing, "keys"),
    "other_balance": (tables_keys.other_balance, "keys"),
    "long_zones": (tables_keys.long_zones, "keys"),
    "policies": (tables_keys.policies, "keys"),
    "policies_later": (tables_keys.policies_later, "keys"),
    "counts": (tables_keys.counts, "keys"),
    "prefilter": (tables_keys.prefilter, "keys"),
    "prefilter_with_pages": (tables_keys.prefilter_with_pages, "keys"),
    "prefilter_rules": (tables_keys.prefilter_rules, "keys"),
    **tables_claims.TABLES,
    "workloads": (workloads, "synthetic"),
    "budgets": (budgets, "synthetic"),
    "one_by_one": (one_by_one, "synthetic"),
    "paper": (paper, "synthetic"),
    "peers_win": (lists.peers_win, "where"),
    "figures": (lists.figures, "where"),
    "measured_on": (lists.measured_on, "where"),
}


def made(name: str, sources: Sources) -> str:
    make, part = TABLES[name]
    of_models = part in ("pretrained", "inside", "keys")
    text = make(sources) if getattr(sources, part) else ""
    if text and (not of_models or len(text.splitlines()) > 2):
        return text
    return f"{_NO_MODELS if of_models else _NOT_YET}\n"


def filled(page: str, sources: Sources) -> str:
    """The page with every block that is marked as a table made anew."""
    return _BLOCK.sub(lambda found: found[1] + made(found[2], sources) + found[3], page)
