"""What a step leaves out, on keys with a structure: the error of outputs, not the share of rows.

Text has periods (tables, logs, lines of code), markers, repeats and topics. There, the best rows
hold little of the attention, and what matters is how the rest is estimated. Each kind of keys is of
two kv heads; queries ask for one of the things that the keys are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import configs
import pariskv_core as pk
import torch
from pariskv_core.cli.errors import Tally
from torch import Tensor

from quality.experiments import Size, Track
from quality.sources import WORST

TOKENS, KV_HEADS, GROUP, DIM, ROWS = 32_768, 2, 4, 64, 100
WAYS: dict[str, dict[str, Any]] = {
    "no tail": {"tail": "none"},
    "1,024 rows": {"tail_rows": 1024},
    "2,048 rows": {"tail_rows": 2048},
}
_NOISE = 0.6  # of a key beside what it is made of; squares add up to 1


@dataclass
class Keys:
    """Each token is made of one thing; some things are asked for."""

    thing: Tensor  # (tokens) number of the thing
    asked: Tensor  # numbers of things that queries want
    pull: float = 0.7  # of a query towards its thing: rare ones need more to be found
    own_values: bool = False  # values have nothing to do with the thing


def lines(length: int) -> Keys:
    """A table whose lines have so many tokens: a thing for each column."""
    return Keys(torch.arange(TOKENS) % length, torch.arange(length))


def markers(every: int, offset: int) -> Keys:
    """A marker at one place of every so many tokens; all else is normal."""
    at = torch.arange(TOKENS)
    return Keys(torch.where(at % every == offset, 0, 1 + at), torch.zeros(1, dtype=torch.long))


def clusters(count: int, random: torch.Generator) -> Keys:
    """Tokens of so many kinds, in no order."""
    return Keys(torch.randint(count, (TOKENS,), generator=random), torch.arange(count))


def topics(tokens: int) -> Keys:
    """A text that goes from one topic to the next every so many tokens."""
    topic = torch.arange(TOKENS) // tokens
    return Keys(topic, topic[:: 4 * tokens])


def sentences(count: int, random: torch.Generator, aligned: int = 1) -> Keys:
    """A sentence of 16 tokens that comes so many times, at multiples of `aligned`."""
    places = torch.randperm(TOKENS // 32 // aligned, generator=random)[:count] * 32 * aligned
    thing = TOKENS + torch.arange(TOKENS)
    for place in places.tolist():
        thing[place : place + 16] = torch.arange(16)
    return Keys(thing, torch.arange(16), pull=1.0 if count > 50 else 1.2)


def heavy(count: int, random: torch.Generator, run: bool = False) -> Keys:
    """So many keys that are asked for, whose values are unrelated; anywhere, or side by side."""
    thing = 1 + torch.arange(TOKENS)
    places = torch.arange(9_000, 9_000 + count) if run else torch.randperm(TOKENS, generator=random)
    thing[places[:count]] = 0
    return Keys(thing, torch.zeros(1, dtype=torch.long), pull=1.0, own_values=True)


KINDS: dict[str, Callable[[torch.Generator], Keys]] = {
    **{f"lines of {n} tokens": lambda _, n=n: lines(n) for n in (8, 10, 16, 17, 24, 32, 64)},
    "a marker every 16 tokens": lambda _: markers(16, 1),
    "a marker every 64 tokens": lambda _: markers(64, 7),
    "32 clusters": lambda random: clusters(32, random),
    "topics of 512 tokens": lambda _: topics(512),
    "a sentence 100 times": lambda random: sentences(100, random),
    "a sentence 100 times, aligned": lambda random: sentences(100, random, 4),
    "a sentence 10 times": lambda random: sentences(10, random),
    "200 heavy keys": lambda random: heavy(200, random),
    "a run of 300 heavy keys": lambda random: heavy(300, random, run=True),
}


def _drawn(things: Tensor, random: torch.Generator) -> Tensor:
    """(tokens, kv heads, dim): the same numbers for the same thing."""
    count = int(things.max()) + 1
    return torch.randn(count, KV_HEADS, DIM, generator=random)[things]


def _mixed(of: Tensor, random: torch.Generator) -> Tensor:
    noise = torch.randn(of.shape, generator=random)
    return (1 - _NOISE**2) ** 0.5 * of + _NOISE * noise


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(query heads, dim) over all rows, in doubles."""
    queries = q.double().view(KV_HEADS, GROUP, DIM)
    logits = torch.einsum("hgd,thd->hgt", queries, k.double()) / DIM**0.5
    out = torch.einsum("hgt,thd->hgd", logits.softmax(-1), v.double())
    return out.reshape(KV_HEADS * GROUP, DIM)


@dataclass
class Drawn:
    """Keys and values (tokens, kv heads, dim), queries of the last rows, and what they get."""

    k: Tensor
    v: Tensor
    queries: Tensor  # (steps, query heads, dim)
    exact: list[Tensor]  # (query heads, dim) of each step, in doubles


def drawn(kind: str, seed: int, steps: int) -> Drawn:
    random = torch.Generator().manual_seed(seed)
    keys = KINDS[kind](random)
    seeds = torch.Generator().manual_seed(seed + 1)
    things = _drawn(keys.thing, seeds)
    k = _mixed(things, random)
    v = torch.randn(k.shape, generator=random)
    if not keys.own_values:
        v = _mixed(_drawn(keys.thing, random), random)
    asked = keys.asked[torch.randint(len(keys.asked), (steps,), generator=random)]
    first = torch.stack([(keys.thing == thing).int().argmax() for thing in asked])
    pull = keys.pull * things[first].repeat_interleave(GROUP, dim=1)
    queries = pull + torch.randn(pull.shape, generator=random) * _NOISE
    new = torch.randn(2, steps, KV_HEADS, DIM, generator=random)
    k, v = torch.cat([k, new[0]]), torch.cat([v, new[1]])
    exact = [_attended(q, k[: TOKENS + i + 1], v[: TOKENS + i + 1]) for i, q in enumerate(queries)]
    return Drawn(k, v, queries, exact)


def config_of(**changes: Any) -> pk.Config:
    return configs.make(
        layers=1, query_heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=DIM,
        dtype="float32", **{"top_k": ROWS, **changes},
    )  # fmt: skip


def errors(kind: str, seed: int, steps: int) -> dict[str, list[float]]:
    """Of each way, the errors of all steps, relative to the output's length."""
    of = drawn(kind, seed, steps)
    found = {}
    for way, changes in WAYS.items():
        outputs = zip(_decoded(config_of(**changes), of), of.exact, strict=True)
        found[way] = [
            float((out.double() - true).norm() / true.norm()) for (out, *_), true in outputs
        ]
    return found


def predictions(of: Drawn, config: pk.Config, tally: Tally) -> None:
    """Adds the error that each step predicts, and its true one."""
    spread = (of.v - of.v.mean(dim=0)).square().mean(dim=(0, 2)).sqrt()
    steps = _decoded(config, of, return_error=True)
    for (out, error), true in zip(steps, of.exact, strict=True):
        tally.add(error, out, true, spread)


def _decoded(config: pk.Config, of: Drawn, **asked: bool) -> Iterator[list[Tensor]]:
    """Of a prompt's next steps, the output and what is asked for: rows from TOKENS on come one by
    one."""
    with pk.Cache(config) as cache:
        sequence = cache.add()
        cache.prefill(0, [sequence], of.k[:TOKENS], of.v[:TOKENS])
        for i, q in enumerate(of.queries, TOKENS):
            new = of.k[i : i + 1], of.v[i : i + 1]
            found = cache.decode(0, [sequence], q[None], *new, **asked)
            yield [part[0] for part in (found if asked else (found,))]


def structured(size: Size, track: Track) -> dict[str, Any]:
    """Median errors of outputs, by kind of keys and way; then the largest of a step."""
    table = {}
    for kind in track(list(KINDS), "structured keys"):
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in range(size.seeds):
            for way, of in errors(kind, 100 * seed, size.steps).items():
                found[way] += of
        by = {way: median(of) for way, of in found.items()}
        by |= {way + WORST: max(of) for way, of in found.items()}
        table[kind] = {way: float(f"{at:.3g}") for way, at in by.items()}
    return table
