"""Layers that share keys and values of an earlier one: queries alone, over rows that are stored."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from pariskv_core.serving import Engine, Orders
from pariskv_core.serving.orders import ADD, Command, Row
from support import assert_same_bits, make_config, randn_kv, randn_q
from test_cuda_graph import filled_with, make_steps, warm_up


@pytest.mark.parametrize("dense_below", [1 << 20, 0], ids=["in full", "searching"])
def test_a_layer_that_shares_rows_attends_as_the_one_that_stores_them(dense_below: int) -> None:
    config = make_config(layers=2, dense_below=dense_below, top_k=8)
    engine, rng = Engine(config), np.random.default_rng(5)
    stored = {"r0": 0, "r1": 0, "r2": 0}
    # Prompts, then a chunk beside tokens that are decoded, then these alone.
    for counts in ([300, 40, 700], [1, 90, 1], [1, 1, 1]):
        rows = [
            Row(name, int(name[1:]), before, before, count, before + count * (count > 1))
            for (name, before), count in zip(stored.items(), counts, strict=True)
        ]
        first = not any(stored.values())
        commands = [Command(ADD, number) for number in range(3)] if first else []
        engine.begin(Orders(commands, rows), list(stored))
        for layer in range(config.layers):
            q = randn_q(rng, sum(counts), config)
            k, v = randn_kv(rng, sum(counts), config)
            out, again = torch.full_like(q, 7), torch.full_like(q, 8)
            engine.attend(layer, q, k, v, out)
            engine.attend(layer, q, None, None, again)
            torch.testing.assert_close(again, out, atol=2e-5, rtol=2e-5)
        engine.end()
        for name, count in zip(stored, counts, strict=True):
            stored[name] += count
    lengths = [engine.cache.length(one) for one in engine.sequences.of(range(3))]
    assert lengths == list(stored.values()), "no row is stored twice"
    engine.close()


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [[300], [0, 170, 461]])
def test_in_a_graph_a_layer_that_shares_rows_sees_the_token_that_is_stored(
    lengths: list[int],
) -> None:
    config = make_config(dtype="float16", layers=2)
    caches = pk.Cache(config), pk.Cache(config)
    mine, alike = (filled_with(cache, lengths) for cache in caches)
    inputs = [torch.zeros_like(x) for x in make_steps(config, len(lengths), 1)[0]]
    warm_up(config)

    def both(cache: pk.Cache, sequences: list[int], step: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of each layer, with k and v, and then without."""
        outs = []
        for q, k, v in zip(*step, strict=True):
            layer = len(outs) // 2
            outs.append(cache.decode(layer, sequences, q, k, v))
            outs.append(cache.decode(layer, sequences, q.flip(0), None, None))
        return outs

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = both(caches[0], mine, inputs)
    for number, step in enumerate(make_steps(config, len(lengths), 60)):
        for place, given in zip(inputs, step, strict=True):
            place.copy_(given)
        caches[0].advance(mine)
        graph.replay()
        for out, expected in zip(outs, both(caches[1], alike, step), strict=True):
            assert_same_bits(out.clone(), expected, f"step {number}")
