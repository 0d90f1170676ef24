"""What HARD-KV's paper says of counts, temperatures and pruning, on a model's queries and keys."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quality.experiments import Track
from quality.kept_rows import POOLED, counts_by_mass, mass_of_most, observed
from quality.methods import logits_of
from quality.pretrained.claims_prkv import Sums, recall
from quality.pretrained.trail import SINK, UPDATE, Head, blocks

ROWS = (256, 512, 1024, 2048)
LENGTHS = (1024, 2048, 4096, 7168)  # of zones
SHARE, LOOKS = 0.9, 32
METRICS = ("attention", "SnapKV", "R-KV")
MIXED, ALIKE = 0.07, 0.5  # R-KV: attention's part; the cosine from which keys are duplicates
_STRIDE = 16
_FEWER = 4  # of the last queries, and of heads, one in so many is calibrated
_LEAST, _MOST = 1e-3, 10.0  # of temperatures


# --- Counts and temperatures ---------------------------------------------------------------------


def needed(logits: Tensor, share: float = SHARE) -> Tensor:
    """(rows): as many of the largest as hold this share of each row's softmax."""
    largest = logits.softmax(dim=-1).sort(dim=-1, descending=True).values.double().cumsum(-1)
    return (largest < share * largest[:, -1:]).sum(dim=-1) + 1


def temperature(scores: Tensor, counts: Tensor, share: float = SHARE) -> Tensor:
    """(rows): at which the `counts` largest scores hold the share, as near as the limits allow."""
    ordered = scores.sort(dim=-1, descending=True).values.double()
    ordered = ordered - ordered[:, :1]
    among = torch.arange(ordered.shape[1]) < counts[:, None]
    low = torch.full((len(scores),), _LEAST, dtype=torch.float64)
    high = torch.full_like(low, _MOST)
    for _ in range(30):
        middle = (low + high) / 2
        weights = (ordered / middle[:, None]).exp_()
        enough = (weights * among).sum(-1) > share * weights.sum(-1)
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def redundancy(keys: Tensor) -> Tensor:
    """R-KV's: a softmax of how alike a key is to the others, the latest duplicate spared."""
    unit = keys / (keys.norm(dim=1, keepdim=True) + 1e-8)
    alike = (unit @ unit.T).fill_diagonal_(0)
    places = torch.arange(1, len(keys) + 1, dtype=alike.dtype)
    latest = ((alike > ALIKE) * places).amax(dim=1).long() - 1
    some = latest >= 0
    alike[some.nonzero()[:, 0], latest[some]] = 0
    return alike.mean(dim=0).softmax(dim=0)


def scores_of(metric: str, logits: Tensor, keys: Tensor) -> Tensor:
    """A metric's scores (queries, tokens), to be divided by a temperature, of logits."""
    if metric == "attention":
        return logits
    if metric == "SnapKV":
        wide = torch.nn.functional.max_pool1d(logits[None], POOLED, 1, POOLED // 2)
        return wide[0]
    mixed = MIXED * logits.softmax(-1) - (1 - MIXED) * redundancy(keys)
    mixed = mixed - mixed.amin(dim=-1, keepdim=True)
    return (mixed / mixed.sum(dim=-1, keepdim=True) + 1e-10).log()


def calibration(head: Head, found: Sums, at: Sequence[int] = (0, 512)) -> None:
    """Counts of Top-p by true attention, by a metric, and with temperatures; those over time."""
    first: dict[str, float] = {}
    for begin in at:
        if begin >= head.steps:
            continue
        keys = head.zone(begin)
        logits = logits_of(head.asking(begin, LOOKS)[::_FEWER], keys).amax(dim=1)
        true, chances = needed(logits), logits.softmax(-1)
        for metric in METRICS:
            scores = scores_of(metric, logits, keys)
            own = temperature(scores, true)
            shared = own.median().item()
            first.setdefault(metric, shared)
            changed = math.exp(abs(math.log(shared / first[metric])))
            found[f"{metric}, temperature changed by a factor, {begin}"].append(changed)
            for how, heat in (
                ("none", torch.ones(len(scores), 1)),
                ("each query", own[:, None].float()),
                ("each head", torch.full((len(scores), 1), shared)),
                ("the first", torch.full((len(scores), 1), first[metric])),
            ):
                counts = needed(scores / heat)
                order = scores.sort(dim=-1, descending=True, stable=True).indices
                held = chances.gather(1, order).cumsum(-1).gather(1, counts[:, None] - 1)
                when = "now" if begin == 0 else "later"
                ratio = (counts / true).log().mean().exp().item()
                found[f"{metric}, {how}, {when}: count over true"].append(ratio)
                found[f"{metric}, {how}, {when}: attention held"].append(held.mean().item())
            found["true count"].append(true.float().mean().item())


# --- Counts per head -----------------------------------------------------------------------------


def output_error(attention: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """(steps): how far the output over the kept rows (tokens) bool is from full attention's."""
    whole = attention @ values
    some = attention * kept
    out = some @ values / some.sum(dim=-1, keepdim=True)
    return (out - whole).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)


def counts(heads: Sequence[Head]) -> dict[str, dict[str, float]]:
    """One count for all heads, counts by Top-p, and those at most twice the mean: equal means."""
    found: Sums = defaultdict(list)
    for begin in range(0, heads[0].steps, 2 * UPDATE):
        votes = [observed(head.zone(begin), head.asking(begin, LOOKS)) for head in heads]
        masses = [mass_of_most(of) for of in votes]
        end = heads[0].zone_end(begin)
        steps = torch.arange(begin, begin + UPDATE, _STRIDE)
        cases = {}
        for rows in ROWS:
            cases[f"one count, {rows}"] = [rows] * len(heads)
            cases[f"by Top-p, {rows}"] = counts_by_mass(masses, rows)
            most = 2 * rows
            cases[f"by Top-p, at most twice, {rows}"] = counts_by_mass(masses, rows, most)
        for i, (head, score) in enumerate(zip(heads, votes, strict=True)):
            attention, order = head.attention(steps), score.argsort(descending=True)
            for case, of in cases.items():
                chosen = order[: of[i]]
                kept = torch.zeros(attention.shape[-1], dtype=torch.bool)
                kept[:SINK], kept[end:], kept[chosen + SINK] = True, True, True
                error = output_error(attention, head.values, kept)
                found[f"{case}: recall"] += recall(attention, chosen[None], end).tolist()
                found[f"{case}: output error"] += error.tolist()
    return {"counts": {what: sum(of) / len(of) for what, of in found.items()}}


# --- Pruned and merged ---------------------------------------------------------------------------


@dataclass
class Survivors:
    """What is left of a zone: rows, and what each logit is raised by, where rows were merged."""

    keys: Tensor
    values: Tensor
    bias: Tensor

    def logits(self, queries: Tensor) -> Tensor:
        return logits_of(queries, self.keys) + self.bias

    def joined(self, keys: Tensor, values: Tensor) -> Survivors:
        bias = torch.cat([self.bias, torch.zeros(len(keys))])
        return Survivors(torch.cat([self.keys, keys]), torch.cat([self.values, values]), bias)

    def best(self, asking: Tensor, rows: int, how: str) -> Survivors:
        """`rows` of them by their attention; the others are dropped, or each merged into one.

        how  "dropped", "merged" as published, or "merged, raised": the logit exact at its mean
        """
        worth = self.logits(asking).softmax(-1).mean(dim=(0, 1))
        order = worth.sort(descending=True).indices
        keep, drop = order[:rows], order[rows:]
        keys, values, bias = (part[keep].clone() for part in (self.keys, self.values, self.bias))
        if how != "dropped" and 2 * len(drop) <= len(order):
            into = slice(0, len(drop))
            share = worth[keep[into]] / (worth[keep[into]] + worth[drop]).clamp(min=1e-30)
            share = share.clamp(1e-6, 1 - 1e-6)
            rest = 1 - share
            keys[into] = share[:, None] * keys[into] + rest[:, None] * self.keys[drop]
            values[into] = share[:, None] * values[into] + rest[:, None] * self.values[drop]
            if how == "merged, raised":
                spread = -(share * share.log() + rest * rest.log())
                bias[into] = share * bias[into] + rest * self.bias[drop] + spread
        return Survivors(keys, values, bias)


def pruning(head: Head, found: Sums, rows: int = 512) -> None:
    """Log-sum-exp that is lost, and the output's error, while rows are chosen from survivors."""
    for how in ("dropped", "merged", "merged, raised"):
        last = head.zone_end(0)
        zone = slice(SINK, last)
        left = Survivors(head.keys[zone], head.values[zone], torch.zeros(last - SINK))
        for begin, steps in blocks(head.steps, UPDATE, _STRIDE):
            end = head.zone_end(begin)
            left = left.joined(head.keys[last:end], head.values[last:end])
            left = left.best(head.asking(begin, LOOKS), rows, how)
            last = end
            queries, attention = head.at(steps), head.attention(steps)
            whole = logits_of(queries, head.keys)
            later = torch.arange(len(head.keys)) > head.prompt + steps[:, None, None]
            whole = whole.masked_fill(later, -math.inf)
            resident = torch.cat([whole[..., :SINK], whole[..., end:]], dim=-1)
            logits = torch.cat([resident, left.logits(queries)], dim=-1)
            values = torch.cat([head.values[:SINK], head.values[end:], left.values])
            out, exact = logits.softmax(-1) @ values, attention @ head.values
            error = (out - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
            lost = (whole.logsumexp(-1) - logits.logsumexp(-1)).mean(dim=1)
            found[f"{how}, {begin}: lse lost"] += lost.tolist()
            found[f"{how}, {begin}: output error"] += error.tolist()


def lengths(head: Head, found: Sums, rows: int = 512) -> None:
    """The same in zones of the last so many tokens, the others never seen."""
    end, steps = head.zone_end(0), torch.arange(0, UPDATE, _STRIDE)
    for tokens in LENGTHS:
        begin = max(end - tokens, 0)
        logits = logits_of(head.at(steps), head.keys[begin:])
        places = torch.arange(begin, len(head.keys))
        logits = logits.masked_fill(places > head.prompt + steps[:, None, None], -math.inf)
        worth = observed(head.keys[begin:end], head.asking(0, LOOKS))
        kept = torch.ones(logits.shape[-1], dtype=torch.bool)
        kept[: end - begin] = False
        kept[worth.topk(min(rows, len(worth))).indices] = True
        lost = logits.logsumexp(-1) - logits.masked_fill(~kept, -math.inf).logsumexp(-1)
        error = output_error(logits.softmax(-1), head.values[begin:], kept)
        found[f"{tokens}: lse lost"] += lost.mean(dim=1).tolist()
        found[f"{tokens}: output error"] += error.tolist()


def of_heads(heads: Sequence[Head], track: Track) -> dict[str, dict[str, float]]:
    """Every experiment, means over all."""
    results = counts(heads)
    for name, measure in EXPERIMENTS.items():
        found: Sums = defaultdict(list)
        some = heads[::_FEWER] if measure is calibration else heads
        for head in track(some, name):
            measure(head, found)
        results[name] = {what: sum(of) / len(of) for what, of in found.items()}
    return results


EXPERIMENTS = {"calibration": calibration, "pruning": pruning, "lengths": lengths}
