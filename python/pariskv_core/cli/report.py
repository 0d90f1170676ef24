"""What the demo found, as one table and as one dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

import pariskv_core as pk
from pariskv_core import _machine as machine
from pariskv_core.cli.reference import Sample, Verdict
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import count
from pariskv_core.cli.workload import Fact, Floats, Shape

MISSED_AT_MOST = 0.1  # of the look-ups
MEMORY_AT_MOST = 1.15  # of what the cache holds
# Below this the interpreter alone would be most of what is measured.
_JUDGE_MEMORY_FROM = 1e9


@dataclass(frozen=True)
class LookUp:
    """One fact, asked for in every layer and by every kv head's group."""

    position: int
    depth: float  # of the context at the time, from 0 to 1
    asked_at: int
    found: int
    asked: int
    worst_rank: int  # among those found, from 1
    attention: float  # that dense attention gives it, mean over heads


@dataclass(frozen=True)
class Results:
    shape: Shape
    threads: int
    top_k: int
    facts: list[LookUp]
    verdicts: list[Verdict]  # by layer
    step_seconds: Floats  # of one layer
    dense_seconds: list[float]  # empty: could not be measured
    prefill_seconds: float
    flushes: int
    candidates: float  # per search and kv head
    row_bytes: int
    summary_bytes: int
    held_bytes: int
    peak_bytes: int
    finite: bool
    seconds: float

    @property
    def found(self) -> int:
        return sum(fact.found for fact in self.facts)

    @property
    def asked(self) -> int:
        return sum(fact.asked for fact in self.facts)

    @property
    def found_everywhere(self) -> int:
        return sum(fact.found == fact.asked for fact in self.facts)

    @property
    def step(self) -> float:
        return float(np.median(self.step_seconds))

    @property
    def speedup(self) -> float | None:
        return float(np.median(self.dense_seconds)) / self.step if self.dense_seconds else None

    @property
    def recall(self) -> Floats:
        return np.stack([verdict.recall for verdict in self.verdicts])

    @property
    def error(self) -> Floats:
        return np.stack([verdict.error for verdict in self.verdicts])

    @property
    def share(self) -> float:
        """Of the mass that the best rows would catch, over everything looked into."""
        caught = sum(float(verdict.caught.sum()) for verdict in self.verdicts)
        return caught / sum(float(verdict.best.sum()) for verdict in self.verdicts)

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes / self.held_bytes


def look_up(
    facts: list[Fact], samples: list[list[Sample]], verdicts: list[Verdict]
) -> list[LookUp]:
    """samples and verdicts are by layer."""
    found = []
    for fact in sorted(facts, key=lambda fact: fact.position):
        at = [[sample.step for sample in layer].index(fact.asked_at) for layer in samples]
        # (layers · kv_heads, top_k)
        hit = np.concatenate(
            [layer[i].chosen == fact.position for layer, i in zip(samples, at, strict=True)]
        )
        ranks = hit.argmax(axis=1)[hit.any(axis=1)] + 1
        context = samples[0][at[0]].zone_end
        found.append(
            LookUp(
                fact.position,
                fact.position / context,
                fact.asked_at,
                len(ranks),
                len(hit),
                int(ranks.max(initial=0)),
                float(np.mean([v.watched[i] for v, i in zip(verdicts, at, strict=True)])),
            )
        )
    return found


def problems(results: Results) -> list[str]:
    """What should not be, a sentence each."""
    found = []
    if results.found < (1 - MISSED_AT_MOST) * results.asked:
        missed = results.asked - results.found
        found.append(
            f"{missed} of {results.asked} look-ups missed their fact: the selection does not see "
            "what dense attention sees"
        )
    if not results.finite:
        found.append("Some outputs are not finite numbers")
    if results.held_bytes >= _JUDGE_MEMORY_FROM and results.memory_ratio > MEMORY_AT_MOST:
        found.append(
            f"The process peaked at {results.memory_ratio:.2f} × what the cache holds, which is "
            f"more than {MEMORY_AT_MOST} ×"
        )
    return found


def as_dict(results: Results, found_problems: list[str]) -> dict[str, Any]:
    dense = results.dense_seconds
    return {
        "version": pk.__version__,
        "cpu": machine.cpu_name(),
        "cpu_level": pk.cpu_level(),
        "threads": results.threads,
        "shape": asdict(results.shape),
        "top_k": results.top_k,
        "facts": [asdict(fact) for fact in results.facts],
        "facts_found_everywhere": results.found_everywhere,
        "recall": float(results.recall.mean()),
        "share_of_best_mass": results.share,
        "output_error_median": float(np.median(results.error)),
        "output_error_mean": float(results.error.mean()),
        "output_error_worst": float(results.error.max()),
        "step_seconds_median": results.step,
        "step_seconds_slowest": float(results.step_seconds.max()),
        "dense_step_seconds_median": float(np.median(dense)) if dense else None,
        "dense_step_seconds_slowest": max(dense, default=None),
        "speedup": results.speedup,
        "prefill_seconds": results.prefill_seconds,
        "flushes": results.flushes,
        "candidates_per_head": results.candidates,
        "row_bytes": results.row_bytes,
        "summary_bytes": results.summary_bytes,
        "held_bytes": results.held_bytes,
        "peak_process_bytes": results.peak_bytes,
        "seconds": results.seconds,
        "problems": found_problems,
    }


def introduce(screen: Screen, shape: Shape, threads: int) -> None:
    screen.say(
        f"ParisKV {pk.__version__}, {pk.cpu_level()} on {count(threads, 'thread')} of "
        f"{machine.cpu_name()}",
        style="bold",
    )
    screen.say(f"{shape.tokens:,} tokens, then {shape.steps:,} decode steps")
    screen.say(
        f"{count(shape.layers, 'layer')}, {shape.query_heads} query heads, "
        f"{shape.kv_heads} kv heads, head_dim {shape.head_dim}\n"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _headline(results: Results) -> Text:
    parts = [
        f"{results.found_everywhere} of {len(results.facts)} facts found",
        f"{results.share:.1%} of the best rows' attention",
    ]
    if results.speedup is not None:
        parts.append(f"{results.speedup:.1f} × dense speed")
    return Text(", ".join(parts), style="bold")


def _fact_cell(fact: LookUp) -> list[Text]:
    everywhere = fact.found == fact.asked
    style = "green" if everywhere else "yellow" if fact.found else "red"
    rank = "–" if fact.found == 0 else str(fact.worst_rank)
    return [
        Text("✓" if everywhere else "~" if fact.found else "✗", style=style),
        Text(f"{fact.position:,}"),
        Text(f"{fact.depth:.0%}"),
        Text(f"{fact.found}/{fact.asked}", style=style),
        Text(rank),
        Text(f"{fact.attention:.2f}"),
    ]


def _fact_list(facts: list[LookUp]) -> Table:
    """In two columns, to be read downwards."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    half = (len(facts) + 1) // 2
    for side in range(2):
        grid.add_column("", no_wrap=True)
        for heading in ("position", "depth", "found", "rank", "mass"):
            grid.add_column(heading, justify="right", no_wrap=True)
        if side == 0:
            grid.add_column("  ")
    for i in range(half):
        row = [*_fact_cell(facts[i]), Text("")]
        row += _fact_cell(facts[half + i]) if half + i < len(facts) else []
        grid.add_row(*row)
    return grid


def _quality(results: Results) -> Iterator[tuple[str, str, str, str]]:
    """Rows of: what, ours, the other's, and who that is."""
    error, top_k = results.error, results.top_k
    searches = f"exact top {top_k}, {results.recall.size:,} searches"
    yield f"recall@{top_k}", f"{results.recall.mean():.3f}", "1", searches
    yield "attention mass caught", f"{results.share:.3f}", "1", f"the best possible {top_k} rows"
    median, mean, worst = np.median(error), error.mean(), error.max()
    yield "output error, median", f"{median:.4f}", "0", "dense attention, relative L2"
    yield "output error, mean", f"{mean:.4f}", "0", f"the same; the worst is {worst:.2f}"


def _costs(results: Results) -> Iterator[tuple[str, str, str, str]]:
    step, slowest = results.step, float(results.step_seconds.max())
    dense, dense_slowest, who = "–", "–", "torch is not installed, or failed"
    if results.dense_seconds:
        dense = _milliseconds(float(np.median(results.dense_seconds)))
        dense_slowest = _milliseconds(max(results.dense_seconds))
        who = f"dense torch, bfloat16: {results.speedup:.1f} ×"
    flushes = f"the same; of ours, {results.flushes} flushed"
    yield "step of a layer, median", _milliseconds(step), dense, who
    yield "step of a layer, slowest", _milliseconds(slowest), dense_slowest, flushes

    shape = results.shape
    keys = shape.layers * shape.kv_heads * (shape.tokens + shape.steps)
    held, full = results.held_bytes, 4 * shape.head_dim * keys
    yield "bytes held", _size(held), _size(full), f"a full cache, float16: {held / full:.2f} ×"
    per_key = f"{results.summary_bytes / keys:.0f} bytes per key and kv head"
    yield "key summaries among them", _size(results.summary_bytes), "", per_key
    ratio = f"what the cache holds: {results.memory_ratio:.2f} ×"
    yield "peak memory of process", _size(results.peak_bytes), _size(held), ratio
    rate = shape.layers * shape.kv_heads * shape.tokens / results.prefill_seconds
    note = f"{rate / 1e6:.1f} M keys × heads a second"
    yield "reading the context", f"{results.prefill_seconds:.1f} s", "", note


def _measures(results: Results) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    grid.add_column("", no_wrap=True)
    grid.add_column("ParisKV", justify="right", style="bold", no_wrap=True)
    grid.add_column("against", justify="right", no_wrap=True)
    grid.add_column("")
    for row in (*_quality(results), *_costs(results)):
        grid.add_row(*row)
    return grid


def show(screen: Screen, results: Results, found_problems: list[str]) -> None:
    if screen.as_json:
        return
    terminal = screen.console.is_terminal
    table = Table(
        box=box.ROUNDED if terminal else None,
        show_header=False,
        expand=False,
        show_lines=terminal,
        padding=(0, 1) if terminal else (0, 0, 1, 0),
    )
    table.add_column()
    times = f"found {results.found} of {results.asked} times, by each layer and kv head"
    facts = Text(f"Planted facts: {times}", style="bold")
    meaning = "rank: its worst; mass: of dense attention, mean over heads"
    if results.facts[-1].position >= results.shape.tokens:
        told = f"from position {results.shape.tokens:,} on"
        meaning += f"\n{told}: told while decoding, asked for after the flush"
    table.add_row(Group(facts, _fact_list(results.facts), Text(meaning, style="dim")))
    table.add_row(Group(Text("Against dense attention", style="bold"), _measures(results)))
    screen.say()
    screen.show(_headline(results), table)
    for problem in found_problems:
        screen.say(f"{problem}.", style="red")
    screen.say(f"{results.seconds:.0f} s in all.")
