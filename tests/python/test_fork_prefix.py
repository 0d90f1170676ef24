"""A fork of the first tokens: what fork and truncate make together, in no more memory."""

from __future__ import annotations

import re

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    explained,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    unchanged,
)

# Of zones of blocks: they open with so many tokens at once.
OPENING = 1024

CONFIGS = {
    "whole keys": {},
    "votes": {"scorer": "votes"},
    "blocks and a tail": {"block": 64, "tail": "own", "tail_rows": 16, "top_k": 8},
    "dense": {"dense_below": 4096},
    "8 bits": {"kv_dtype": "int8", "block": 64, "tail": "own", "tail_rows": 16},
    "HardKV": {"policy": pk.HardKV(most=24)},
    "PRKV": {"policy": pk.PRKV(budget=64, page=16)},
}


def config_for(name: str, **changes) -> pk.Config:
    fields = dict(CONFIGS[name])
    policy = fields.pop("policy", None)
    config = make_config(layers=2, **fields)
    if policy is not None:
        config = config.replace(policy=policy)
    return config.replace(segment_tokens=64, **changes)


def grown(config: pk.Config, tokens: int, steps: int = 60) -> tuple[pk.Cache, int]:
    """A prompt with its queries, then an answer: both layers have the same tokens."""
    rng = np.random.default_rng(tokens)
    cache = pk.Cache(config)
    s = cache.add()
    q = randn_q(rng, tokens, config)
    k, v = randn_kv(rng, tokens, config)
    for layer in range(config.layers):
        cache.prefill(layer, [s], k, v, q=q)
    for _ in range(steps):
        step = randn_step(rng, 1, config)
        for layer in range(config.layers):
            cache.decode(layer, [s], *step)
    return cache, s


def assert_alike(cache: pk.Cache, a: int, b: int) -> None:
    """Now and after as many steps as lead over two flushes."""
    rng = np.random.default_rng(a)
    config = cache.config
    for layer in range(config.layers):
        assert regions_of(cache, a, layer) == regions_of(cache, b, layer)
        for mine, theirs in zip(rows_of(cache, a, layer), rows_of(cache, b, layer), strict=True):
            assert_same_bits(mine, theirs)
    for _ in range(100):
        step = randn_step(rng, 1, config)
        for layer in range(config.layers):
            assert_same_bits(
                cache.decode(layer, [a], *step), cache.decode(layer, [b], *step), f"layer {layer}"
            )
    q = randn_q(rng, 1, config)[0]
    for layer in range(config.layers):
        mine, theirs = (cache.explain(layer, s, q) for s in (a, b))
        assert_same_bits(mine.positions, theirs.positions)
        assert_same_bits(mine.kept, theirs.kept)
        if isinstance(config.policy, pk.ParisKV):
            assert explained(mine).keys() == explained(theirs).keys()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kept", [1, 3, 64, 100, 1000, OPENING + 40, 1200, 1499, 1560])
def test_it_is_what_fork_and_truncate_make(name, kept):
    cache, s = grown(config_for(name), 1500)
    whole = cache.fork(s)
    cache.truncate([whole], keep=kept)
    assert_alike(cache, whole, cache.fork(s, tokens=kept))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_origin_goes_on_as_if_nothing_had_happened(name):
    (cache, s), (other, t) = (grown(config_for(name), 1500) for _ in range(2))
    rng = np.random.default_rng(5)
    for kept in (70, 1300):
        fork = cache.fork(s, tokens=kept)
        step = randn_step(rng, 1, cache.config)
        cache.decode(0, [fork], *step)
    for _ in range(60):
        step = randn_step(rng, 1, cache.config)
        for layer in range(2):
            assert_same_bits(cache.decode(layer, [s], *step), other.decode(layer, [t], *step))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tokens", [0, -1, 301, 1 << 40])
def test_other_numbers_are_refused_before_anything_changes(name, tokens):
    cache, s = grown(config_for(name), 240)
    sentence = f"[fork] tokens: expected 1 to 300, the tokens of sequence {s} in layer 0, got "
    with unchanged(cache), pytest.raises(ValueError, match=re.escape(sentence + str(tokens))):
        cache.fork(s, tokens=tokens)


def test_the_shortest_layer_says_how_many_there_may_be(rng):
    config = make_config(layers=3)
    cache = pk.Cache(config)
    s = cache.add()
    for layer, tokens in enumerate((200, 90, 200)):  # in the middle of a prompt
        cache.prefill(layer, [s], *randn_kv(rng, tokens, config))
    with pytest.raises(ValueError, match=r"expected 1 to 90, the tokens of .* in layer 1, got 91"):
        cache.fork(s, tokens=91)
    fork = cache.fork(s, tokens=90)
    assert [cache.length(fork, layer) for layer in range(3)] == [90, 90, 90]
    assert [cache.length(s, layer) for layer in range(3)] == [200, 90, 200]


def test_a_cut_that_lacks_rows_is_refused():
    policy = pk.HardKV(most=24, placement="dropped")
    config = make_config(layers=1).replace(policy=policy)
    cache, s = grown(config, 500)
    regions = cache.regions(s)
    assert regions.dropped > 0
    first = regions.sink + config.segment_tokens
    with unchanged(cache), pytest.raises(ValueError, match=r"\[fork\] tokens: expected \d+ tokens"):
        cache.fork(s, tokens=first + regions.dropped // 2)
    assert cache.length(cache.fork(s, tokens=40)) == 40


@pytest.mark.cpu("a GPU has tables besides, and gives memory back later")
@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if name != "8 bits"]
)  # which a cut leaves in both forms
@pytest.mark.parametrize("kept", [1, 64, 100, 1000])
def test_it_holds_what_a_sequence_of_so_many_tokens_holds(name, kept):
    # Rows in 8 bits stay as they are beside those that come back from the zone.
    config = config_for(name)
    cache, s = grown(config, 1500)
    fork = cache.fork(s, tokens=kept)
    cache.remove(s)
    held = cache.stats()
    cache.remove(fork)
    empty = cache.stats()
    fresh, _ = grown(config, kept, steps=0)
    alone = fresh.stats()
    assert held.row_bytes + held.summary_bytes <= alone.row_bytes + alone.summary_bytes
    assert empty.row_bytes == empty.summary_bytes == empty.kept_bytes == 0
    if name not in ("HardKV", "PRKV"):  # which have queries of the prompt, or of the answer
        assert held.kept_bytes <= alone.kept_bytes


@pytest.mark.cpu("numbers of the CPU's arena")
def test_a_budget_that_has_no_room_for_what_is_cut_off_is_enough():
    fields = {"layers": 8, "block": 64, "head_dim": 128, "segment_tokens": 64}
    config = make_config(**fields)
    rng = np.random.default_rng(0)
    k, v = randn_kv(rng, 2000, config)

    def filled(budget: int) -> tuple[pk.Cache, int]:
        cache = pk.Cache(config.replace(memory_budget=budget))
        s = cache.add()
        for layer in range(8):
            cache.prefill(layer, [s], k, v)
        return cache, s

    reserved = filled(0)[0].stats().memory.reserved
    cache, s = filled(reserved)
    with pytest.raises(pk.OutOfMemory):  # each has a state of its own: it knows the zone
        [cache.fork(s) for _ in range(64)]
    for fork in cache.sequences()[1:]:
        cache.remove(fork)
    live = cache.stats().memory.live
    forks = [cache.fork(s, tokens=900) for _ in range(1000)]
    assert cache.stats().memory.live == live
    assert {cache.length(fork, layer) for fork in forks for layer in range(8)} == {900}


def test_an_argument_of_another_type_is_refused(device):
    cache, s = grown(make_config(device=device), 20, steps=0)
    with pytest.raises(TypeError, match=r"\[fork\] tokens: expected an integer, got str"):
        cache.fork(s, tokens="three")
    assert cache.length(cache.fork(s, tokens=None)) == 20
    assert cache.length(cache.fork(s, tokens=torch.tensor(3).item())) == 3
