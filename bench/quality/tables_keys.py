"""The tables of RESULTS.md on captured keys: shares, peers, long zones, rows that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quality.markdown import and_worst, share, table
from quality.pretrained import lengths, shares
from quality.sources import Run, Sources, named, sized

_MEASURES = {
    "share": "share",
    "worst_kv_head": "worst kv head",
    "median": "median query head",
    "worst_head": "worst query head",
    "by_mass": "weighted by mass",
}
_BEST = ("block 64", "block 64, 5 %", "published")  # of the engine, beside peers
_LATER = ("block 64", "PRKV, S = 0.5", "PRKV, S = 1", "HARD-KV, attention, counts by Top-p")


def pretrained(sources: Sources) -> str:
    """Each model's shares, by what a key is coded as and how many are reranked."""
    rows = []
    names = [name for name in shares.ENGINE if name != "published"]
    for run in sources.pretrained.values():
        for measure, said in _MEASURES.items():
            what = f"**{sized(run)} tokens**: {said}" if measure == "share" else said
            methods = run["methods"]
            cells = [share(methods[n][measure]) if n in methods else "–" for n in names]
            rows.append([what, *cells])
    return table(["k = 100", *names], rows)


def pretrained_peers(sources: Sources) -> str:
    """Other methods with as many rows on the same keys."""
    runs = [
        run
        for run in sources.pretrained.values()
        if any(name in run["methods"] for name in shares.PEERS)
    ]
    rows = []
    for name in (*_BEST, *shares.PEERS) if runs else ():
        of = [run["methods"].get(name) for run in runs]
        rows.append([name, *(and_worst(at) if at else "–" for at in of)])
    return table(["share (worst kv head)", *map(sized, runs)], rows)


def while_writing(sources: Sources) -> str:
    """Shares in the first and last 512 of the tokens that are decoded one by one."""
    rows = []
    for run in sources.of("written"):
        first, last = run["tokens"] - run["written"], run["tokens"]
        for name, at in run["methods"].items():
            lost = at["first"]["share"] - at["last"]["share"]
            cells = [and_worst(at["first"]), and_worst(at["last"]), share(lost)]
            rows.append([f"{named(run)}, {first:,} to {last:,} tokens, {name}", *cells])
    return table(["share (worst kv head)", "first 512", "last 512", "lost"], rows)


def long_zones(sources: Sources) -> str:
    """Shares by the tokens in a zone, which are stretches of text one after the other.

    Bold is what the default reranks of such a zone.
    """
    rows = []
    for run in sources.of("lengths"):
        for tokens, at in run["lengths"].items():
            usual = lengths.like_default(int(tokens))
            said = {name: and_worst(at[name]) for name in lengths.METHODS}
            said[usual] = f"**{said[usual]}**"
            rows.append([f"{named(run)}, {int(tokens):,}", *said.values()])
    return table(["share (worst kv head)", *lengths.METHODS], rows)


def _by_budget(runs: Sequence[Run]) -> list[str]:
    """A column for each model and mean number of rows."""
    return [f"{named(run)}: {int(n):,} rows" for run in runs for n in run["soon"]["block 64"]]


def policies(sources: Sources) -> str:
    """At equal mean rows, for queries up to 128 tokens after the choice."""
    runs, rows = sources.of("policies"), []
    for name in runs[0]["soon"] if runs else ():
        rows.append([name, *(and_worst(at) for run in runs for at in run["soon"][name].values())])
    return table(["share (worst kv head)", *_by_budget(runs)], rows)


def policies_later(sources: Sources) -> str:
    """What is lost when the choice is up to 512 tokens old instead of 128."""
    runs, rows = sources.of("policies"), []
    for name in _LATER if runs else ():
        cells = [
            f"{share(at['share'])} → {share(run['all'][name][count]['share'])}"
            for run in runs
            for count, at in run["soon"][name].items()
        ]
        rows.append([name, *cells])
    return table(["share: up to 128 → 512 tokens later", *_by_budget(runs)], rows)


def counts(sources: Sources) -> str:
    """Fewest and most rows of a kv head, where Top-p decides."""
    rows, head = [], ["rows of a kv head"]
    for run in sources.of("policies"):
        of = run["counts"]["counts by Top-p"]
        head = [head[0], *(f"mean {int(mean):,}" for mean in of)]
        rows.append([named(run), *(f"{low:.0f} to {most:,.0f}" for low, most, _ in of.values())])
    return table(head, rows)


TABLES: dict[str, Callable[[Sources], str]] = {
    "pretrained": pretrained,
    "pretrained_peers": pretrained_peers,
    "while_writing": while_writing,
    "long_zones": long_zones,
    "policies": policies,
    "policies_later": policies_later,
    "counts": counts,
}
