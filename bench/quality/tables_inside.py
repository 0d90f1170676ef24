"""The tables of RESULTS.md inside pretrained models: KL, budgets by error, needles, tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quality.markdown import fine, share, table
from quality.pretrained import forced, needles, written
from quality.pretrained.ruler import TASKS
from quality.sources import Run, Sources, named, sized

_HEAD = "attends to sinks, window and"
_DECIDE = (
    "sinks and window",
    "best 100",
    "best 400",
    "published",
    "block 64",
    "block 64, 5 %",
    "block 64, tail of 512",
    forced.DEFAULT,
    "the default, tail_rows=2048",
)
_BUDGETS = (
    *("32 rows", forced.FIXED),
    *(f"error {error:g}, at most 400 rows" for error in (0.02, 0.01, 0.005)),
)
_KEPT = (
    "sinks and window, flush 128",
    forced.DEFAULT,
    "ParisKV 1,024, no tail",
    "PRKV 1,024, S = 0",
    "PRKV 1,024, S = 0.25",
    "PRKV 1,024, S = 1",
    "PRKV 1,024, S = 0.25, a window of 64",
    "HARD-KV 1,024, p = 0.9, attention",
    "HARD-KV 1,024, p = 1",
    "HARD-KV 2,048, p = 0.9, snapkv, a window of 32",
    "StreamingLLM 1,024",
)
_ANSWERS = ("full attention", "sinks and window", "best 100", "published", forced.DEFAULT)
_KINDS = ("words", "numbers", "keys", "pairs")  # of needles


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


def _kl(at: dict[str, float]) -> str:
    """And in brackets that of the worst step, where it was recorded."""
    return fine(at["kl"]) + (f" ({at['kl_worst']:.2g})" if "kl_worst" in at else "")


_COLUMNS: dict[str, Callable[[dict[str, float], dict[str, float]], str]] = {
    "rows": lambda at, _: _count(at),
    "predicted error, mean": lambda at, _: fine(at["error"]) if "error" in at else "",
    "worst": lambda at, _: share(at["worst_error"]) if "error" in at else "",
    "KL": lambda at, _: _kl(at),
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
    return of_text(_texts(sources)[0], _DECIDE)


def inside_longer(sources: Sources) -> str:
    """The same after longer texts."""
    return of_text(_texts(sources)[1], _DECIDE)


def every_search(sources: Sources) -> str:
    """What a model makes of a text when each layer sees some rows alone, by every setting.

    KL and bits per byte are against full attention, over 512 given tokens after the shortest text
    of each model.
    """
    return of_text(_texts(sources)[0], list(forced.SEARCHES)[1:])


def every_search_longer(sources: Sources) -> str:
    """The same after longer texts."""
    return of_text(_texts(sources)[1], list(forced.SEARCHES)[1:])


def error(sources: Sources) -> str:
    """What a budget by error takes, and what it gives: of the runs that have one."""
    return _of_errors(sources, _BUDGETS)


def every_error(sources: Sources) -> str:
    """What a budget by error takes, and what it gives, beside fixed numbers of rows.

    *Worst* is the largest error of any step, layer and kv head.
    """
    return _of_errors(sources, forced.ERRORS)


def _of_errors(sources: Sources, names: Iterable[str]) -> str:
    runs = [run for run in sources.reading() if forced.FIXED in run.get("text", {})]
    return of_text(runs, names, ("rows", "predicted error, mean", "worst", *_TEXT[:2]))


def every_text(sources: Sources) -> str:
    """KL on texts of several kinds, in brackets rows, by what the default could be."""
    rows = []
    for key, run in sources.inside.items():
        found = run.get("text", {})
        cells = [
            f"{fine(at['kl'])} ({_count(at)})" if (at := found.get(name)) else "–"
            for name in forced.ACROSS
        ]
        if cells.count("–") < len(cells) - 1:
            rows.append([sized(run), key.split(", ")[1], *cells])
    return table(["model", "text", *forced.ACROSS], rows)


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
    return of_text(_of_policies(sources), _KEPT, ("rows", *_TEXT))


def every_policy(sources: Sources) -> str:
    """The engine's policies inside a model, by every setting, and the rows that they attend to.

    *Rows* are those of the zone that a kv head attends to, mean of every 32nd step; in brackets at
    the first and at a last step. Policies that keep rows flush every 128 tokens and have a window
    of 256 to 384 tokens; that of the others has 256 to 768, unless the table says otherwise.
    """
    return of_text(_of_policies(sources), forced.POLICIES, ("rows", *_TEXT))


def _of_policies(sources: Sources) -> list[Run]:
    own = forced.POLICIES.keys() - forced.SEARCHES.keys()
    return [run for run in sources.reading() if own & run.get("text", {}).keys()]


def after_short_prompts(sources: Sources) -> str:
    """Bits per token more than full attention's, by position after a prompt of 512 tokens.

    4,096 tokens of the same text follow, one by one. ± is the standard error of the difference.
    The last column in brackets is the largest KL of a token, where it was recorded.
    """
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
            worst = f" ({at['worst_kl'][-1]:.2g})" if "worst_kl" in at else ""
            cells = [_count(at), *more, f"{kl:.4f} ± {error:.4f}{worst}"]
            rows.append([f"{named(run)}, {name}", *cells])
    return table(head, rows)


# --- Questions -----------------------------------------------------------------------------------


def facts(sources: Sources) -> str:
    """Needles that each method finds, of all kinds together, and the worst kind by default."""
    rows = []
    for run in sources.reading():
        if full := run.get("facts", {}).get("full attention"):
            cells = [_found(run["facts"].get(name, {}), "all") for name in _ANSWERS]
            what = f"{sized(run)}: {full['all']['asked']:.0f} facts"
            rows.append([what, *cells, _worst_kind([run["facts"]], _KINDS)])
    return table([_HEAD, *_ANSWERS, "worst kind by default"], rows)


def tasks(sources: Sources) -> str:
    """How sure a model is of the right answers of each task: full attention, 100, the default."""
    names, rows = ("full attention", "best 100", forced.DEFAULT), []
    for run in sources.reading():
        if not (of := [run[task] for task in TASKS if task in run]):
            continue
        cells = [
            " / ".join(_sure(run.get(task, {}).get(name, {}).get("all")) for name in names)
            for task in TASKS
        ]
        rows.append([sized(run), *cells, _worst_kind(of, tuple(TASKS))])
    return table([" / ".join(names), *TASKS, "worst task by default"], rows)


def _sure(at: dict[str, float] | None) -> str:
    return f"{at['log_probability']:.2f}" if at else "–"


def _worst_kind(parts: Sequence[dict[str, Any]], kinds: Sequence[str]) -> str:
    """The kind of which the default is the least sure beside full attention, and by how much."""
    apart: dict[str, float] = {}
    for part in parts:
        ours, full = (part.get(name, {}) for name in (forced.DEFAULT, "full attention"))
        for kind in kinds:
            if kind in ours and kind in full:
                apart[kind] = ours[kind]["log_probability"] - full[kind]["log_probability"]
    if not apart:
        return "–"
    worst = min(apart, key=lambda kind: apart[kind])
    return f"{worst} ({apart[worst]:+.2f})"


def facts_by_kind(sources: Sources) -> str:
    """How many needles of each kind each method finds.

    In brackets the mean log-probability of the answers; then that of the worst answer, where it was
    recorded.
    """
    return _found_table(sources, ("facts", "dictionary"), _KINDS)


def tasks_by_method(sources: Sources) -> str:
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
    at = by_kind[kind]
    worst = f"; {at['worst']:.2f}" if "worst" in at else ""
    return f"{at['found']:.0f} ({at['log_probability']:.2f}{worst})"


TABLES: dict[str, Callable[[Sources], str]] = {
    "inside": inside,
    "inside_longer": inside_longer,
    "error": error,
    "int8": int8,
    "facts": facts,
    "tasks": tasks,
    "policies_inside": policies_inside,
}
MORE: dict[str, Callable[[Sources], str]] = {
    "every_search": every_search,
    "every_search_longer": every_search_longer,
    "every_error": every_error,
    "every_text": every_text,
    "facts_by_kind": facts_by_kind,
    "tasks_by_method": tasks_by_method,
    "every_policy": every_policy,
    "after_short_prompts": after_short_prompts,
}
