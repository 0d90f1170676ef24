"""What PRKV's paper says of attention, on a pretrained model's own queries and keys.

Recall is its equation 3: the attention, over everything, on all that is attended to: chosen rows,
sinks and window. Means over query heads, steps, kv heads and layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from quality.experiments import Track
from quality.kept_rows import PRKV, observed
from quality.methods import logits_of
from quality.pretrained.trail import SINK, UPDATE, Head, blocks

STATIC = (0.0, 0.25, 0.5, 0.75, 1.0)
ROWS = (256, 1024)
INTERVALS = (128, 512, None)  # None: never after the first choice; and 32, with its own flush
DISTANCES = (1, 8, 32, 128, 512)
PAGE, LOOKS = 32, 64
_STRIDE = 16  # from one measured step to the next

Sums = dict[str, list[float]]


def recall(attention: Tensor, chosen: Tensor, zone_end: int) -> Tensor:
    """(steps): of attention (steps, group, tokens), on rows of the zone and on what is resident.

    chosen  (steps or 1, rows): indices into the zone, -1 for none
    """
    mean = attention.mean(dim=1)
    resident = mean[:, :SINK].sum(dim=1) + mean[:, zone_end:].sum(dim=1)
    rows = (chosen.clamp(min=0) + SINK).expand(len(mean), -1)
    return resident + (mean.gather(1, rows) * (chosen >= 0)).sum(dim=1)


def best_recall(attention: Tensor, rows: int, zone_end: int) -> Tensor:
    mean = attention.mean(dim=1)[:, SINK:zone_end]
    return recall(attention, mean.topk(min(rows, mean.shape[1]), dim=1).indices, zone_end)


def overlap(asking: Tensor, keys: Tensor, rows: int) -> float:
    """Appendix G: the static part of a budget, by what the first and the last query agree on."""
    first, last = (logits_of(asking[i][None], keys)[0] for i in (0, -1))
    best = [scores.topk(min(rows, len(keys)), dim=-1).indices for scores in (first, last)]
    marks = torch.zeros(len(first), len(keys), dtype=torch.bool).scatter_(1, best[0], True)
    common = marks.gather(1, best[1]).sum(dim=1).float().mean().item()
    return int(common) // PAGE * PAGE / rows


def by_static(head: Head, found: Sums) -> None:
    """Recall by S and budget, chosen anew after every flush; the best rows beside it."""
    for begin, steps in blocks(head.steps, UPDATE, _STRIDE):
        static_at(head, begin, head.zone_end(begin), steps, found)


def static_at(head: Head, begin: int, end: int, steps: Tensor, found: Sums) -> None:
    """Of the steps, with rows that the queries before step `begin` choose of the zone to `end`."""
    attention, asked = head.attention(steps), head.at(steps)
    method = PRKV()
    method.prefill(head.keys[SINK:end], head.asking(begin, LOOKS))
    for rows in ROWS:
        found[f"best, {rows}"] += best_recall(attention, rows, end).tolist()
        found[f"window, {rows}"] += recall(attention, torch.full((1, 1), -1), end).tolist()
        for static in STATIC:
            method.static = static
            chosen = method.select(asked, rows, torch.empty(len(steps), 1))
            found[f"S = {static:g}, {rows}"] += recall(attention, chosen, end).tolist()


def by_interval(head: Head, found: Sums, rows: int = 1024) -> None:
    """Recall by T, of static rows alone and of PRKV with S = .25."""
    for flush, intervals in ((32, (32,)), (UPDATE, INTERVALS)):
        votes: dict[int | None, Tensor] = {}
        for begin, steps in blocks(head.steps, flush, _STRIDE):
            zone, end = head.zone(begin, flush), head.zone_end(begin, flush)
            attention, asked = head.attention(steps), head.at(steps)
            fresh = observed(zone, head.asking(begin, LOOKS))
            half = "late" if begin >= head.steps // 2 else "early"
            for interval in intervals:
                if begin % interval == 0 if interval else begin == 0:
                    votes[interval] = fresh
                for static in (0.25, 1.0):
                    method, known = PRKV(static), votes[interval]
                    method.keys = zone
                    method.votes = torch.nn.functional.pad(known, (0, len(zone) - len(known)))
                    chosen = method.select(asked, rows, torch.empty(len(steps), 1))
                    got = recall(attention, chosen, end)
                    found[f"T = {interval}, S = {static:g}, {half}"] += got.tolist()


def by_distance(head: Head, found: Sums, rows: int = 1024, local: int = 64) -> None:
    """Recall of one query's best rows of all, some tokens later: without and with a window."""
    starts = torch.arange(0, head.steps - max(DISTANCES), 64)
    old = head.attention(starts).mean(dim=1).topk(rows, dim=1).indices
    for distance in DISTANCES:
        steps = starts + distance
        now = head.attention(steps).mean(dim=1)
        best = now.topk(rows, dim=1).values.sum(dim=1)
        kept = torch.zeros_like(now).scatter_(1, old, 1.0)
        place = torch.arange(now.shape[1])
        at = head.prompt + steps[:, None]
        near = ((place > at - local) & (place <= at)).float()
        found[f"old best, {distance}"] += (now * kept).sum(dim=1).tolist()
        found[f"old best and window, {distance}"] += (now * kept.maximum(near)).sum(1).tolist()
        found[f"best, {distance}"] += best.tolist()


def by_order(head: Head, found: Sums) -> None:
    """Recall of static rows by what is averaged first: attention, or queries."""
    for begin, steps in blocks(head.steps, UPDATE, _STRIDE):
        zone, asking = head.zone(begin), head.asking(begin, LOOKS)
        attention, end = head.attention(steps), head.zone_end(begin)
        votes = {
            "attention": observed(zone, asking),
            "queries of a group": observed(zone, asking.mean(dim=1, keepdim=True)),
            "all queries": observed(zone, asking.mean(dim=(0, 1), keepdim=True)),
        }
        for rows in ROWS:
            for first, scores in votes.items():
                chosen = scores.topk(min(rows, len(zone))).indices[None]
                found[f"{first}, {rows}"] += recall(attention, chosen, end).tolist()


def of_heads(heads: Sequence[Head], track: Track) -> dict[str, dict[str, float]]:
    """Every experiment, means over all."""
    results = {}
    for name, measure in EXPERIMENTS.items():
        found: Sums = defaultdict(list)
        for head in track(heads, name):
            measure(head, found)
        results[name] = {what: sum(of) / len(of) for what, of in found.items()}
    return results


def automatic(layers: Sequence[Sequence[Head]], rows: Sequence[int]) -> dict[str, list[float]]:
    """Appendix G's S of each layer, by budget."""
    return {
        str(count): [
            sum(overlap(head.asking(0, LOOKS), head.zone(0), count) for head in heads) / len(heads)
            for heads in layers
        ]
        for count in rows
    }


EXPERIMENTS = {
    "static": by_static,
    "interval": by_interval,
    "distance": by_distance,
    "order": by_order,
}
