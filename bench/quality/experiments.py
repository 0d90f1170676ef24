"""The questions put to workloads; each function is one and answers with a plain dict.

`track` wraps the things that are gone through one by one, for a progress bar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from quality import workloads
from quality.methods import Method, group_worth, logits_of, make_method
from quality.sizes import TOP_K, Size, Track
from quality.trial import CONTENDERS, WHILE_DRIFTING, Moment, Trial, mean_of, rounded


def ingredients(size: Size, track: Track) -> dict[str, Any]:
    """What each peculiarity of keys does to each method: a row per workload, 100 rows fetched."""
    table = {}
    for name, spec in track(list(workloads.variants(size.spec()).items()), "ingredients"):
        found: dict[str, list[dict[str, float]]] = {method: [] for method in CONTENDERS}
        for seed in range(size.seeds):
            trial = Trial(dataclasses.replace(spec, seed=seed), size.device)
            methods = {method: make() for method, make in CONTENDERS.items()}
            moment = trial.moment(list(methods.values()))
            best = moment.best(TOP_K)
            for method, made in methods.items():
                found[method].append(_with_needle(moment, made, best))
        table[name] = {method: mean_of(samples) for method, samples in found.items()}
    return table


def _with_needle(moment: Moment, method: Method, best: torch.Tensor) -> dict[str, float]:
    chosen = moment.chosen(method, best.shape[1])
    found = moment.measured(chosen, best).summary()
    if len(moment.planted):
        hits = (chosen == moment.planted[:, None]).any(dim=1)
        found["planted_found"] = hits.float().mean().item()
    return found


def drift(size: Size, track: Track, kind: str) -> dict[str, Any]:
    """Recall and share over decode position while the keys move (Fig. 1 and 10)."""
    marks = tuple(size.prompt + size.decoded * i // 8 for i in range(9))
    changes = {"tokens": size.prompt, "decoded": size.decoded, "asked_at": marks, "drift": kind}
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in WHILE_DRIFTING}
    for trial in track(size.trials(**changes), f"drift, {kind}"):
        methods = {name: make() for name, make in WHILE_DRIFTING.items()}
        for name in methods:
            found[name].append([])
        for moment in trial.moments(list(methods.values())):
            best = moment.best(TOP_K)
            for name, method in methods.items():
                found[name][-1].append(moment.quality(method, TOP_K, best).summary())
    curves = {
        name: [mean_of(at) for at in zip(*seeds, strict=True)] for name, seeds in found.items()
    }
    return {"positions": marks, "prompt": size.prompt, "methods": curves}


BUDGETS = (50, 100, 256, 1024, 2048, 4096)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def budgets(size: Size, track: Track) -> dict[str, Any]:
    """Each method against the number of rows that it may fetch."""
    rows: dict[str, Any] = {name: {} for name in CONTENDERS}
    moments = []
    for trial in size.trials(tokens=size.long):
        methods = {name: make() for name, make in CONTENDERS.items()}
        moments.append((trial.moment(list(methods.values())), methods))
    for budget in track(list(BUDGETS), "budgets"):
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for moment, methods in moments:
            best = moment.best(budget)
            for name, method in methods.items():
                samples[name].append(moment.quality(method, budget, best).summary())
        for name, found in samples.items():
            rows[name][str(budget)] = mean_of(found)
    return rows


def candidates(size: Size, track: Track) -> dict[str, Any]:
    """The engine against the share of the keys that it reranks, 100 rows fetched."""
    settings: dict[str, Callable[[float], Method]] = {
        "pariskv_core": lambda ratio: make_method("engine", candidates=ratio),
        "votes": lambda ratio: make_method("engine", candidates=ratio, scorer="votes"),
        "mean query": lambda r: make_method("engine", candidates=r, group_rule="mean_query"),
        "published": lambda ratio: make_method("published", candidates=ratio),
    }
    rows: dict[str, Any] = {name: {} for name in settings}
    trials = size.trials(tokens=size.long)
    for ratio in track([*RATIOS, 1.0], "candidates"):
        for name, make in settings.items():
            samples = []
            for trial in trials:
                method = make(ratio)
                samples.append(trial.moment([method]).quality(method, TOP_K).summary())
            rows[name][str(ratio)] = mean_of(samples)
    return rows


def workload_facts(size: Size) -> dict[str, float]:
    """That search matters here: what the best rows hold, and what any rows would."""
    moment = size.trials()[0].moment()
    worth = group_worth(logits_of(moment.queries, moment.keys), moment.resident.lse)
    top = worth.topk(TOP_K, dim=1).values
    return rounded(
        {
            "best_100": top.sum(dim=1).mean().item(),
            "best_one": top[:, 0].mean().item(),
            "any_100": (worth.median(dim=1).values * TOP_K).mean().item(),
        }
    )
