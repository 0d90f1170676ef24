"""The lab's engine is the engine: same rows, same settings, same regions."""

from __future__ import annotations

import math

import numpy as np
import pariskv_core as pk
import pytest
import torch
from quality.engine import PUBLISHED_SCHEDULE, Engine, published
from quality.methods import make_method
from quality.regions import Residency
from quality.workloads import Spec, make
from support import config_of

ROWS, RATIO = 50, 0.05


@pytest.fixture(scope="module")
def scene():
    """Queries (steps, group, dim), zone keys, what is resident (steps, group)."""
    load = make(Spec(tokens=6000, steps=6))
    queries, keys = torch.from_numpy(load.asks[0].queries), torch.from_numpy(load.keys)
    resident = torch.logsumexp(queries @ keys[:4].T / math.sqrt(128), dim=-1)
    return queries, keys[4:].contiguous(), resident


@pytest.mark.parametrize("name", ["engine", "published"])
def test_explain_shows_the_selected_rows(scene, name):
    queries, keys, resident = scene
    engine = make_method(name, candidates=RATIO)
    engine.prefill(keys, None)
    chosen = engine.select(queries, ROWS, resident)
    assert chosen.shape == (len(queries), ROWS)
    # Beside it, a cache of our own that holds resident rows: sinks whose log-sum-exp is that one.
    config = config_of(
        layers=1,
        query_heads=4,
        kv_heads=1,
        head_dim=128,
        dtype="float32",
        sink=4,
        local=0,
        dense_below=0,
        top_k=ROWS,
        schedule=[(0, RATIO, 0.2)],
        block=0,
        tail="none",
        scorer="sign_norm" if name == "engine" else "votes",
        group_rule="attention_mass" if name == "engine" else "mean_query",
    )
    load = torch.from_numpy(make(Spec(tokens=6000, steps=6)).keys)[:, None].contiguous()
    with pk.Cache(config) as cache:
        s = cache.add()
        cache.prefill(0, [s], load, load)
        for step, query in enumerate(queries):
            why = cache.explain(0, s, query)
            assert why.searched and why.zone_begin == 4
            np.testing.assert_array_equal(chosen[step].numpy(), why.positions[0] - 4)


def test_appended_keys_are_searched_like_prompt_keys(scene):
    queries, keys, resident = scene
    grown, whole = make_method("engine"), make_method("engine")
    grown.prefill(keys[:4000], None)
    grown.select(queries, ROWS, resident)  # the cache is there by now
    grown.append(keys[4000:5500])
    grown.append(keys[5500:])
    whole.prefill(keys, None)
    assert torch.equal(grown.select(queries, ROWS, resident), whole.select(queries, ROWS, resident))


def test_another_budget_is_another_search(scene):
    queries, keys, resident = scene
    engine = Engine(candidates=1.0)
    engine.prefill(keys, None)
    few, many = (engine.select(queries, rows, resident) for rows in (10, 40))
    assert torch.equal(many[:, :10], few)


def test_a_zone_no_larger_than_the_budget_is_taken_whole(scene):
    queries, keys, resident = scene
    engine = Engine()
    engine.prefill(keys[:30], None)
    assert engine.select(queries, 40, resident)[0].tolist() == [*range(30), *[-1] * 10]


def test_the_published_one_is_set_as_published(scene):
    queries, keys, _ = scene
    engine = published()
    engine.prefill(keys, None)
    config = engine.cache(queries.shape[1], 100).config
    assert (config.policy.scorer, config.policy.group_rule) == ("votes", "mean_query")
    assert [tuple(step) for step in config.policy.schedule] == [
        (n, pytest.approx(b), pytest.approx(r)) for n, b, r in PUBLISHED_SCHEDULE
    ]


def test_blocks_are_the_engines_regions():
    prompt, residency = 160, Residency(sink=4, local=16, update=8)
    config = config_of(
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_dim=64,
        dtype="float32",
        dense_below=0,
        block=0,
        **vars(residency),
    )
    with pk.Cache(config) as cache:
        sequence = cache.add()
        rows = torch.ones(prompt, 1, 64)
        cache.prefill(0, [sequence], rows, rows)
        for step in range(30):
            cache.decode(0, [sequence], rows[:1], rows[:1], rows[:1])
            regions = cache.regions(sequence)
            assert regions.sink + regions.retrieval == residency.zone_end(prompt, step)
    blocks = [block for _, block in residency.blocks(prompt, 30)]
    assert blocks == [slice(0, 7), slice(7, 15), slice(15, 23), slice(23, 30)]
