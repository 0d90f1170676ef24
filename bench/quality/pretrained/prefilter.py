"""May a choice of PRKV's kept rows look at a part of the pages?

The first choice, a prompt's, looks at all of them. Each later one looks at the best pages by their
digests for the 64 queries that choose. A rule that remembers also looks at the rows that its last
choice kept, which are on the device, and at the latest rows. Measured is the attention to the zone
that the chosen rows lose against a choice from all of it:

now         of the queries that choose
later       of the queries that choose next; after the last choice, of those that follow
with pages  as later, with the pages that these queries then find among the other rows
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from pariskv_core.cli.weights import Weights
from torch import Tensor

from quality.inside import Residency
from quality.kept_rows import WINDOW
from quality.methods import logits_of
from quality.peers import ArkVale, Pages, Quest
from quality.pretrained.capture import LATE, Layer, Stretch, late_positions, make_all
from quality.pretrained.claims_prkv import PAGE, overlap
from quality.pretrained.shares import Track

BUDGET = 1024
STATIC = (0.25, 0.5)  # and "auto"
PARTS = {"0": 0.0, "1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2}  # of the pages
CHOICES = 8  # after the first one
SHORT = 8  # rows of a page with a digest of its own, four in place of one
UPDATE = 128  # tokens from one choice to the next
LATEST = 256  # rows: those of a flush, and as many before them
TOKENS = 8192
LENGTHS = {"qwen-0.5b": (8192, 16_384, 32_768)}  # of other models TOKENS
IN_FULL = ("mean, softmax", "mean, softmax, remembers")  # with pages, too
BY_LAYER = ("mean, softmax", "of 8 rows", "best")

Sums = dict[str, list[float]]


@dataclass
class Choice:
    """What a kv head has when it chooses."""

    keys: Tensor  # (zone, head_dim)
    queries: Tensor  # (window, group, head_dim)
    shares: Tensor  # (window * group, zone): their attention
    votes: Tensor  # (zone): the mean of it
    following: Tensor  # (queries, group, head_dim)
    attention: Tensor  # (queries, zone): that of the following queries, mean of the group


def choice_of(keys: Tensor, queries: Tensor, following: Tensor) -> Choice:
    shares = logits_of(queries, keys).softmax(dim=-1).flatten(0, 1)
    attention = logits_of(following, keys).softmax(dim=-1).mean(dim=1)
    return Choice(keys, queries, shares, shares.mean(dim=0), following, attention)


def digest_scores(choice: Choice, digest: type[Pages], page: int = PAGE) -> Tensor:
    """(queries, group, pages) of whole pages, as logits."""
    pages = digest(page)
    pages.prefill(choice.keys[: len(choice.keys) // page * page], None)
    return pages.page_scores(choice.queries) / math.sqrt(choice.keys.shape[1])


def by_softmax(choice: Choice, digest: type[Pages] = ArkVale, page: int = PAGE) -> Tensor:
    return digest_scores(choice, digest, page).softmax(dim=-1).mean(dim=(0, 1))


def by_either(choice: Choice) -> Tensor:
    """The better place of a page by two digests."""
    orders = [by_softmax(choice, digest).argsort().argsort() for digest in (ArkVale, Quest)]
    return torch.maximum(*orders)


RANKS: dict[str, Callable[[Choice], Tensor]] = {
    "mean, mean": lambda choice: digest_scores(choice, ArkVale).mean(dim=(0, 1)),
    "mean, softmax": by_softmax,
    "max, softmax": lambda choice: by_softmax(choice, Quest),
    "mean, largest": lambda choice: digest_scores(choice, ArkVale).softmax(-1).amax(dim=(0, 1)),
    "both, softmax": by_either,
    "of 8 rows, softmax": lambda choice: by_softmax(choice, page=SHORT),
}


def best_pages(votes: Tensor, rows: Tensor) -> Tensor:
    """(pages): what the rows have of the votes. No digest could find better pages."""
    wanted = torch.zeros_like(votes).index_copy(0, rows, votes[rows])
    return wanted[: len(votes) // PAGE * PAGE].view(-1, PAGE).sum(dim=1)


def looked_at(order: Tensor, part: float, zone: int, page: int = PAGE) -> Tensor:
    """(zone) bool: the best pages' rows; a last page that is cut short is always looked at."""
    seen = torch.ones(zone, dtype=torch.bool)
    unseen = order[int(len(order) * part) :]
    seen[: len(order) * page].view(-1, page)[unseen] = False
    return seen


def best_of(choice: Choice, seen: Tensor, count: int) -> Tensor:
    """The best rows by a softmax over what is looked at alone: the rest has no known sum."""
    of_seen = (choice.shares @ seen.float()).clamp(min=1e-30)
    votes, rows = of_seen.reciprocal() @ choice.shares, seen.nonzero()[:, 0]
    return rows[votes[rows].topk(min(count, len(rows))).indices]


def with_pages(choice: Choice, kept: Tensor) -> float:
    """The attention on kept rows and on the pages that the following queries find besides."""
    live = choice.keys.index_fill(0, kept, math.nan)
    pages = ArkVale(PAGE)
    pages.prefill(live, None)
    scores = pages.page_scores(choice.following).mean(dim=1).nan_to_num(nan=-math.inf)
    count = min((BUDGET - len(kept)) // PAGE, scores.shape[1])
    rest = choice.attention.index_fill(1, kept, 0)
    rest = torch.nn.functional.pad(rest, (0, -rest.shape[1] % PAGE)).unflatten(1, (-1, PAGE))
    found = rest.sum(dim=2).gather(1, scores.topk(count, dim=1).indices).sum(dim=1)
    return (choice.attention[:, kept].sum(dim=1) + found).mean().item()


def caught(choice: Choice, rows: Tensor, paged: bool) -> dict[str, float]:
    shares = {"now": choice.votes[rows].sum().item()}
    shares["later"] = choice.attention[:, rows].sum(dim=1).mean().item()
    if paged:
        shares["with pages"] = with_pages(choice, rows)
    return shares


class Rules:
    """Every rule's choices in one kv head, from one flush to the next."""

    def __init__(self, counts: dict[str, int], first: Choice, found: Sums) -> None:
        self.counts, self.found = counts, found
        self.full = self.from_all(first)
        self.kept: dict[str, Tensor] = {}  # by rule, part and S; before its first choice `full`

    def from_all(self, choice: Choice) -> dict[str, Tensor]:
        everything = torch.ones_like(choice.votes, dtype=torch.bool)
        return {s: best_of(choice, everything, count) for s, count in self.counts.items()}

    def choose(self, choice: Choice) -> None:
        before, self.full = self.full, self.from_all(choice)
        orders = {name: rank(choice).argsort(descending=True) for name, rank in RANKS.items()}
        for s, full in self.full.items():
            best = caught(choice, full, True)
            pages = len((full // PAGE).unique()) * PAGE / len(choice.keys)
            self.add(f"all pages, {s}", best | {"pages": pages})
            self.add(f"as before, {s}", caught(choice, before[s], True), best)
            orders["best"] = best_pages(choice.votes, full).argsort(descending=True)
            for rank, part, remembers in product(orders, PARTS, (False, True)):
                rule = rank + ", remembers" * remembers
                key = f"{rule}, {part}, {s}"
                page = SHORT if rank.startswith("of 8") else PAGE
                seen = looked_at(orders[rank], PARTS[part], len(choice.keys), page)
                if remembers:
                    seen[self.kept.get(key, before[s])] = True
                    seen[-LATEST:] = True
                self.kept[key] = best_of(choice, seen, self.counts[s])
                self.add(key, caught(choice, self.kept[key], rule in IN_FULL), best)

    def add(self, key: str, shares: dict[str, float], best: dict[str, float] | None = None) -> None:
        """Of shares, or of what is lost from the best of them."""
        for when, share in shares.items():
            self.found[f"{key}, {when}"].append(best[when] - share if best else share)


def stretch(tokens: int) -> Stretch:
    """Of the measured queries: those of every choice but the last, and late ones."""
    ends = [tokens - LATE - UPDATE * ago for ago in range(CHOICES, 0, -1)]
    positions = [at for end in ends for at in range(end - WINDOW, end)]
    return Stretch("documentation", tokens, positions=(*positions, *late_positions(tokens)))


def of_layer(layer: Layer, tokens: int, found: Sums) -> float:
    """Adds to what is found of every kv head. Returns the part that "auto" keeps."""
    residency, kv_heads = Residency(), layer.keys.shape[1]
    group = layer.queries.shape[1] // kv_heads
    heads, agreed = [], 0.0
    for head in range(kv_heads):
        of = slice(head * group, (head + 1) * group)
        before, late = (
            layer.queries[:, of]
            .float()
            .split_with_sizes([CHOICES * WINDOW, len(layer.queries) - CHOICES * WINDOW])
        )
        queries = [*before.split(WINDOW), layer.recent[:, of].float()[-WINDOW:], late]
        zones = []
        for ago in range(CHOICES, -1, -1):
            end = residency.zone_end(tokens - LATE - UPDATE * ago, -1)
            zones.append(layer.keys[residency.sink : end, head].float())
        heads.append((queries, zones))
        agreed += overlap(queries[0], zones[0], BUDGET) / kv_heads
    counts = {f"{s:g}": int(BUDGET * s) for s in STATIC}
    counts["auto"] = int(BUDGET * agreed) // PAGE * PAGE
    for queries, zones in heads:
        choices = (choice_of(*at) for at in zip(zones, queries, queries[1:], strict=False))
        rules = Rules(counts, next(choices), found)
        for choice in choices:
            rules.choose(choice)
    return agreed


def prefilter(weights: Weights, track: Track) -> dict[str, Any]:
    """Attention that choices lose which look at a part of the pages: means over kv heads."""
    lengths = LENGTHS.get(weights.name, (min(weights.tokens, TOKENS),))
    results: dict[str, Any] = {}
    for taken in make_all(weights, [stretch(tokens) for tokens in lengths]):
        manifest, layers, automatic = taken.manifest, [], []
        for index in track(manifest.layers, f"{manifest.model}, {manifest.tokens:,} tokens"):
            layers.append(defaultdict(list))
            automatic.append(of_layer(taken.layer(index), manifest.tokens, layers[-1]))
        means = {name: [sum(of[name]) / len(of[name]) for of in layers] for name in layers[0]}
        results["model"] = manifest.model
        results.setdefault("lengths", {})[str(manifest.tokens)] = {
            "layers": manifest.layers,
            "automatic": [round(s, 4) for s in automatic],
            "shares": {name: round(sum(of) / len(of), 4) for name, of in means.items()},
            "by_layer": {
                name: [round(share, 4) for share in of]
                for name, of in means.items()
                if name.startswith(BY_LAYER) and name.endswith("later") and ", 1/4, " in name
            },
        }
    return results
