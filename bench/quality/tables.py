"""The tables of RESULTS.md, as markdown from the results: python -m quality tables [--write].

A table is a function of `Sources`. To add one, put the function into a TABLES, and its name between
marks on the page:

    <!-- table: name -->
    <!-- end -->

`Sources.reading(text)` has runs inside models on a text, `Sources.of(part)` runs on captured keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from quality import tables_claims, tables_inside, tables_keys
from quality.experiments import BUDGETS
from quality.markdown import fine, share, table
from quality.sources import Sources, sized

PAGE = Path(__file__).resolve().parent / "RESULTS.md"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
_SHARES = dict[str, float]  # by method
DRIFTS = ("slow_drift", "switch")  # experiments that share a table


def workloads(sources: Sources) -> str:
    """Share by workload and method; the best of a row stands out."""
    rows: list[list[str]] = []
    names: list[str] = []
    for name, line in sources.synthetic.get("workloads", {}).items():
        names, best = list(line), max(line.values())
        cells = [f"**{share(at)}**" if at == best else share(at) for at in line.values()]
        rows.append([name, *cells])
    return table(["share, 100 rows", *names], rows)


def budgets(sources: Sources) -> str:
    """Share by method and budget."""
    found = sources.synthetic.get("budgets", {})
    head = ["share", *(f"k = {rows:,}" for rows in BUDGETS)]
    return table(head, [[name, *map(share, line.values())] for name, line in found.items()])


def structured(sources: Sources) -> str:
    """Errors of outputs by kind of keys, and what the sample leaves of the error without one."""
    rows, names = [], list[str]()
    for kind, line in sources.structured.items():
        names = list(line)
        without, *_, sampled = line.values()
        rows.append([kind, *(f"{at:.2g}" for at in line.values()), f"{sampled / without:.2f}"])
    return table(["error of the output, 100 rows", *names, "of no tail's"], rows)


def predicted(sources: Sources) -> str:
    """Predicted over true errors, by kind of keys and by model; in brackets both."""
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
    """Share after the prompt, half way and at last, while keys drift slowly or switch at once."""
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
    yield from found.get("workloads", {}).items()
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
    "budgets": budgets,
    "structured": structured,
    "predicted": predicted,
    "drift": drift,
    "peers_win": peers_win,
    "measured_on": measured_on,
}


def filled(page: str, sources: Sources) -> str:
    """The page with every block that is marked as a table made anew."""
    return _BLOCK.sub(lambda found: found[1] + TABLES[found[2]](sources) + found[3], page)
