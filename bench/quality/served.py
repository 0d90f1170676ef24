"""RULER.md: what `pariskv eval` and integrations/vllm/bench/ruler.py found in pretrained models.

A result.json has every answer; what the page needs of it is kept under bench/results:

    python -m quality served NAME result.json --where "one NVIDIA H200, vLLM 0.33.0"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pariskv_core.cli.evaluate_table import points
from pariskv_core.evaluation.record import AVERAGE, FULL

from quality.markdown import fill, fine, table
from quality.sources import RESULTS, read

PAGE = Path(__file__).resolve().parent / "RULER.md"
_OF_A_CELL = (
    *("task", "length", "setting", "count", "score", "lost", "gained", "equal", "beside"),
    *("beside_within", "right", "right_lost", "lost_rank", "mean_error", "worst_error"),
)
_OF_A_SAMPLE = ("setting", "task", "length", "index", "mean_error", "worst_error", "rank")
Run = dict[str, Any]


def kept(result: Run, model: str, where: str) -> Run:
    """Of a result what the page shows: cells without answers, and samples that are lost of those
    that full attention has right."""
    right = [answer for answer in result["lost"] if answer["full_score"] == 1]
    lost = [{name: answer[name] for name in _OF_A_SAMPLE} for answer in right]
    return {
        "model": model,
        "where": where,
        "samples": result["run"]["samples"],
        "seed": result["run"]["seed"],
        "template": result["run"]["template"],
        "settings": result["settings"],
        "cells": [{name: cell[name] for name in _OF_A_CELL} for cell in result["cells"]],
        "lost": sorted(lost, key=lambda each: (each["length"], each["task"], each["index"])),
    }


def write(name: str, result: Path, model: str, where: str) -> Path:
    path = RESULTS / f"ruler-{name}.json"
    made = kept(read(result), model, where)
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return path


def load() -> list[Run]:
    return [read(path) for path in sorted(RESULTS.glob("ruler-*.json"))]


def beside(cell: Run) -> str:
    """Points less than full attention, with 95 %."""
    if cell["beside"] is None:
        return "–"
    return points(cell["beside"], cell["beside_within"], " ± ")


def _cells(run: Run, length: int, setting: str) -> dict[str, Run]:
    own = (length, setting)
    return {cell["task"]: cell for cell in run["cells"] if (cell["length"], cell["setting"]) == own}


def lengths(run: Run) -> list[int]:
    return sorted({cell["length"] for cell in run["cells"]})


def worst_task(run: Run, length: int, setting: str) -> Run:
    tasks = [cell for task, cell in _cells(run, length, setting).items() if task != AVERAGE]
    return min(tasks, key=lambda cell: float(cell["beside"]))


def rights(run: Run, length: int, setting: str) -> tuple[int, int]:
    """Samples that full attention has right, and how many of them are lost."""
    own = _cells(run, length, setting)[AVERAGE]
    return own["right"], own["right_lost"]


def _said(run: Run, length: int, setting: str) -> str:
    """A setting, and of how many tasks it has answers where those are not all."""
    most = max(len(_cells(run, each, FULL)) for each in lengths(run))
    has = len(_cells(run, length, setting))
    return setting if has == most else f"{setting}, {has - 1} tasks"


def _lines(run: Run) -> Iterator[list[str]]:
    for length in lengths(run):
        full = _cells(run, length, FULL)[AVERAGE]
        first = [run["model"], f"{length:,}", _said(run, length, FULL)]
        yield [*first, f"{100 * full['score']:.1f}", "–", "–", "–", "–", "–", "–"]
        for setting in run["settings"]:
            cell = _cells(run, length, setting).get(AVERAGE)
            if setting == FULL or cell is None:
                continue
            worst = worst_task(run, length, setting)
            right, lost = rights(run, length, setting)
            told = cell["mean_error"] is not None
            yield [
                *("", ""),
                _said(run, length, setting),
                f"{100 * cell['score']:.1f}",
                beside(cell),
                f"{cell['lost']} / {cell['gained']}",
                f"{lost} of {right}",
                f"{100 * cell['equal'] / cell['count']:.0f} %",
                f"{fine(cell['mean_error'])}, {cell['worst_error']:.2g}" if told else "–",
                f"{worst['task']} {beside(worst)}",
            ]


def every_setting(runs: Sequence[Run]) -> str:
    head = ["model", "tokens", "setting", "score", "less full", "samples lost / gained"]
    head += ["lost of those full attention has right", "same text", "error: mean, at most"]
    return table([*head, "worst task"], [line for run in runs for line in _lines(run)])


def every_task(runs: Sequence[Run]) -> str:
    """The score of full attention, and what the default has less."""
    columns = [(run, length) for run in runs for length in lengths(run)]
    head = ["task, full / the default less that"]
    head += [f"{run['model']}, {length:,}" for run, length in columns]
    tasks = list(dict.fromkeys(cell["task"] for run in runs for cell in run["cells"]))
    rows = []
    for task in [each for each in tasks if each != AVERAGE]:
        row = [f"`{task}`"]
        for run, length in columns:
            full, ours = (_cells(run, length, each).get(task) for each in (FULL, "default"))
            there = full is not None and ours is not None
            row.append(f"{100 * full['score']:.1f} / {beside(ours)}" if there else "–")
        rows.append(row)
    return table(head, rows)


def every_loss(runs: Sequence[Run], setting: str = "default") -> str:
    """Samples that full attention has right and the default does not."""
    head = ["model", "tokens", "sample", "reported error: mean, at most"]
    rows = []
    for run in runs:
        for each in run["lost"]:
            if each["setting"] != setting:
                continue
            told = "–"
            if each["mean_error"] is not None:
                error, most = fine(each["mean_error"]), f"{each['worst_error']:.2g}"
                told = f"{error}, {most}: larger than {100 * each['rank']:.0f} %"
            sample = f"`{each['task']}` {each['index']}"
            rows.append([run["model"], f"{each['length']:,}", sample, told])
    return table([*head[:-1], f"{head[-1]}, beside those of its task"], rows)


def measured_on(runs: Sequence[Run]) -> str:
    return "".join(f"- {run['model']}: {run['where']}\n" for run in runs)


TABLES: dict[str, Callable[[Sequence[Run]], str]] = {
    "every_setting": every_setting,
    "every_task": every_task,
    "every_loss": every_loss,
    "measured_on": measured_on,
}


def filled(page: str, runs: Sequence[Run]) -> str:
    return fill(page, lambda name: TABLES[name](runs))


def refill() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), load()), encoding="utf-8")
