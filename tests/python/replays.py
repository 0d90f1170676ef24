"""Steps of a recorded graph beside eager ones, of policies that choose rows while they decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pariskv_core as pk
import torch
from support import assert_same_bits, randn_kv, randn_q
from test_cuda_graph import Graph, make_steps


def warmed(config: pk.Config) -> None:
    """Loads every kernel, those of a choice among them: that cannot be done while recording."""
    rng = np.random.default_rng(0)
    with pk.Cache(config) as cache:
        s = cache.add()
        for layer in range(config.layers):
            k, v = randn_kv(rng, 300, config)
            cache.prefill(layer, [s], k, v, q=randn_q(rng, 300, config))
        cache.truncate([s], drop=100)
    torch.cuda.synchronize()


def assert_replays_are_eager(
    config: pk.Config, seen: Callable[[pk.Cache, int, int, torch.Tensor], Any]
) -> int:
    """A graph of three sequences, of which one keeps nothing at first, across cuts and a fork.

    seen(cache, sequence, layer, query) is what has to be equal besides outputs. Returns how many
    times rows were chosen.
    """
    warmed(config)
    cache, twin = pk.Cache(config), pk.Cache(config)
    batches = []
    for each in (cache, twin):
        rng = np.random.default_rng(3)
        batch = [each.add() for _ in range(3)]
        for layer in range(2):
            for s, tokens in zip(batch, (300, 120, 64), strict=True):
                k, v = randn_kv(rng, tokens, config)
                q = randn_q(rng, tokens, config) if tokens > 100 else None
                each.prefill(layer, [s], k, v, q=q)
        batches.append(batch)
    graph = Graph(cache, batches[0])
    for number, step in enumerate(make_steps(config, 3, 150)):
        mine = graph.step(batches[0], step)
        theirs = []
        for layer in range(2):
            inputs = (x[layer] for x in step)
            theirs += twin.decode(layer, batches[1], *inputs, return_lse=True)
        for a, b in zip(mine, theirs, strict=True):
            assert_same_bits(a, b, f"step {number}")
        if number in (40, 90):
            for each, batch in ((cache, batches[0]), (twin, batches[1])):
                each.truncate(batch[:1], drop=number)
        if number == 60:
            for index, (each, batch) in enumerate(((cache, batches[0]), (twin, batches[1]))):
                batches[index] = [each.fork(batch[0]), *batch[1:]]
                each.remove(batch[0])
        if number % 10 == 0:
            for s, t in zip(*batches, strict=True):
                for layer in range(2):
                    query = step[0][layer][0]
                    assert seen(cache, s, layer, query) == seen(twin, t, layer, query)
    assert cache.stats().keeps == twin.stats().keeps
    return cache.stats().keeps
