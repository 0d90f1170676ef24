"""Eager steps of one batch, of which most change nothing but lengths, among all other calls: the
bits of a cache that plans every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    assert_same_sequence,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    rows_of,
    state_of,
)
from test_cuda_graph import Graph, make_steps

CONFIGS = {
    "host": {},
    "device": {"placement": "device"},
    "blocks and a tail": {"block": 64, "tail": "own", "tail_rows": 16},
    "8 bits": {"kv_dtype": "int8"},
    "dense": {"dense_below": 250, "dtype": "bfloat16"},
    "no window": {"local": 0},
    "HardKV": {"policy": pk.HardKV(most=24)},
    "PRKV": {"policy": pk.PRKV(budget=64, page=16)},
}
LENGTHS = (300, 120, 1200, 40)


def config_for(name: str, device: str) -> pk.Config:
    fields = dict(CONFIGS[name])
    policy = fields.pop("policy", None)
    config = make_config(layers=2, device=device, **fields)
    return config if policy is None else config.replace(policy=policy)


class Twins:
    """Two caches that are given the same; the second has another call before every step."""

    def __init__(self, config: pk.Config):
        self.config, self.rng = config, np.random.default_rng(5)
        self.caches = (pk.Cache(config), pk.Cache(config))
        self.ids = [self.both(lambda cache: cache.add()) for _ in LENGTHS]
        for s, tokens in zip(self.ids, LENGTHS, strict=True):
            self.prefill(s, tokens)

    def both(self, call: Callable[[pk.Cache], int]) -> int:
        first, second = (call(cache) for cache in self.caches)
        assert first == second
        return first

    def prefill(self, s: int, tokens: int) -> None:
        for layer in range(self.config.layers):
            k, v = randn_kv(self.rng, tokens, self.config)
            q = randn_q(self.rng, tokens, self.config)
            for cache in self.caches:
                cache.prefill(layer, [s], k, v, q=q)

    def attend(self, s: int, tokens: int) -> None:
        for layer in range(self.config.layers):
            k, v = randn_kv(self.rng, tokens, self.config)
            q = randn_q(self.rng, tokens, self.config)
            assert_same_bits(*(cache.attend(layer, [s], q, k=k, v=v) for cache in self.caches))

    def step(self, slots: list[int], layers: range | None = None) -> None:
        for layer in layers or range(self.config.layers):
            q, k, v = randn_step(self.rng, len(slots), self.config)
            results = []
            for number, cache in enumerate(self.caches):
                if number == 1:
                    cache.flush([])  # gives the device work, so that the step is planned
                batch = slots if layer else cache.batch(slots)
                results.append(cache.decode(layer, batch, q, k, v, return_lse=True))
                if layer == 0:  # a layer that shares these rows
                    results[-1] += cache.decode(layer, slots, q + 1, return_lse=True)
            for mine, theirs in zip(*results, strict=True):
                assert_same_bits(mine, theirs)

    def check(self) -> None:
        mine, theirs = (state_of(cache) for cache in self.caches)
        assert mine == theirs
        q = randn_q(self.rng, 1, self.config)[0]
        for s in self.caches[0].sequences():
            if isinstance(self.config.policy, pk.ParisKV):
                assert_same_sequence(self.caches[0], s, self.caches[1], s, q)
                continue
            for layer in range(self.config.layers):
                rows = zip(*(rows_of(cache, s, layer) for cache in self.caches), strict=True)
                for a, b in rows:
                    assert_same_bits(a, b)


def walk(twins: Twins) -> dict[str, Callable[[], object]]:
    """Every verb, of these sequences or of others."""
    a, b, c, d = twins.ids
    rng = twins.rng

    def apply(call: Callable[[pk.Cache], object]) -> Callable[[], None]:
        return lambda: [call(cache) for cache in twins.caches] and None

    def fork_and_remove() -> None:
        s = twins.both(lambda cache: cache.fork(c))
        twins.step([s, a])
        for cache in twins.caches:
            cache.remove(s)

    def with_a_foreign_batch() -> None:
        with pk.Cache(twins.config) as other:
            batch = other.batch([other.add() for _ in range(4)])
            step = randn_step(rng, 4, twins.config)
            for cache in twins.caches:
                with pytest.raises(ValueError, match="another"):
                    cache.decode(0, batch, *step)

    def wrong() -> None:
        q, k, v = randn_step(rng, 4, twins.config)
        for cache in twins.caches:
            with pytest.raises(ValueError, match="k: expected"):
                cache.decode(0, twins.ids, q, k[:2], v)

    return {
        "cut": apply(lambda cache: cache.truncate([a], drop=3)),
        "cut into the zone": apply(lambda cache: cache.truncate([c, b], drop=[70, 50])),
        "fork": lambda: twins.both(lambda cache: cache.fork(a)),
        "prefix": lambda: twins.both(lambda cache: cache.fork(c, tokens=90)),
        "fork and remove": fork_and_remove,
        "swap": apply(lambda cache: cache.reorder([a, d], [1, 0])),
        "copy": apply(lambda cache: cache.reorder([b, d], [0, 0])),
        "flush": apply(lambda cache: cache.flush([d])),
        "prefill": lambda: twins.prefill(b, 30),
        "turn": lambda: twins.attend(d, 9),
        "some of them": lambda: twins.step([c, a]),
        "in another order": lambda: twins.step([d, c, b, a]),
        "idle": lambda: twins.step([a, pk.IDLE, c, d]),
        "one layer": lambda: twins.step(twins.ids, range(1, 2)),
        "explain": apply(
            lambda cache: cache.explain(0, c, randn_q(np.random.default_rng(1), 1, twins.config)[0])
        ),
        "look": apply(lambda cache: (cache.stats(), cache.length(a), cache.summaries(1, c))),
        "trim": apply(lambda cache: cache.trim()),
        "batch": apply(lambda cache: cache.batch([a, b])),
        "of another cache": with_a_foreign_batch,
        "wrong": wrong,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_among_other_calls_are_those_that_are_planned(name, device):
    twins = Twins(config_for(name, device))
    calls = walk(twins)
    for number in range(2 * len(calls)):
        what = list(calls)[number % len(calls)]
        for _ in range(1 + number % 4 + (40 if number % 9 == 0 else 0)):
            twins.step(twins.ids)
        calls[what]()
        for _ in range(2):
            twins.step(twins.ids)
        if number % 3 == 0:
            twins.check()
    twins.check()


@pytest.mark.cuda
def test_steps_go_on_beside_replays():
    """Recorded and eager steps by turns, of one batch."""
    twins = Twins(config_for("host", "cuda"))
    cache, planned = twins.caches
    graph = Graph(cache, twins.ids)
    for number, step in enumerate(make_steps(twins.config, len(LENGTHS), 60)):
        if number % 7 < 3:
            mine = graph.step(twins.ids, step)
            theirs = []
            for layer in range(twins.config.layers):
                planned.flush([])
                inputs = (x[layer] for x in step)
                theirs += planned.decode(layer, twins.ids, *inputs, return_lse=True)
            for a, b in zip(mine, theirs, strict=True):
                assert_same_bits(a, b)
        else:
            twins.step(twins.ids)
    # What a graph recorded while lengths were not told is of its time, too.
    twins.step(twins.ids)
    graph = Graph(cache, twins.ids)
    twins.step(twins.ids)
    twins.check()


@pytest.mark.cuda
def test_steps_under_a_tiny_budget():
    """Rows leave the device between steps and within them, and come back by the bus."""
    config = make_config(layers=2, placement="auto", memory_budget=16 << 20)
    twins = Twins(config)
    for number in range(300):
        twins.step(twins.ids)
        if number % 50 == 10:
            twins.prefill(twins.both(lambda cache: cache.add()), 2000)
    assert twins.caches[0].stats().offloaded_bytes > 0
    q = randn_q(twins.rng, 1, config)[0]
    for s in twins.ids:
        assert_same_sequence(twins.caches[0], s, twins.caches[1], s, q)


@pytest.mark.cuda
def test_steps_of_tensors_on_another_stream():
    """The current stream of PyTorch is the one that a step joins."""
    twins = Twins(config_for("host", "cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            twins.step(twins.ids)
    torch.cuda.synchronize()
    twins.step(twins.ids)
    twins.check()
