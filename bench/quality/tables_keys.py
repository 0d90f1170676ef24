"""The tables of RESULTS.md on captured keys: drift, another text's balance, length, policies."""

from __future__ import annotations

from typing import Any

from quality.markdown import share, table
from quality.pretrained.stretches import like_default
from quality.sources import Sources
from quality.tables_pretrained import named

_LENGTHS = {
    "block 64, all keys": "all keys",
    "block 64, 20 %": "20 %",
    "block 64, 10 %": "10 %",
    "block 64, 5 %": "5 %",
    "block 64, 2 %": "2 %",
    "block 0": "whole keys",
}
_WRITTEN = {"block 64": "50 to 25 %", "block 64, 5 %": "5 %", "block 64, 2 %": "2 %"}
_PRKV = {
    "PRKV, static 0": "PRKV, S = 0 (ArkVale)",
    **{
        f"PRKV, static {s:g}{holes}": f"PRKV, S = {share(s)}{holes}"
        for s in (0.25, 0.5, 0.75)
        for holes in ("", ", holes")
    },
    "PRKV, static 1": "PRKV, S = 1",
}
_HARDKV = {
    f"HARD-KV, {metric}, {kind}": f"HARD-KV, {metric}, {said}"
    for metric in ("attention", "SnapKV")
    for kind, said in {
        "fixed": "as many for each head",
        "Top-p": "counts by Top-p",
        "Top-p, limited": "Top-p, at most twice the mean",
    }.items()
}
POLICIES = {"block 64": "**block 64**, searched for each query", **_PRKV, **_HARDKV}
POLICIES["Quest"] = "Quest"


def _runs(sources: Sources, part: str) -> list[dict[str, Any]]:
    return list(sources.keys.get(part, {}).values())


def _and_worst(at: dict[str, float]) -> str:
    return f"{share(at['share'])} ({share(at['worst_kv_head'])})"


def while_writing(sources: Sources) -> str:
    """Shares in the first and last 512 of the tokens that are decoded one by one."""
    rows = []
    for run in _runs(sources, "written"):
        for name, said in _WRITTEN.items():
            at = run["methods"][name]
            last, first = run["tokens"], run["tokens"] - run["written"]
            what = f"{named(run)}, {first:,} to {last:,} tokens, {said}"
            cells = [
                f"{share(at[f'share_{end}'])} ({share(at[f'worst_kv_head_{end}'])})"
                for end in ("first", "last")
            ]
            rows.append([what, *cells, share(at["lost"])])
    return table(["share (worst kv head)", "first 512", "last 512", "lost"], rows)


def other_balance(sources: Sources) -> str:
    """Shares with the balance of the text itself, and with that of another text."""
    rows = []
    for run in _runs(sources, "balance"):
        for text, other in (("documentation", "code"), ("code", "documentation")):
            own, alien = (run["cases"][f"{text}, {whose}"] for whose in ("its own", "the other's"))
            cells = []
            for name in _WRITTEN:
                a, b = own[name]["share"], alien[name]["share"]
                cells += [f"{share(a)} → {share(b)}"]
            rows.append([f"{named(run)}, {text}, balance from {other}", *cells])
    return table([f"share, {run_length(sources)} tokens", *_WRITTEN.values()], rows)


def run_length(sources: Sources) -> str:
    runs = _runs(sources, "balance")
    return f"{runs[0]['tokens']:,}" if runs else "no"


def long_zones(sources: Sources) -> str:
    """Shares by the tokens in a zone, which are stretches of text one after the other.

    Bold is what the default reranks of such a zone.
    """
    rows = []
    for run in _runs(sources, "lengths"):
        for tokens, at in run["lengths"].items():
            usual = like_default(int(tokens))
            cells = [
                f"**{_and_worst(at[name])}**" if name == usual else _and_worst(at[name])
                for name in _LENGTHS
            ]
            rows.append([f"{named(run)}, {int(tokens):,}", *cells])
    return table(["share (worst kv head)", *_LENGTHS.values()], rows)


def _policies(sources: Sources, when: str) -> str:
    runs = _runs(sources, "policies")
    budgets = list(runs[0]["all"]["block 64"]) if runs else []
    head = ["share (worst kv head)"]
    head += [f"{named(run)}: {int(rows):,} rows" for run in runs for rows in budgets]
    rows = []
    for name, said in POLICIES.items():
        cells = [_and_worst(run[when][name][budget]) for run in runs for budget in budgets]
        rows.append([said, *cells])
    return table(head, rows)


def policies(sources: Sources) -> str:
    """At equal mean rows, for queries up to 128 tokens after the choice."""
    return _policies(sources, "soon")


def policies_later(sources: Sources) -> str:
    """What is lost when the choice is up to 512 tokens old instead of 128."""
    runs = _runs(sources, "policies")
    budgets = list(runs[0]["all"]["block 64"]) if runs else []
    head = ["share: up to 128 → 512 tokens later"]
    head += [f"{named(run)}: {int(rows):,} rows" for run in runs for rows in budgets]
    some = ("block 64", "PRKV, static 0.5", "PRKV, static 1", "HARD-KV, attention, Top-p")
    rows = []
    for name in some:
        cells = [
            " → ".join(share(run[when][name][budget]["share"]) for when in ("soon", "all"))
            for run in runs
            for budget in budgets
        ]
        rows.append([POLICIES[name], *cells])
    return table(head, rows)


def counts(sources: Sources) -> str:
    """Fewest and most rows of a kv head, where Top-p decides."""
    rows = []
    for run in _runs(sources, "policies"):
        cells = [f"{low:.0f} to {most:,.0f}" for low, most, _ in run["counts"]["Top-p"].values()]
        rows.append([named(run), *cells])
    runs = _runs(sources, "policies")
    budgets = list(runs[0]["counts"]["Top-p"]) if runs else []
    return table(["rows of a kv head", *(f"mean {int(b):,}" for b in budgets)], rows)


_REMEMBERS = "mean, softmax, remembers"


def _lengths(sources: Sources) -> list[tuple[str, dict[str, Any]]]:
    """Of choices from a part of the pages: each model at each of its lengths."""
    return [
        (f"{named(run)}, {int(tokens):,} tokens", at)
        for run in _runs(sources, "prefilter")
        for tokens, at in run["lengths"].items()
    ]


def _of_parts(sources: Sources, when: str, what: str) -> str:
    """What is lost by length, S and part of the pages; in brackets the worst layer."""
    columns = {
        "as before": "as before",
        **{f"mean, softmax, {part}": part for part in ("1/8", "1/4", "1/2")},
        **{f"{_REMEMBERS}, {part}": f"r. + {part}" for part in ("0", "1/16", "1/8", "1/4", "1/2")},
    }
    rows = []
    for name, at in _lengths(sources):
        for s in ("0.25", "0.5", "auto"):
            kept = "auto" if s == "auto" else f"S = {share(float(s))}"
            cells = [share(at["shares"][f"all pages, {s}, {when}"])]
            for by in columns:
                cell = share(at["shares"][f"{by}, {s}, {when}"])
                of_layers = at["by_layer"].get(f"{by}, {s}, {when}")
                cells.append(f"{cell} ({share(max(of_layers))})" if of_layers else cell)
            rows.append([f"{name}, {kept}", *cells])
    return table([what, "all pages", *columns.values()], rows)


def prefilter(sources: Sources) -> str:
    """What a choice of kept rows loses that looks at a part of the pages alone."""
    return _of_parts(sources, "later", "share of the next queries that kept rows lose")


def prefilter_with_pages(sources: Sources) -> str:
    """The same, beside the pages that the next queries find."""
    return _of_parts(sources, "with pages", "share that kept rows and found pages lose")


def prefilter_rules(sources: Sources) -> str:
    """Rules side by side, at a quarter of the pages and S of a half."""
    said = {
        "mean, mean": "mean digest, mean score",
        "mean, softmax": "mean digest, mean share",
        "mean, largest": "mean digest, largest share",
        "max, softmax": "max digest, mean share",
        "both, softmax": "the better of both digests",
        "of 8 rows, softmax": "pages of 8 rows, mean digest, mean share",
        "best": "the best pages there are",
    }
    lengths = _lengths(sources)
    rows = []
    for rule, words in said.items():
        for more in ("", ", remembers"):
            key = f"{rule}{more}, 1/4, 0.5"
            cells = [
                " / ".join(share(at["shares"][f"{key}, {when}"]) for when in ("now", "later"))
                for _, at in lengths
            ]
            rows.append([words + more, *cells])
    return table(["share lost: now / later", *(name for name, _ in lengths)], rows)
