"""The tables of RESULTS.md inside pretrained models: KL, budgets by error, needles, tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quality.markdown import fine, share, table
from quality.pretrained import forced, needles, written
from quality.pretrained.ruler import TASKS
from quality.sources import Run, Sources, named, sized

_HEAD = "attends to sinks, window and"


# --- Text that is given --------------------------------------------------------------------------


def _texts(sources: Sources) -> tuple[list[Run], list[Run]]:
    """Each model's run on the shortest text, and on longer ones."""
    runs = [run for run in sources.reading() if "text" in run]
    least = {run["model"]: run["tokens"] for run in sorted(runs, key=lambda r: -r["tokens"])}
    short = [run for run in runs if run["tokens"] == least[run["model"]]]
    longer = [run for run in runs if run not in short]
    return short, sorted(longer, key=lambda run: run["tokens"])


def _count(at: dict[str, float]) -> str:
    """Rows, and from which number to which they change."""
    if "rows" not in at:
        return ""
    ends = [f"{at.get(f'rows_{end}', at['rows']):,.0f}" for end in ("first", "last")]
    mean = f"{at['rows']:,.0f}"
    return mean if ends[0] == ends[1] else f"{mean} ({ends[0]} → {ends[1]})"


_COLUMNS: dict[str, Callable[[dict[str, float], dict[str, float]], str]] = {
    "rows": lambda at, _: _count(at),
    "predicted error, mean": lambda at, _: fine(at["error"]) if "error" in at else "",
    "worst": lambda at, _: share(at["worst_error"]) if "error" in at else "",
    "KL": lambda at, _: fine(at["kl"]),
    "same top": lambda at, _: share(at["same_top"]),
    "bits per byte": lambda at, full: (
        f"{100 * (at['bits_per_byte'] / full['bits_per_byte'] - 1):+.2f} %"
    ),
}
_TEXT = ("KL", "same top", "bits per byte")


def of_text(runs: Sequence[Run], names: Iterable[str], columns: Sequence[str] = _TEXT) -> str:
    """What a model makes of a text that goes on, by method: some columns of each run."""
    head = [_HEAD]
    for run in runs:
        head += [f"{sized(run)}: {columns[0]}", *columns[1:]]
    rows = []
    for name in names:
        cells = []
        for run in runs:
            at, full = run["text"].get(name), run["text"]["full attention"]
            cells += [_COLUMNS[column](at, full) if at else "–" for column in columns]
        if any(cell != "–" for cell in cells):
            rows.append([f"**{name}**" if name == forced.DEFAULT else name, *cells])
    return table(head, rows)


def inside(sources: Sources) -> str:
    """KL, the same top token and bits of the text that follows, by what is attended to."""
    return of_text(_texts(sources)[0], list(forced.SEARCHES)[1:])


def inside_longer(sources: Sources) -> str:
    """The same after longer texts."""
    return of_text(_texts(sources)[1], list(forced.SEARCHES)[1:])


def error(sources: Sources) -> str:
    """What a budget by error takes, and what it gives: of the runs that have one."""
    runs = [run for run in sources.reading() if forced.FIXED in run.get("text", {})]
    return of_text(runs, forced.ERRORS, ("rows", "predicted error, mean", "worst", *_TEXT[:2]))


def int8(sources: Sources) -> str:
    """What rows in 8 bits cost beside rows as they come: KL, tokens, needles."""
    head = ["rows of the zone as they come, and in 8 bits", "KL", "8 bits", "difference"]
    head += ["same top", "8 bits", "facts", "8 bits"]
    rows = []
    for run in sources.reading():
        names = (forced.WHOLE_ROWS, forced.NARROW_ROWS)
        whole, narrow = (run.get("text", {}).get(name) for name in names)
        if not (whole and narrow):
            continue
        kl = [f"{at['kl']:.5f}".removeprefix("0") for at in (whole, narrow)]
        kl.append(f"{narrow['kl'] - whole['kl']:+.5f}".replace("0.", ".", 1))
        found = [_found(run.get("facts", {}).get(name, {}), "all") for name in names]
        same = [share(at["same_top"]) for at in (whole, narrow)]
        rows.append([sized(run), *kl, *same, *found])
    return table(head, rows)


def policies_inside(sources: Sources) -> str:
    """The engine's policies that keep rows, and the rows that they attend to."""
    own = forced.POLICIES.keys() - forced.SEARCHES.keys()
    runs = [run for run in sources.reading() if own & run.get("text", {}).keys()]
    return of_text(runs, forced.POLICIES, ("rows", *_TEXT))


def after_short_prompts(sources: Sources) -> str:
    """Bits per token more than full attention's, by position after a short prompt."""
    rows, head = [], ["more bits per token"]
    for run in sources.reading():
        of = run.get("written", {})
        for name in (name for name in written.ASKED if name in of):
            at = of[name]
            ends = [(i + 1) * at["stretch"] for i in range(len(at["more_bits"]))]
            spans = [f"{end - at['stretch']:,} to {end:,}" for end in ends]
            head = [head[0], "rows", *spans, "KL, last"]
            more = [f"{mean:+.3f} ± {error:.3f}" for mean, error in at["more_bits"]]
            kl, error = at["kl"][-1]
            cells = [_count(at), *more, f"{kl:.4f} ± {error:.4f}"]
            rows.append([f"{named(run)}, {name}", *cells])
    return table(head, rows)


# --- Questions -----------------------------------------------------------------------------------


def facts(sources: Sources) -> str:
    """How many needles each method finds."""
    return _found_table(sources, ("facts", "dictionary"), ("words", "numbers", "keys", "pairs"))


def tasks(sources: Sources) -> str:
    """The same of tasks after RULER and GraphWalks."""
    return _found_table(sources, tuple(TASKS), tuple(TASKS))


def _found_table(sources: Sources, parts: Sequence[str], kinds: Sequence[str]) -> str:
    asked: list[tuple[str, dict[str, Any], str]] = []  # what was asked, of which part, the kind
    for run in sources.reading():
        for part in parts:
            known = run.get(part, {}).get("full attention", {})
            for kind in kinds:
                if kind in known:
                    said = f"{sized(run)}: {kind} of {known[kind]['asked']:.0f}"
                    asked.append((said, run[part], kind))
    names = [n for n in needles.ASKED if any(kind in of.get(n, {}) for _, of, kind in asked)]
    rows = [[said, *(_found(of.get(n, {}), kind) for n in names)] for said, of, kind in asked]
    return table([_HEAD, *names], rows)


def _found(by_kind: dict[str, dict[str, float]], kind: str) -> str:
    if kind not in by_kind:
        return "–"
    return f"{by_kind[kind]['found']:.0f} ({by_kind[kind]['log_probability']:.2f})"


TABLES: dict[str, Callable[[Sources], str]] = {
    "inside": inside,
    "inside_longer": inside_longer,
    "error": error,
    "int8": int8,
    "facts": facts,
    "tasks": tasks,
    "policies_inside": policies_inside,
    "after_short_prompts": after_short_prompts,
}
