"""The paper's own experiments: its ideas switched on and off, one at a time, in torch.

Where the coarse stage is asked about, the rerank is exact: what is lost, the coarse stage lost.
"""

from __future__ import annotations

from typing import Any

import torch

from quality.methods import among_best, candidate_count, group_worth, logits_of
from quality.paris import Paris
from quality.sizes import TOP_K, Size, Track
from quality.trial import Moment, Trial, mean_of


def _by_votes(**options: Any) -> Paris:
    """The paper's coarse stage, then exact logits."""
    return Paris(**{"scorer": "votes", "candidates": 0.1, "rerank": "exact", **options})


def switched_on(size: Size, track: Track) -> dict[str, Any]:
    """Norm, rotation and analytic centroids one by one, at the prompt's end and at last (Fig. 10).

    Below them the score of ours, as it was first and as the engine has it now.
    Coarse recall is that of the 100 best by votes alone; final is after an exact rerank of 10 %.
    Without drift the zone grows just as much, which alone makes the 100 best harder to find.
    """
    ends = (size.prompt, size.prompt + size.decoded)
    common = {"tokens": size.prompt, "decoded": size.decoded, "asked_at": ends}
    kinds = {
        "no drift": {**common, "outliers": 0},
        "slow drift": {**common, "outliers": 0, "drift": "slow"},
        "slow drift, outlier channels": {**common, "drift": "slow"},
    }
    switches = {
        "k-means": dict(normalise=False, rotate=False, analytic=False),
        "k-means, N": dict(rotate=False, analytic=False),
        "k-means, R": dict(normalise=False, analytic=False),
        "k-means, N+R": dict(analytic=False),
        "signs, N (T without R)": dict(rotate=False),
        "signs, N+R+T": dict(),
        "sign × norm, first": dict(scorer="standardised"),
        "sign × norm, now": dict(scorer="engine"),
    }
    return {
        name: _before_and_after(size.trials(**changes), switches, track)
        for name, changes in kinds.items()
    }


def _before_and_after(
    trials: list[Trial], switches: dict[str, dict[str, Any]], track: Track
) -> dict[str, list[dict[str, float]]]:
    found = {}
    for name, options in track(list(switches.items()), "norm, rotation, centroids"):
        samples = []
        for trial in trials:
            method, at = _by_votes(**options), []
            for moment in trial.moments([method]):
                best, found_by = moment.best(TOP_K), {}
                for method.rerank in ("none", "exact"):
                    found_by[method.rerank] = moment.quality(method, TOP_K, best).summary()
                at.append({"coarse_recall": found_by["none"]["recall"], **found_by["exact"]})
            samples.append(at)
        found[name] = [mean_of(at) for at in zip(*samples, strict=True)]
    return found


def alpha(size: Size, track: Track) -> dict[str, Any]:
    """Weights that undo the code's misalignment, on and off."""
    rows: dict[str, dict[str, Any]] = {}
    trials = size.trials()
    for on in track([True, False], "alpha"):
        for ratio in (0.02, 0.05, 0.1, 1.0):
            samples = []
            for trial in trials:
                method = Paris(candidates=ratio, alpha=on)
                moment = trial.moment([method])
                exact = logits_of(moment.queries, moment.keys)
                error = (method.estimates(moment.queries) - exact).square().mean().sqrt()
                found = moment.quality(method, TOP_K).summary()
                error = error / exact.square().mean().sqrt()
                samples.append({**found, "logit_error": error.item()})
            rows.setdefault("on" if on else "off", {})[str(ratio)] = mean_of(samples)
    return rows


def design_space(size: Size, track: Track) -> dict[str, Any]:
    """Subspace size and codebook of the coarse stage (paper 5.4); exact rerank of 10 %."""
    choices: list[tuple[int, int | None, int]] = [
        (4, None, 1),
        (8, None, 1),
        (16, None, 1),
        (4, 64, 1),
        (4, 256, 1),
        (8, 64, 1),
        (8, 256, 1),
        (8, 1024, 1),
        (8, 64, 4),
        (8, 256, 4),
        (16, 256, 1),
        (16, 1024, 1),
    ]
    rows = []
    trials = size.trials()
    for part, directions, radii in track(choices, "subspaces and codebooks"):
        samples = []
        for trial in trials:
            method = _by_votes(part=part, directions=directions, radii=radii)
            moment = trial.moment([method])
            samples.append(moment.quality(method, TOP_K).summary())
        count = (directions or 1 << part) * radii
        bits = trials[0].keys.shape[1] // part * (count - 1).bit_length()
        book = f"{directions} directions" if directions else "signs"
        shape = {"part": part, "codebook": book, "radii": radii, "bits_per_key": bits}
        rows.append({**shape, **mean_of(samples)})
    return {"rows": rows}


def tiers(size: Size, track: Track) -> dict[str, Any]:
    """Votes of 1 to 6 tiers.

    tied  keys that have just the score of the last candidate, per candidate
    """
    rows: dict[str, Any] = {}
    trials = size.trials()
    for count in track([1, 2, 3, 4, 5, 6], "tiers"):
        for ratio in (0.02, 0.05, 0.1):
            samples = []
            for trial in trials:
                method = _by_votes(candidates=ratio, tiers=count)
                moment = trial.moment([method])
                scores = method.coarse(moment.queries, moment.resident.lse)
                wanted = candidate_count(ratio, scores.shape[1], TOP_K)
                last = scores.topk(wanted, dim=1).values[:, -1:]
                tied = (scores == last).sum(dim=1).float().mean().item() / wanted
                found = moment.quality(method, TOP_K).summary()
                samples.append({**found, "tied": tied})
            rows.setdefault(str(count), {})[str(ratio)] = mean_of(samples)
    return rows


SCORERS: dict[str, dict[str, Any]] = {
    "sign × norm, now": dict(scorer="engine"),
    "sign × norm, first": dict(scorer="standardised"),
    "sign": dict(scorer="sign"),
    "votes": dict(scorer="votes"),
    "votes, mean query": dict(scorer="votes", group_rule="mean_query"),
}


def lengths(size: Size, track: Track) -> dict[str, Any]:
    """Candidates needed against the length of the context (Fig. 9).

    recall_at_.1     share of the best 100 rows among 10 % candidates
    needed_recall    share of the zone, by the coarse score, that holds 90 % of the best 100 rows
    needed_mass      the same for 95 % of their attention
    """
    rows: dict[str, Any] = {name: {} for name in SCORERS}
    for tokens in track(list(size.lengths), "lengths"):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in SCORERS}
        for trial in size.trials(tokens=tokens):
            moment = trial.moment()
            best = moment.best(TOP_K)
            worth = group_worth(logits_of(moment.queries, moment.keys), moment.resident.lse)
            worth = worth.gather(1, best)
            for name, options in SCORERS.items():
                method = Paris(**options, rerank="exact")
                method.prefill(moment.keys, None)
                found[name].append(_needed(method, moment, best, worth))
        for name, samples in found.items():
            rows[name][str(tokens)] = mean_of(samples)
    return rows


def _needed(
    method: Paris, moment: Moment, best: torch.Tensor, worth: torch.Tensor
) -> dict[str, float]:
    mean = method.group_rule == "mean_query"
    queries = moment.queries.mean(dim=1, keepdim=True) if mean else moment.queries
    resident = moment.resident.lse[:, : queries.shape[1]]
    places, tenth = [], []
    for step, lse, wanted in zip(queries, resident, best, strict=True):
        scores = method.coarse(step[None], lse[None])
        order = scores[0].argsort(descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        places.append(place[wanted])
        tenth.append(among_best(scores, round(0.1 * len(order)))[0, wanted].float().mean())
    ranks, by_rank = torch.stack(places).sort(dim=1)
    caught = worth.gather(1, by_rank).cumsum(dim=1) / worth.sum(dim=1, keepdim=True)
    enough = (caught < 0.95).sum(dim=1).clamp(max=ranks.shape[1] - 1)
    zone = len(moment.keys)
    ninety = ranks[:, int(0.9 * ranks.shape[1]) - 1]
    return {
        "recall_at_.1": torch.stack(tenth).mean().item(),
        "needed_recall": ((ninety + 1) / zone).mean().item(),
        "needed_mass": ((ranks.gather(1, enough[:, None]) + 1) / zone).mean().item(),
    }
