"""The tables of RESULTS.md on pretrained models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quality.markdown import fine, share, table, verdict
from quality.pretrained.stretches import like_default
from quality.sources import Sources

_SETTINGS = {
    "block 0": "whole keys",
    "block 0, 5 %": "whole keys, 5 %",
    "published, 10 %": "published, 10 %",
    "block 64, all keys": "**block 64**, all keys",
    "block 64": "**block 64**",
    "block 64, 5 %": "**block 64**, 5 %",
    "block 64, 2 %": "**block 64**, 2 %",
    "block 256, 5 %": "block 256, 5 %",
    "block 256, 2 %": "block 256, 2 %",
}
_PEERS = (
    "PQCache 16×8",
    "PQCache 2×6",
    "FAISS 1 bit",
    "FAISS 2 bits",
    "FAISS 4 bits",
    "FAISS 1 bit, 5 % by 4 bits",
    "MagicPIG",
    "ArkVale",
    "Quest",
)
_DEFAULT = "block 64, 5 %, own tail 1,024"
_FOUND_BY = (
    "full attention",
    "sinks and window",
    "best 100",
    "best 400",
    "published",
    "block 64",
    _DEFAULT,
)
_MEASURES = {
    "share": "share",
    "worst_kv_head": "worst kv head",
    "median": "median query head",
    "worst_head": "worst query head",
    "by_mass": "weighted by mass",
}


def named(run: dict[str, Any]) -> str:
    """A model's name without that of its quantisation."""
    return str(run["model"]).rpartition(" ")[0].removesuffix("-Instruct")


def _cell(methods: dict[str, dict[str, float]], name: str, measure: str) -> str:
    return share(methods[name][measure]) if name in methods else "–"


def _some_layers(run: dict[str, Any]) -> str:
    """Which layers a capture has, if it was to have a few."""
    layers = run.get("first_layers", [])
    return f", layers {' and '.join(map(str, layers))}" if layers else ""


def _captured(run: dict[str, Any]) -> str:
    return f"{named(run)}, {run['tokens']:,} tokens{_some_layers(run)}"


def pretrained(sources: Sources) -> str:
    """Each model's shares, by what a key is coded as and how many are reranked."""
    rows = []
    for run in sources.pretrained.values():
        for measure, said in _MEASURES.items():
            shares = [_cell(run["methods"], name, measure) for name in _SETTINGS]
            what = f"**{_captured(run)}**: {said}"
            rows.append([what if measure == "share" else said, *shares])
    return table(["k = 100", *_SETTINGS.values()], rows)


def pretrained_peers(sources: Sources) -> str:
    """Other methods with as many rows on the same keys."""
    names = {"block 64": "**block 64**", "block 64, 5 %": "**block 64**, 5 %"}
    names |= {"published": "ParisKV as published"} | {name: name for name in _PEERS}
    runs = [run for run in sources.pretrained.values() if any(m in run["methods"] for m in _PEERS)]
    head = ["share (worst kv head)", *(f"{named(run)}, {run['tokens']:,}" for run in runs)]
    rows = []
    for name, said in names.items():
        cells = [
            f"{_cell(run['methods'], name, 'share')} "
            f"({_cell(run['methods'], name, 'worst_kv_head')})"
            for run in runs
        ]
        rows.append([said, *cells])
    return table(head, rows)


# (model, least, reranked, measure): what was asked of the shares, in each capture of a model.
_SHARES = (
    ("Qwen2.5-Coder-0.5B", 0.97, "5 %", "share"),
    ("Qwen2.5-Coder-0.5B", 0.93, "2 %", "share"),
    ("Qwen2.5-Coder-0.5B", 0.90, "5 %", "worst_kv_head"),
    ("Qwen2.5-Coder-1.5B", 0.97, "5 %", "share"),
    ("Qwen2.5-Coder-1.5B", 0.93, "2 %", "share"),
    ("SmolLM2-135M", 0.97, "5 %", "share"),
    ("SmolLM2-135M", 0.93, "2 %", "share"),
    ("Gemma-3-270M", 0.98, "5 %", "share"),
    ("Gemma-3-270M", 0.95, "2 %", "share"),
)


def goals(sources: Sources) -> str:
    """What was asked of blocks of 64 on pretrained models, and what came out."""
    runs = list(sources.pretrained.values())
    rows = []
    for model, least, ratio, measure in _SHARES:
        for run in runs:
            if named(run) != model:
                continue
            got = run["methods"][f"block 64, {ratio}"][measure]
            what = f"{_captured(run)}, {ratio} reranked: {_MEASURES[measure]}"
            # What is less by the fourth digit alone must not look the same.
            said = fine(got) if got < least <= round(got, 3) else share(got)
            rows.append([what, f"≥ {share(least)}", said, verdict(got >= least)])
    for run in runs:
        got = run["methods"]["block 64, all keys"]["share"]
        what = f"{_captured(run)}, all keys: share"
        rows.append([what, "≥ .990", share(got), verdict(got >= 0.99)])
    for run in sources.inside.values():
        rows += _kl_goals(run) + _needle_goals(run)
    return table(["", "asked", "measured", "met"], rows + _keys_goals(sources))


def _kl_goals(run: dict[str, Any]) -> list[list[str]]:
    text, rows = run.get("text", {}), []
    whole, best = (text.get(name, {}).get("kl") for name in ("best 100", "best 400"))
    for method, said in (
        ("block 64, tail 512", "KL with a tail of 512"),
        (_DEFAULT, f"KL of the default after {run['tokens']:,} tokens"),
    ):
        for whom, most in (
            ("that of the best 400 rows", best),
            (".3 of that of the best 100", None if whole is None else 0.3 * whole),
        ):
            if method in text and most is not None:
                got = text[method]["kl"]
                what = f"{named(run)}, {said}: at most {whom}"
                rows.append([what, f"≤ {fine(most)}", fine(got), verdict(got <= most)])
    return rows


def _needle_goals(run: dict[str, Any]) -> list[list[str]]:
    facts = run.get("facts", {})
    if not facts.keys() >= {"full attention", _DEFAULT}:
        return []
    whole, got = (facts[name]["all"]["found"] for name in ("full attention", _DEFAULT))
    what = f"{named(run)}, needles that the default finds after {run['tokens']:,} tokens"
    asked = f"≥ {whole - 2:.0f} (full attention {whole:.0f})"
    return [[what, asked, f"{got:.0f}", verdict(got >= whole - 2)]]


def _keys_goals(sources: Sources) -> list[list[str]]:
    rows = []
    for run in sources.keys.get("written", {}).values():
        lost = run["methods"]["block 64"]["lost"]
        what = f"{named(run)}, share lost while {run['written']:,} tokens are written"
        rows.append([what, "≤ .010", share(lost), verdict(lost <= 0.01)])
    for run in sources.keys.get("balance", {}).values():
        own, other = (run["cases"][f"code, {whose}"] for whose in ("its own", "the other's"))
        lost = own["block 64"]["share"] - other["block 64"]["share"]
        what = f"{named(run)}, share of code lost by a balance from documentation"
        rows.append([what, "≤ .010", share(lost), verdict(lost <= 0.01)])
    for run in sources.keys.get("lengths", {}).values():
        tokens = max(run["lengths"], key=int)
        got = run["lengths"][tokens][like_default(int(tokens))]["share"]
        what = f"{named(run)}, keys of {int(tokens):,} tokens, default schedule: share"
        rows.append([what, "≥ .950", share(got), verdict(got >= 0.95)])
    return rows


# --- Inside --------------------------------------------------------------------------------------


_INSIDE = {
    "sinks and window": "nothing else",
    "best 100": "the best 100 rows",
    "best 400": "the best 400 rows",
    "published": "100 rows, published setting",
    "whole keys": "100 rows, whole keys",
    "block 256": "100 rows, block 256",
    "block 64": "100 rows, **block 64**",
    "block 64, 5 %": "100 rows, block 64, 5 % reranked",
    "whole keys, tail 512": "whole keys + tail of 512",
    "block 64, tail 256": "block 64 + tail of 256",
    "block 64, tail 512": "**block 64 + tail of 512**",
    "block 64, tail 1,024": "block 64 + tail of 1,024",
    "block 64, own tail": "block 64 + the engine's own tail of 512",
    "block 64, own tail 1,024": "the same with a tail of 1,024",
    _DEFAULT: "**the default**: the same, 5 % reranked",
    "block 64, 5 %, own tail 2,048": "the default with `tail_rows=2048`",
    "block 64, 5 %, tail 512": "block 64, 5 % reranked + tail of 512",
    "block 64, 5 %, tail 1,024": "block 64, 5 % reranked + tail of 1,024",
    "block 64, 2 %, tail 512": "block 64, 2 % reranked + tail of 512",
    "PRKV 256, S = 0.5": "256 rows by PRKV, S = .5",
    "PRKV 256, S = 1": "256 kept rows, chosen anew every 128 tokens (PRKV, S = 1)",
    "PRKV 1,024, S = 0.25": "1,024 rows by PRKV, S = .25",
    "PRKV 1,024, S = 0.5": "1,024 rows by PRKV, S = .5",
    "PRKV 1,024, S = 1": "1,024 kept rows (PRKV, S = 1)",
}


def mass(sources: Sources) -> str:
    """What a budget by mass saves, and what it costs: of the runs that have one."""
    runs = [run for run in sources.inside.values() if _BUDGET.format(1) in run.get("text", {})]
    head = ["the default, rows until they have"]
    for run in runs:
        name = f"{named(run)}, {run['tokens']:,}"
        head += [f"{name}: rows", "estimated mass, mean", "least", "KL", "same top"]
    rows = []
    for share_wanted, said in _MASSES.items():
        cells: list[str] = []
        for run in runs:
            at = run["text"].get(_BUDGET.format(share_wanted))
            if at is None:
                cells += ["–"] * 5
                continue
            cells += [f"{at['rows']:.1f}", share(at["mass"]), share(at["least_mass"])]
            cells += [fine(at["kl"]), share(at["same_top"])]
        rows.append([said, *cells])
    return table(head, rows)


_BUDGET = "the default, mass {}"
_MASSES = {"1": "no mass: 100", "0.99": ".99", "0.98": ".98", "0.95": ".95", "0.9": ".90"}


def _texts(sources: Sources) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs on a text that goes on: each model's shortest, and the others."""
    runs = sorted(
        (run for run in sources.inside.values() if "text" in run), key=lambda run: run["tokens"]
    )
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        first.setdefault(run["model"], run)
    shortest = [run for run in sources.inside.values() if run is first.get(run["model"])]
    return shortest, [run for run in runs if run is not first[run["model"]]]


def inside(sources: Sources) -> str:
    """KL, the same top token and bits of the text that follows, by what is attended to."""
    runs, _ = _texts(sources)
    return _inside_table(runs, [named(run) for run in runs])


def inside_longer(sources: Sources) -> str:
    """The same after longer texts."""
    _, runs = _texts(sources)
    return _inside_table(runs, [f"{named(run)}, {run['tokens']:,} tokens" for run in runs])


def _inside_table(runs: list[dict[str, Any]], names: list[str]) -> str:
    head = ["attends to sinks, window and"]
    for name in names:
        head += [f"{name}: KL", "same top", "bits per byte"]
    rows = []
    for method, said in _INSIDE.items():
        cells = [cell for run in runs for cell in _inside_cells(run["text"], method)]
        if any(cell != "–" for cell in cells):
            rows.append([said, *cells])
    return table(head, rows)


def _inside_cells(text: dict[str, dict[str, float]], name: str) -> Sequence[str]:
    if name not in text:
        return "–", "–", "–"
    at, whole = text[name], text["full attention"]["bits_per_byte"]
    more = 100 * (at["bits_per_byte"] / whole - 1)
    return fine(at["kl"]), share(at["same_top"]), f"{more:+.2f} %"


def facts(sources: Sources) -> str:
    """How many needles each method finds."""
    return _found_table(sources, ("facts", "dictionary"), ("words", "numbers", "keys", "pairs"))


def ruler(sources: Sources) -> str:
    """The same of tasks after RULER."""
    kinds = ("variables", "several", "frequent", "walks", "records")
    return _found_table(sources, kinds, kinds)


def _found_table(sources: Sources, parts: Sequence[str], kinds: Sequence[str]) -> str:
    asked = []  # what is known of a kind of question after a text
    for run in sources.inside.values():
        for part in parts:
            known = run.get(part, {}).get("full attention", {})
            for kind in kinds:
                if kind in known:
                    said = f"{named(run)}, {run['tokens']:,}: {kind} of {known[kind]['asked']:.0f}"
                    asked.append((said, run[part], kind))
    methods = {
        name: "all" if name == "full attention" else _INSIDE[name]
        for name in _FOUND_BY
        if any(kind in of.get(name, {}) for _, of, kind in asked)
    }
    rows = [
        [said, *(_found(of.get(name, {}), kind) for name in methods)] for said, of, kind in asked
    ]
    return table(["attends to sinks, window and", *methods.values()], rows)


def _found(by_kind: dict[str, dict[str, float]], kind: str) -> str:
    if kind not in by_kind:
        return "–"
    return f"{by_kind[kind]['found']:.0f} ({by_kind[kind]['log_probability']:.2f})"
