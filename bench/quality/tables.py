"""The tables of RESULTS.md, as markdown from the results: python -m quality tables [--write].

A table is a function of `Sources`. To add one to the page, put the function into a TABLES, and its
name between marks on the page:

    <!-- table: name -->
    <!-- end -->

A function in a MORE is not on the page: `python -m quality tables --all` writes it with the others,
and what its docstring says of it. `Sources.reading(text)` has runs inside models on a text,
`Sources.of(part)` runs on captured keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quality import structured as structured_keys
from quality import tables_claims, tables_inside, tables_keys
from quality.experiments import BUDGETS
from quality.markdown import fill, fine, share, table
from quality.sources import WORST, Sources, means, sized

PAGE = Path(__file__).resolve().parent / "RESULTS.md"
_SHARES = dict[str, float]  # by method
DRIFTS = ("slow_drift", "switch")  # experiments that share a table


def workloads(sources: Sources) -> str:
    """Share by method, on keys with every peculiarity and on the kind that is worst for it."""
    kinds = {name: means(line) for name, line in sources.synthetic.get("workloads", {}).items()}
    if not kinds:
        return table([], [])
    first, names = next(iter(kinds)), list(next(iter(kinds.values())))
    worst = {name: min(kinds, key=lambda kind, of=name: kinds[kind][of]) for name in names}
    rows = [
        [first, *(share(kinds[first][name]) for name in names)],
        ["worst kind", *(f"{share(kinds[kind][name])}: {kind}" for name, kind in worst.items())],
    ]
    lines = list(sources.synthetic["workloads"].values())
    if all(name + WORST in line for line in lines for name in names):
        least = [min(line[name + WORST] for line in lines) for name in names]
        rows.append(["worst step of any kind", *map(share, least)])
    return table(["share, 100 rows", *names], rows)


def every_workload(sources: Sources) -> str:
    """Share by kind of synthetic keys and method, 100 rows of 16K tokens; the best stands out.

    In brackets that of the worst step, where it was recorded.
    """
    rows: list[list[str]] = []
    names: list[str] = []
    for kind, line in sources.synthetic.get("workloads", {}).items():
        names, best, cells = list(means(line)), max(means(line).values()), []
        for name in names:
            at = f"**{share(line[name])}**" if line[name] == best else share(line[name])
            cells.append(at + (f" ({share(line[name + WORST])})" if name + WORST in line else ""))
        rows.append([kind, *cells])
    return table(["share, 100 rows", *names], rows)


def budgets(sources: Sources) -> str:
    """Share by method and budget, in synthetic zones of 64K keys."""
    found = sources.synthetic.get("budgets", {})
    head = ["share", *(f"k = {rows:,}" for rows in BUDGETS)]
    return table(head, [[name, *map(share, line.values())] for name, line in found.items()])


def _family(kind: str) -> str:
    """What a kind of structured keys has in common with others, as tables call it."""
    words = ("lines", "marker", "cluster", "topic", "sentence", "heavy")
    said = next((word for word in words if word in kind), kind)
    return said if said.endswith("s") else f"{said} keys" if said == "heavy" else f"{said}s"


def _span(values: Sequence[float], form: str) -> str:
    """The least and the largest."""
    ends = [format(of(values), form) for of in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def structured(sources: Sources) -> str:
    """Errors of outputs and ratios of predictions: the best and the worst kind of a family."""
    told: dict[str, dict[str, dict[str, float]]] = sources.predicted.get("structured", {})
    ratios = list(next(iter(told.values()), {}))
    families: dict[str, list[str]] = {}
    for kind in sources.structured:
        families.setdefault(_family(kind), []).append(kind)
    rows = []
    for family, kinds in families.items():
        lines = [sources.structured[kind] for kind in kinds]
        cells = []
        for way in structured_keys.WAYS:
            worst = [line[way + WORST] for line in lines if way + WORST in line]
            said = f" ({max(worst):.2g})" if worst else ""
            cells.append(_span([line[way] for line in lines], ".2g") + said)
        for way in ratios:
            of = [told[kind][way]["ratio"] for kind in kinds if kind in told]
            cells.append(_span(of, ".2f") if of else "–")
        rows.append([f"{family} ({len(kinds)})", *cells])
    head = ["error of the output (kinds)", *structured_keys.WAYS]
    return table([*head, *(f"ratio: {way}" for way in ratios)], rows)


def every_structure(sources: Sources) -> str:
    """Median errors of outputs by kind of keys with a structure, 100 rows of 32,768 keys.

    In brackets the error of the worst step, where it was recorded; the last column is that with
    2,048 rows over that of no sample.
    """
    ways, rows = list(structured_keys.WAYS), []
    for kind, line in sources.structured.items():
        cells = [
            f"{line[way]:.2g}" + (f" ({line[way + WORST]:.2g})" if way + WORST in line else "")
            for way in ways
        ]
        rows.append([kind, *cells, f"{line[ways[-1]] / line[ways[0]]:.2f}"])
    return table(["error of the output, 100 rows", *ways, "of no tail's"], rows)


def predicted(sources: Sources) -> str:
    """Predicted over true errors inside models; in brackets the least and largest of a layer."""
    runs = [run for name, run in sources.predicted.items() if name != "structured"]
    names = list(runs[0]["ways"]) if runs else []
    rows = [
        [
            sized(run),
            *(
                f"{at['ratio']:.2f} ({at['least']:.2f} to {at['largest']:.2f})"
                for at in run["ways"].values()
            ),
        ]
        for run in runs
    ]
    return table(["predicted over true error", *names], rows)


def predicted_errors(sources: Sources) -> str:
    """Predicted over true errors, inside models and by kind of keys; in brackets both errors.

    Root mean squares over steps and kv heads, as shares of the spread of values. Inside models, of
    all layers, with the least and the largest ratio of a layer.
    """
    rows, names = [], list[str]()

    def add(name: str, ways: dict[str, dict[str, float]]) -> None:
        names[:] = list(ways)
        cells = []
        for at in ways.values():
            layers = f"; {at['least']:.2f} to {at['largest']:.2f}" if "least" in at else ""
            both = " / ".join(fine(at[of]) for of in ("predicted", "true"))
            cells.append(f"**{at['ratio']:.2f}** ({both}{layers})")
        rows.append([name, *cells])

    for name, run in sources.predicted.items():
        if name != "structured":
            add(sized(run), run["ways"])
    for kind, ways in sources.predicted.get("structured", {}).items():
        add(kind, ways)
    return table(["predicted over true error", *names], rows)


def drift(sources: Sources) -> str:
    """Share after the prompt, half way and at last, while keys drift slowly or switch at once.

    10 % of the keys are reranked, while the zone grows from 8K to 24K synthetic keys.
    """
    kinds = {name: sources.synthetic[name] for name in DRIFTS if name in sources.synthetic}
    head, rows = ["share, 100 rows"], dict[str, list[str]]()
    for kind, found in kinds.items():
        head += [f"{kind.replace('_', ' ')}: {at // 1024}K" for at in found["positions"][::4]]
        for name, curve in found["share"].items():
            rows.setdefault(name, [name]).extend(share(at) for at in curve[::4])
    return table(head, list(rows.values()))


def _cases(sources: Sources) -> Iterator[tuple[str, _SHARES]]:
    """Everything that was measured on synthetic keys, with the shares of all methods."""
    found = sources.synthetic
    for case, line in found.get("workloads", {}).items():
        yield case, means(line)
    by_method = found.get("budgets", {})
    for rows in next(iter(by_method.values()), {}):
        yield f"k = {int(rows):,}", {name: at[rows] for name, at in by_method.items()}
    for kind in DRIFTS:
        of = found.get(kind, {"positions": []})
        for i, place in enumerate(of["positions"]):
            shares = {name: curve[i] for name, curve in of["share"].items()}
            yield f"{kind.replace('_', ' ')}, at {place // 1024}K", shares


def peers_win(sources: Sources) -> str:
    """Every case in which another method's share is larger than that of ParisKV."""
    won = []
    for case, shares in _cases(sources):
        ours = max(at for name, at in shares.items() if name.startswith("ParisKV"))
        name = max(shares, key=lambda name: shares[name])
        if shares[name] > ours:
            won.append(f"- {case}: {name} {share(shares[name])}, ParisKV {share(ours)}\n")
    return "".join(won) or "- nowhere in these runs\n"


def measured_on(sources: Sources) -> str:
    """What ran where."""
    return "".join(f"- {part}: {said}\n" for part, said in sources.where.items())


TABLES: dict[str, Callable[[Sources], str]] = {
    **tables_keys.TABLES,
    **tables_inside.TABLES,
    **tables_claims.TABLES,
    "workloads": workloads,
    "structured": structured,
    "predicted": predicted,
    "peers_win": peers_win,
    "measured_on": measured_on,
}
MORE: dict[str, Callable[[Sources], str]] = {
    **tables_keys.MORE,
    **tables_inside.MORE,
    **tables_claims.MORE,
    "every_workload": every_workload,
    "budgets": budgets,
    "drift": drift,
    "every_structure": every_structure,
    "predicted_errors": predicted_errors,
}
ALL = TABLES | MORE


def filled(page: str, sources: Sources) -> str:
    """The page with every block that is marked as a table made anew."""
    return fill(page, lambda name: TABLES[name](sources))


def everything(sources: Sources) -> str:
    """A page of all tables: what each is, as its function says, and the table."""
    parts = ["# Every table of the lab\n\nRESULTS.md explains its models, texts and measures.\n"]
    for name, made in ALL.items():
        said = inspect.cleandoc(made.__doc__ or "")
        parts.append(f"## {name.replace('_', ' ')}\n\n{said}\n\n{made(sources)}")
    return "\n".join(parts)
