"""Turns and drafts: ragged truncation."""

import pariskv_core as pk
import pytest
from support import (
    assert_same_sequence,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    unchanged,
)


def several(config: pk.Config, lengths: list[int], rng) -> tuple[pk.Cache, list[int]]:
    cache = pk.Cache(config)
    sequences = [cache.add() for _ in lengths]
    k, v = randn_kv(rng, sum(lengths), config)
    for layer in range(config.layers):
        cache.prefill(layer, sequences, k, v, lengths)
    return cache, sequences


@pytest.mark.parametrize("how", ["drop", "keep"])
def test_a_ragged_truncation_equals_one_by_one(how, device, rng):
    config = make_config(layers=2, device=device)
    lengths, dropped = [300, 90, 5, 200], [120, 0, 5, 33]
    cache, sequences = several(config, lengths, rng)
    twins = [cache.fork(s) for s in sequences]
    kept = [length - drop for length, drop in zip(lengths, dropped, strict=True)]
    cache.truncate(sequences, **{how: dropped if how == "drop" else kept})
    for twin, drop in zip(twins, dropped, strict=True):
        cache.truncate([twin], drop=[drop])
    probe = randn_q(rng, 1, config)[0]
    for s, twin, tokens in zip(sequences, twins, kept, strict=True):
        assert cache.length(s) == cache.length(s, 1) == tokens
        assert_same_sequence(cache, s, cache, twin, probe)


def test_one_number_truncates_every_sequence(rng):
    cache, sequences = several(make_config(), [80, 30], rng)
    cache.truncate(sequences, drop=10)
    assert [cache.length(s) for s in sequences] == [70, 20]
    cache.truncate(sequences, keep=20)
    assert [cache.length(s) for s in sequences] == [20, 20]
    cache.truncate([], drop=3)


def test_keep_evens_out_layers_that_a_failed_step_left_apart(rng):
    config = make_config(layers=2)
    f, twin = filled(config, 200), filled(config, 200)
    f.cache.decode(0, [f.s], *randn_step(rng, 1, config))  # and never in layer 1
    assert f.cache.length(f.s, 0) == 201
    f.cache.truncate([f.s], keep=200)
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, randn_q(rng, 1, config)[0])


def test_one_sequence_that_is_too_short_leaves_all_as_they_were(rng):
    cache, sequences = several(make_config(layers=2), [300, 20], rng)
    with unchanged(cache), pytest.raises(ValueError, match=r"\[truncate\] drop: .*to 20"):
        cache.truncate(sequences, drop=21)
