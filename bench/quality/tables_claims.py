"""Tables on what PRKV's and HARD-KV's papers say of attention: RESULTS.md has the verdicts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from quality.markdown import share, table
from quality.sources import Sources, named

Means = dict[str, float]
_STATIC = ("0", "0.25", "0.5", "0.75", "1")
_REGIMES = {
    "static": "documentation",
    "static, code": "code",
    "static, questions": "answers to questions",
}
_SAME = 0.002  # of the attention: what is nearer than that is no difference
_NEAR = 0.05  # of the attention: nearly the best
_GOOD = 0.01  # of the attention: as good as the best setting
_ABOUT = 1.25  # by this factor or less, two counts are about the same
Judged = tuple[str, bool | str]  # what was measured; whether the claim holds, or how far


def _split(static: str) -> str:
    return static.removeprefix("0") or "0"


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "") + share(value)


# --- PRKV ----------------------------------------------------------------------------------------


def by_static(sources: Sources) -> str:
    """Recall of PRKV's equation 3 by S, in three regimes, within a third of the layers.

    Recall is the attention on everything that is attended to, of all attention: the mean over query
    heads, steps and kv heads. *None* attends to sinks and window alone.
    """
    rows = []
    for run in sources.of("claims"):
        for part, regime in _REGIMES.items():
            of = run["prkv"][part]
            for budget in (256, 1024):
                by = [of[f"S = {s}, {budget}"] for s in _STATIC]
                cells = [f"**{share(v)}**" if v == max(by) else share(v) for v in by]
                ends = [share(of[f"{end}, {budget}"]) for end in ("window", "best")]
                what = f"{named(run)}, {regime}, {budget:,} rows"
                rows.append([what, ends[0], *cells, ends[1]])
    head = ["recall of eq. 3", "none", *(f"S = {_split(s)}" for s in _STATIC), "best rows"]
    return table(head, rows)


def _hybrids(of: dict[str, Means]) -> Judged:
    wins = ties = 0
    for part in _REGIMES:
        for budget in (256, 1024):
            by = [of[part][f"S = {s}, {budget}"] for s in _STATIC]
            least = min(by[1:-1]) - max(by[0], by[-1])
            wins += least > 0
            ties += abs(least) <= _SAME
    return f"all three hybrids over both ends in {wins} of 6 cases", wins == 6


def _under_best(of: dict[str, Means]) -> Judged:
    at = of["static"]
    best, page, none = at["best, 1024"], at["S = 0, 1024"], at["window, 1024"]
    missed = (best - page) / (best - none)
    text = f"{share(page)} of {share(best)}: {100 * (1 - page / best):.1f} % under"
    return f"{text}; of what the zone has, {100 * missed:.0f} %", 1 - page / best > 0.15


def _old_rows(of: dict[str, Means]) -> Judged:
    at = of["distance"]
    parts = [
        f"{share(at[f'old best, {d}'])} → {share(at[f'old best and window, {d}'])} "
        f"of {share(at[f'best, {d}'])} ({d} later)"
        for d in (8, 32, 128, 512)
    ]
    near = [
        d for d in (8, 32, 128, 512) if at[f"best, {d}"] - at[f"old best and window, {d}"] <= _NEAR
    ]
    return ", ".join(parts), f"reproduced up to {max(near)} tokens later" if near else False


def _refreshing(of: dict[str, Means]) -> Judged:
    at, parts = of["interval"], []
    for s in ("1", "0.25"):
        by = [at[f"T = {t}, S = {s}, late"] for t in (32, 128, 512, None)]
        parts.append(f"S = {_split(s)}: {', '.join(map(share, by))}")
    often, soon, never = (at[f"T = {t}, S = 1, late"] for t in (32, 128, None))
    return "; ".join(parts), often - soon <= _GOOD and soon - never > _SAME


def _averaged(of: dict[str, Means]) -> Judged:
    at = of["order"]
    parts = []
    for rows in (256, 1024):
        own = at[f"attention, {rows}"]
        group, every = (
            at[f"{whose}, {rows}"] - own for whose in ("queries of a group", "all queries")
        )
        parts.append(
            f"{rows:,} rows: {share(own)}, {_signed(group)} by the group's mean query, "
            f"{_signed(every)} by that of all"
        )
    lost = at["attention, 256"] - at["queries of a group, 256"]
    return "; ".join(parts), lost > _SAME


def _automatic(of: dict[str, Any]) -> Judged:
    layers = of["automatic"]
    mean = {int(rows): sum(by) / len(by) for rows, by in layers.items()}
    said = ", ".join(f"{share(s)} ({rows:,})" for rows, s in mean.items())
    lost = 0.0
    for budget in (256, 1024):
        by = {s: of["static"][f"S = {s}, {budget}"] for s in _STATIC}
        nearest = min(_STATIC, key=lambda s: abs(float(s) - mean[budget]))
        lost = max(lost, max(by.values()) - by[nearest])
    return f"S = {said}; the nearest S measured is {share(lost)} from the best", lost <= _GOOD


def judged(
    runs: list[dict[str, Any]], part: str, claims: dict[str, Callable[[Any], Judged]]
) -> list[list[str]]:
    rows = []
    for said, judge in claims.items() if runs else ():
        found = [judge(run[part]) for run in runs]
        verdicts = {True: "reproduced", False: "**refuted**"}
        said_of = [verdicts[met] if isinstance(met, bool) else met for _, met in found]
        verdict = said_of[0] if len(set(said_of)) == 1 else "; ".join(said_of)
        rows.append([said, *(text for text, _ in found), verdict])
    return rows


_PRKV: dict[str, Callable[[Any], Judged]] = {
    "every hybrid beats S = 0 and S = 1 (Fig. 3b, 8)": _hybrids,
    "ArkVale is 25 % under the best 1,024 rows (Fig. 2a)": _under_best,
    "old best 1,024 and 64 local are nearly the best (Fig. 3a): without → with local": _old_rows,
    "refreshing at T = 128 stops decay (§4.1): T = 32, 128, 512, never, 512 to 1,024 later": (
        _refreshing
    ),
    "averaging queries first loses tokens (§4.1)": _averaged,
    "S by overlap is a good S (App. G)": _automatic,
}


def claims_prkv(sources: Sources) -> str:
    """What PRKV's paper says, measured.

    Every query and key of 1,024 tokens of the documentation after 7,168, in a third of the layers.
    Regions are the paper's: 64 local tokens, a choice and a flush every 128, and four sinks.
    Verdicts are rules in tables_claims.py: differences up to .002 are none.
    """
    runs = sources.of("claims")
    head = ["the paper says", *map(named, runs), "verdict"]
    return table(head, judged(runs, "prkv", _PRKV))


# --- HARD-KV -------------------------------------------------------------------------------------


def _per_head(of: dict[str, Means]) -> Judged:
    at, better = of["counts"], []
    hows = ("one count", "by Top-p", "by Top-p, at most twice")
    texts = []
    for what in ("output error", "recall"):
        parts = []
        for rows in (256, 512, 1024, 2048):
            by = [at[f"{how}, {rows}: {what}"] for how in hows]
            parts.append(f"{' → '.join(map(share, by[:2]))} ({share(by[2])})")
            better += [f"{rows:,}"] if what == "output error" and by[1] < by[0] else []
        texts.append(f"{what} {', '.join(parts)}")
    verdict = f"reproduced with {' and '.join(better)} rows alone" if better else False
    return "; ".join(texts), True if len(better) == 4 else verdict


def _calibrated(metric: str) -> Callable[[dict[str, Means]], Judged]:
    def judge(of: dict[str, Means]) -> Judged:
        at = of["calibration"]
        ratio = {h: at[f"{metric}, {h}, now: count over true"] for h in ("none", "each head")}
        held = {h: at[f"{metric}, {h}, now: attention held"] for h in ("none", "each head")}
        text = (
            f"{ratio['none']:.2f} × the rows → {ratio['each head']:.2f} ×; "
            f"attention held {share(held['none'])} → {share(held['each head'])}"
        )
        if abs(math.log(ratio["each head"])) > math.log(_ABOUT):
            return text, False
        return text, True if held["each head"] > 0.85 else "in number, not in attention"

    return judge


def _over_time(metric: str) -> Callable[[dict[str, Means]], Judged]:
    def judge(of: dict[str, Means]) -> Judged:
        at = of["calibration"]
        factor = at[f"{metric}, temperature changed by a factor, 512"]
        first, fresh = (
            at[f"{metric}, {h}, later: count over true"] for h in ("the first", "each head")
        )
        text = f"changed {factor:.2f} ×; counts {fresh:.2f} × (fresh), {first:.2f} × (the first)"
        return text, abs(math.log(first / fresh)) < math.log(_ABOUT)

    return judge


def _pruned(of: dict[str, Means]) -> Judged:
    at, lengths = of["pruning"], of["lengths"]
    begins = _begins(at)
    first, last = (at[f"dropped, {begins[i]}: lse lost"] for i in (0, -1))
    zones = ", ".join(share(lengths[f"{tokens}: lse lost"]) for tokens in (1024, 2048, 4096, 7168))
    text = f"{share(first)} → {share(last)} after {begins[-1]:,} tokens"
    return f"{text}; zones of 1K, 2K, 4K, 7K: {zones}", last > first + _SAME


def _begins(at: Means) -> list[int]:
    """Where rows were chosen."""
    return sorted({int(re.findall(r", (\d+):", what)[0]) for what in at})


def _merged(of: dict[str, Means]) -> Judged:
    at, parts, errors = of["pruning"], [], []
    begins = _begins(at)
    late = begins[len(begins) // 2 :]
    for how in ("dropped", "merged", "merged, raised"):
        lost, error = (
            sum(at[f"{how}, {begin}: {what}"] for begin in late) / len(late)
            for what in ("lse lost", "output error")
        )
        parts.append(f"{how}: {share(lost)}, error {share(error)}")
        errors.append(error)
    return "; ".join(parts), errors[1] < errors[0] - _SAME


_HARDKV: dict[str, Callable[[Any], Judged]] = {
    "counts per head beat one count at equal mean rows: 256, 512, 1,024, 2,048; in brackets at "
    "most twice the mean": _per_head,
    **{
        f"calibrated Top-p keeps what true Top-p does (Fig. 2, 19), {metric}: without → with": (
            _calibrated(metric)
        )
        for metric in ("SnapKV", "R-KV")
    },
    **{
        f"temperatures hold over time (Fig. 17), {metric}, 512 tokens later": _over_time(metric)
        for metric in ("SnapKV", "R-KV")
    },
    "pruning lowers the log-sum-exp, more with length (Fig. 20), 512 rows": _pruned,
    "merging helps (Fig. 21): log-sum-exp lost, output error, 512 rows": _merged,
}


def claims_hardkv(sources: Sources) -> str:
    """What HARD-KV's paper says, measured.

    The same text; the last 32 queries look. *Calibrated* counts and temperatures are of single
    queries, one in four of these 32, in a fourth of the kv heads; R-KV's duplicates are keys with a
    cosine above .5.
    """
    runs = sources.of("claims")
    head = ["the paper says", *map(named, runs), "verdict"]
    return table(head, judged(runs, "hardkv", _HARDKV))


def claims(sources: Sources) -> str:
    """The verdicts on both papers, without the numbers."""
    runs, rows = sources.of("claims"), []
    for paper, part, said in (("PRKV", "prkv", _PRKV), ("HARD-KV", "hardkv", _HARDKV)):
        for claim, *_, verdict in judged(runs, part, said):
            rows.append([paper, claim.partition(": ")[0], verdict])
    return table(["paper", "it says", "verdict"], rows)


TABLES: dict[str, Callable[[Sources], str]] = {"claims": claims}
MORE: dict[str, Callable[[Sources], str]] = {
    "claims_prkv": claims_prkv,
    "by_static": by_static,
    "claims_hardkv": claims_hardkv,
}
