"""Methods on synthetic keys. Each experiment answers with a dict of shares, as results files do.

`track` wraps the cases that are gone through one by one, for a progress bar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quality import workloads
from quality.methods import Method, make_method
from quality.sources import WORST
from quality.walk import Moment, Walk

Track = Callable[[Sequence[Any], str], Iterable[Any]]
Makers = dict[str, Callable[[], Method]]
BUDGETS = (50, 100, 256, 1024, 2048, 4096)
POINTS = 9  # positions at which a drift is measured


@dataclass(frozen=True)
class Size:
    """How much of everything; the defaults take some minutes on two cores."""

    tokens: int = 16_384  # of a prompt
    long: int = 65_536  # of the prompt where a small share of it must still be many rows
    prompt: int = 8_192  # before the drift
    decoded: int = 16_384  # during it
    seeds: int = 2
    steps: int = 24

    def specs(self, base: workloads.Spec | None = None, **changes: Any) -> list[workloads.Spec]:
        """A workload for each seed."""
        of = {"tokens": self.tokens, "steps": self.steps} | changes
        spec = dataclasses.replace(base or workloads.Spec(), **of)
        return [dataclasses.replace(spec, seed=seed) for seed in range(self.seeds)]


BLOCKS = "ParisKV, blocks of 64, 5 %"
WHOLE = "ParisKV, whole keys, 5 %"
_K_MEANS = partial(make_method, "pqcache", subspaces=16, bits=8)
_PEERS: Makers = {
    "PQCache 16×8": _K_MEANS,
    "PQCache 2×6": partial(make_method, "pqcache"),
    "MagicPIG": partial(make_method, "magicpig"),
    "Quest": partial(make_method, "quest"),
    "ArkVale": partial(make_method, "arkvale"),
    "SnapKV": partial(make_method, "snapkv"),
    "StreamingLLM": partial(make_method, "window"),
}
CONTENDERS: Makers = {
    BLOCKS: partial(make_method, "engine", candidates=0.05, block=64),
    WHOLE: partial(make_method, "engine", candidates=0.05),
    "published, 10 %": partial(make_method, "published", candidates=0.1),
    **_PEERS,
}
WHILE_DRIFTING: Makers = {
    "ParisKV, blocks of 64, 10 %": partial(make_method, "engine", candidates=0.1, block=64),
    "ParisKV, whole keys, 10 %": partial(make_method, "engine", candidates=0.1),
    "published, 10 %": partial(make_method, "published", candidates=0.1),
    "PQCache 16×8, learnt anew": partial(_K_MEANS, refresh=1),
    **_PEERS,
}


def _shares(moment: Moment, method: Method, best: torch.Tensor) -> torch.Tensor:
    """(steps)"""
    return moment.quality(method, best).share()


def _share(moment: Moment, method: Method, best: torch.Tensor) -> float:
    return _shares(moment, method, best).mean().item()


def _made(makers: Makers) -> dict[str, Method]:
    return {name: make() for name, make in makers.items()}


def _mean(samples: Sequence[float]) -> float:
    return float(f"{sum(samples) / len(samples):.4g}")


def on_workloads(size: Size, track: Track) -> dict[str, Any]:
    """What each peculiarity of keys does to each method: 100 rows fetched.

    The mean of steps, then the worst step of each method.
    """
    table = {}
    for name, base in track(list(workloads.variants(workloads.Spec()).items()), "workloads"):
        found: dict[str, list[torch.Tensor]] = {method: [] for method in CONTENDERS}
        for spec in size.specs(base):
            methods = _made(CONTENDERS)
            (moment,) = Walk(spec).moments(list(methods.values()))
            best = moment.best()
            for method, made in methods.items():
                found[method].append(_shares(moment, made, best))
        steps = {method: torch.cat(of).tolist() for method, of in found.items()}
        table[name] = {method: _mean(of) for method, of in steps.items()}
        table[name] |= {method + WORST: _mean([min(of)]) for method, of in steps.items()}
    return table


def drift(size: Size, track: Track, kind: str) -> dict[str, Any]:
    """Shares by decode position while the keys move."""
    last = POINTS - 1
    marks = tuple(size.prompt + size.decoded * i // last for i in range(POINTS))
    specs = size.specs(tokens=size.prompt, decoded=size.decoded, asked_at=marks, drift=kind)
    found: dict[str, list[list[float]]] = {name: [] for name in WHILE_DRIFTING}
    for spec in track(specs, f"drift, {kind}"):
        methods = _made(WHILE_DRIFTING)
        for of in found.values():
            of.append([])
        for moment in Walk(spec).moments(list(methods.values())):
            best = moment.best()
            for name, method in methods.items():
                found[name][-1].append(_share(moment, method, best))
    shares = {name: [_mean(at) for at in zip(*of, strict=True)] for name, of in found.items()}
    return {"positions": marks, "share": shares}


def budgets(size: Size, track: Track) -> dict[str, Any]:
    """Each method against the number of rows that it may fetch."""
    asked = []
    for spec in size.specs(tokens=size.long):
        methods = _made(CONTENDERS)
        asked += [(moment, methods) for moment in Walk(spec).moments(list(methods.values()))]
    table: dict[str, Any] = {name: {} for name in CONTENDERS}
    for rows in track(list(BUDGETS), "budgets"):
        found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for moment, methods in asked:
            best = moment.best(rows)
            for name, method in methods.items():
                found[name].append(_share(moment, method, best))
        for name, of in found.items():
            table[name][str(rows)] = _mean(of)
    return table


EXPERIMENTS: dict[str, Callable[[Size, Track], dict[str, Any]]] = {
    "workloads": on_workloads,
    "budgets": budgets,
    "slow_drift": partial(drift, kind="slow"),
    "switch": partial(drift, kind="switch"),
}
