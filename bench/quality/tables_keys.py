"""The tables of RESULTS.md on captured keys: shares, peers, long zones, rows that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quality.markdown import and_worst, share, table
from quality.pretrained import lengths, shares
from quality.sources import Run, Sources, named, sized

_HEAD = "share (worst kv head, worst query head)"
_MEASURES = {
    "share": "share",
    "worst_kv_head": "worst kv head",
    "median": "median query head",
    "worst_head": "worst query head",
    "by_mass": "weighted by mass",
}
_DECIDE = (
    "whole keys",
    "whole keys, 5 %",
    "published, 10 %",
    "block 64, all keys",
    "block 64",
    "block 64, 5 %",
    "block 64, 2 %",
    "block 256, 5 %",
)
_BEST = ("block 64", "block 64, 5 %", "published")  # of the engine, beside peers
_PEERS = (
    "PQCache 16×8",
    "PQCache 2×6",
    "FAISS 4 bits",
    "FAISS 1 bit, 5 % by 4 bits",
    "MagicPIG",
    "ArkVale",
    "Quest",
)
_KEPT = (
    "block 64",
    "PRKV, S = 0",
    "PRKV, S = 0.5",
    "PRKV, S = 1",
    "HARD-KV, attention, counts by Top-p",
)
_LATER = ("block 64", "PRKV, S = 0.5", "PRKV, S = 1", "HARD-KV, attention, counts by Top-p")


def pretrained(sources: Sources) -> str:
    """Each model's shares, by what a key is coded as and how many are reranked."""
    rows = []
    for run in sources.pretrained.values():
        by = run["methods"]
        cells = [and_worst(by[name]) if name in by else "–" for name in _DECIDE]
        rows.append([sized(run), *cells])
    return table([_HEAD, *_DECIDE], rows)


def pretrained_measures(sources: Sources) -> str:
    """Shares of 100 rows on keys of pretrained models, by every setting and measure.

    *Median* and *worst query head*: of a head's attention over all queries together. *Weighted by
    mass*: all the caught attention over all that the best rows have.
    """
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
    return _beside_peers(sources, _PEERS)


def every_peer(sources: Sources) -> str:
    """Other methods with 100 rows on keys of pretrained models, by every setting of theirs."""
    return _beside_peers(sources, list(shares.PEERS))


def _beside_peers(sources: Sources, names: Sequence[str]) -> str:
    runs = [
        run
        for run in sources.pretrained.values()
        if any(name in run["methods"] for name in shares.PEERS)
    ]
    rows = []
    for name in (*_BEST, *names) if runs else ():
        of = [run["methods"].get(name) for run in runs]
        rows.append([name, *(and_worst(at) if at else "–" for at in of)])
    return table([_HEAD, *map(sized, runs)], rows)


def while_writing(sources: Sources) -> str:
    """Shares in the first and last 512 of 4,096 tokens that are decoded one by one.

    The balance of channels and the centre are set once, by the 4,096 tokens before. 24 queries of
    each end are measured. *Lost* is the share of the first ones less that of the last ones.
    """
    rows = []
    for run in sources.of("written"):
        first, last = run["tokens"] - run["written"], run["tokens"]
        for name, at in run["methods"].items():
            lost = at["first"]["share"] - at["last"]["share"]
            cells = [and_worst(at["first"]), and_worst(at["last"]), share(lost)]
            rows.append([f"{named(run)}, {first:,} to {last:,} tokens, {name}", *cells])
    return table([_HEAD, "first 512", "last 512", "lost"], rows)


def long_zones(sources: Sources) -> str:
    """Shares by the tokens in a zone: as the default reranks, and by estimates of all keys."""
    rows, head = [], [_HEAD]
    for run in sources.of("lengths"):
        by = run["lengths"]
        head = [head[0], *(f"{int(tokens):,}" for tokens in by)]
        for said in ("the default", "all keys"):
            names = [lengths.like_default(int(n)) if said == "the default" else said for n in by]
            cells = [and_worst(at[name]) for name, at in zip(names, by.values(), strict=True)]
            rows.append([f"{named(run)}, {said}", *cells])
    return table(head, rows)


def long_zones_by_share(sources: Sources) -> str:
    """Shares by the tokens in a zone and by how many of its keys are reranked.

    Zones are stretches of text one after the other. Bold is what the default reranks.
    """
    rows = []
    for run in sources.of("lengths"):
        for tokens, at in run["lengths"].items():
            usual = lengths.like_default(int(tokens))
            said = {name: and_worst(at[name]) for name in lengths.METHODS}
            said[usual] = f"**{said[usual]}**"
            rows.append([f"{named(run)}, {int(tokens):,}", *said.values()])
    return table([_HEAD, *lengths.METHODS], rows)


def _by_budget(runs: Sequence[Run]) -> list[str]:
    """A column for each model and mean number of rows."""
    return [f"{named(run)}: {int(n):,} rows" for run in runs for n in run["soon"]["block 64"]]


def kept_rows(sources: Sources) -> str:
    """Search beside rows that are kept, for queries up to 128 tokens after the choice."""
    runs = sources.of("policies")
    return _of_policies(runs, [name for name in _KEPT if runs and name in runs[0]["soon"]])


def policies(sources: Sources) -> str:
    """PRKV and HARD-KV on captured keys at equal mean rows, up to 128 tokens after the choice.

    PRKV keeps a part S of its rows, and the rest are pages of 32 that each query finds. *Holes*:
    pages stay where they are when rows of them are kept; else pages are cut anew. HARD-KV keeps
    rows alone: as many for each kv head, or as many as hold one part of a head's attention
    (Top-p). It orders rows by their attention, or by SnapKV's pooled logits.
    """
    runs = sources.of("policies")
    return _of_policies(runs, list(runs[0]["soon"]) if runs else [])


def _of_policies(runs: Sequence[Run], names: Sequence[str]) -> str:
    rows = [
        [name, *(and_worst(at) for run in runs for at in run["soon"][name].values())]
        for name in names
    ]
    return table([_HEAD, *_by_budget(runs)], rows)


def policies_later(sources: Sources) -> str:
    """The same when the choice is up to 512 tokens old instead of 128."""
    runs, rows = sources.of("policies"), []
    for name in _LATER if runs else ():
        cells = [
            f"{and_worst(at)} → {and_worst(run['all'][name][count])}"
            for run in runs
            for count, at in run["soon"][name].items()
        ]
        rows.append([name, *cells])
    return table([f"{_HEAD}: up to 128 → 512 tokens later", *_by_budget(runs)], rows)


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
    "long_zones": long_zones,
    "kept_rows": kept_rows,
}
MORE: dict[str, Callable[[Sources], str]] = {
    "pretrained_measures": pretrained_measures,
    "every_peer": every_peer,
    "long_zones_by_share": long_zones_by_share,
    "while_writing": while_writing,
    "policies": policies,
    "policies_later": policies_later,
    "counts": counts,
}
