"""What a run found: a score for each task, length and setting, beside full attention's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pariskv_core._failures import CannotRunError
from pariskv_core.evaluation.answers import Answer
from pariskv_core.evaluation.statistics import Interval, interval, of_mean, share_below
from pariskv_core.evaluation.tasks import ALL

FULL = "full"
AVERAGE = "all tasks"


@dataclass(frozen=True)
class Cell:
    """Of one task, length and setting; or of all tasks.

    Agreement is counted over samples that the baseline answered too: same, where both scores are
    equal; lost, where the baseline's is higher; gained, where it is lower.
    """

    task: str
    length: int
    setting: str
    count: int
    score: float
    within: Interval
    same: int | None = None  # None: there is no baseline, or this is it
    compared: int = 0
    agreement: Interval | None = None
    lost: int = 0
    gained: int = 0
    equal: int = 0  # answers of the same text, right or wrong
    beside: float | None = None  # mean of the scores less the baseline's
    beside_within: Interval | None = None
    right: int = 0  # samples that the baseline answers rightly
    right_lost: int = 0  # and this setting does not
    lost_rank: float | None = None  # mean of those of lost samples, see Loss
    mean_error: float | None = None
    worst_error: float | None = None
    worst: Answer | None = None  # the sample that is worth least


@dataclass(frozen=True)
class Loss:
    """A sample that the baseline answers better than a setting does."""

    answer: Answer
    full: Answer
    # Whether errors point at it: the share of its task's samples whose mean error is smaller; .5 on
    # average if they do not. None: errors are not reported.
    rank: float | None = None


@dataclass
class Result:
    run: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(each.setting for each in self.answers))

    @property
    def baseline(self) -> str | None:
        return FULL if FULL in self.settings else self.run.get("baseline")

    @property
    def tasks(self) -> list[str]:
        had = {each.task for each in self.answers}
        return [task for task in ALL if task in had]

    @property
    def lengths(self) -> list[int]:
        return sorted({each.length for each in self.answers})

    def of(self, setting: str | None) -> dict[tuple[str, int, int], Answer]:
        return {
            (each.task, each.length, each.index): each
            for each in self.answers
            if each.setting == setting
        }

    def cells(self) -> list[Cell]:
        full = self.of(self.baseline)
        groups: dict[tuple[int, str, str], list[Answer]] = {}
        for each in self.answers:
            for task in (each.task, AVERAGE):
                groups.setdefault((each.length, task, each.setting), []).append(each)
        ranks: dict[tuple[int, str, str], list[float]] = {}
        for loss in self.losses():
            for task in (loss.answer.task, AVERAGE):
                if loss.rank is not None:
                    at = (loss.answer.length, task, loss.answer.setting)
                    ranks.setdefault(at, []).append(loss.rank)
        found = []
        for length in self.lengths:
            for task in [*self.tasks, AVERAGE]:
                for setting in self.settings:
                    here = groups.get((length, task, setting), [])
                    if here and (task != AVERAGE or len({each.task for each in here}) > 1):
                        beside = full if setting != self.baseline else {}
                        told = ranks.get((length, task, setting), [])
                        found.append(_cell(task, length, setting, here, beside, told))
        return found

    def losses(self) -> list[Loss]:
        """Largest losses first, and among equal ones the largest reported errors."""
        full = self.of(self.baseline)
        errors: dict[tuple[str, str, int], list[float]] = {}
        for each in self.answers:
            if each.mean_error is not None:
                at = (each.setting, each.task, each.length)
                errors.setdefault(at, []).append(each.mean_error)
        found = []
        for each in self.answers:
            beside = full.get((each.task, each.length, each.index))
            if beside is None or beside.score <= each.score:
                continue
            own, rank = each.mean_error, None
            if own is not None:
                rank = share_below(own, errors[each.setting, each.task, each.length])
            found.append(Loss(each, beside, rank))
        return sorted(
            found,
            key=lambda loss: (
                loss.answer.score - loss.full.score,
                -(loss.answer.worst_error or 0.0),
                loss.answer.key,
            ),
        )

    def record(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "settings": self.settings,
            "baseline": self.baseline,
            "cells": [asdict(cell) for cell in self.cells()],
            "lost": [
                {
                    **asdict(loss.answer),
                    "full_answer": loss.full.answer,
                    "full_score": loss.full.score,
                    "rank": loss.rank,
                }
                for loss in self.losses()
            ],
            "answers": [asdict(each) for each in self.answers],
        }


def _cell(
    task: str,
    length: int,
    setting: str,
    here: Sequence[Answer],
    full: Mapping[tuple[str, int, int], Answer],
    ranks: Sequence[float],
) -> Cell:
    """ranks  of samples that are lost"""
    score = sum(each.score for each in here) / len(here)
    means = [each.mean_error for each in here if each.mean_error is not None]
    worsts = [each.worst_error for each in here if each.worst_error is not None]
    pairs = [
        (each, full[key]) for each in here if (key := (each.task, each.length, each.index)) in full
    ]
    same = sum(own.score == other.score for own, other in pairs)
    apart = [own.score - other.score for own, other in pairs]
    return Cell(
        task=task,
        length=length,
        setting=setting,
        count=len(here),
        score=score,
        within=interval(score, len(here)),
        same=same if pairs else None,
        compared=len(pairs),
        agreement=interval(same / len(pairs), len(pairs)) if pairs else None,
        lost=sum(own.score < other.score for own, other in pairs),
        gained=sum(own.score > other.score for own, other in pairs),
        equal=sum(own.answer == other.answer for own, other in pairs),
        beside=sum(apart) / len(apart) if pairs else None,
        beside_within=of_mean(apart) if pairs else None,
        right=sum(other.score == 1 for _, other in pairs),
        right_lost=sum(own.score < other.score == 1 for own, other in pairs),
        lost_rank=sum(ranks) / len(ranks) if ranks else None,
        mean_error=sum(means) / len(means) if means else None,
        worst_error=max(worsts) if worsts else None,
        worst=min(here, key=lambda each: (each.score, -(each.worst_error or 0.0), each.key)),
    )


# Runs of several servers.

_ALIKE = ("tokenizer", "template", "seed", "samples")


def joined(paths: Iterable[str]) -> Result:
    """One result of several files. The baseline is `full` in any, else the first file's first."""
    result: Result | None = None
    for path in paths:
        run, answers = _read(path)
        if result is None:
            result = Result({**{name: run.get(name) for name in _ALIKE}, "files": []})
        for name in _ALIKE:
            if run.get(name) != result.run[name]:
                raise CannotRunError(
                    f"--compare: {path} has another {name} ({run.get(name)}) than the file before "
                    f"it ({result.run[name]}): answers to other prompts cannot be compared"
                )
        _add(result, path, answers)
    assert result is not None
    result.run["baseline"] = FULL if FULL in result.settings else result.settings[0]
    return result


def _read(path: str) -> tuple[dict[str, Any], list[Answer]]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return dict(found["run"]), [Answer(**each) for each in found["answers"]]
    except OSError as reason:
        raise CannotRunError(f"--compare: cannot read {path}: {reason.strerror}") from reason
    except (ValueError, KeyError, TypeError):
        raise CannotRunError(f"--compare: {path} is no result of pariskv eval") from None


def _add(result: Result, path: str, answers: Sequence[Answer]) -> None:
    twice = {each.setting for each in answers} & set(result.settings)
    if twice:
        raise CannotRunError(
            f"--compare: {path} has answers of {', '.join(sorted(twice))}, as a file before it "
            "has; run one of them with another --name"
        )
    if not answers:
        raise CannotRunError(f"--compare: {path} has no answers")
    prompts = {(each.task, each.length, each.index): each.prompt for each in result.answers}
    for each in answers:
        at = (each.task, each.length, each.index)
        if prompts.get(at, each.prompt) != each.prompt:
            raise CannotRunError(
                f"--compare: {path} has another prompt for sample {each.index} of {each.task} at "
                f"{each.length:,} tokens: answers to other prompts cannot be compared"
            )
    result.answers += answers
    result.run["files"].append(path)
