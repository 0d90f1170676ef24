"""Batches that were looked up once: calls take them in place of a list of sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pariskv_core as pk
import pytest
from support import assert_same_bits, make_config, randn_kv, randn_q, randn_step, unchanged

LENGTHS = [90, 1, 130]


def scene(tokens: list[int] = LENGTHS, layers: int = 1) -> tuple[pk.Cache, list[int]]:
    cache = pk.Cache(make_config(layers=layers))
    sequences = [cache.add() for _ in tokens]
    k, v = randn_kv(np.random.default_rng(7), sum(tokens), cache.config)
    for layer in range(layers):
        cache.prefill(layer, sequences, k, v, tokens)
    return cache, sequences


def life_of(cache: pk.Cache, sequences: list[int] | pk.Batch) -> list:
    """What the calls give that take sequences, all but `advance`."""
    rng, config, found = np.random.default_rng(3), cache.config, []
    (k, v), q = randn_kv(rng, sum(LENGTHS), config), randn_q(rng, sum(LENGTHS), config)
    cache.prefill(0, sequences, k, v, LENGTHS, q=q)
    for _ in range(60):
        found.append(cache.decode(0, sequences, *randn_step(rng, 3, config)))
    cache.truncate(sequences, drop=[3, 0, 40])
    found.append(cache.decode(0, sequences, randn_q(rng, 3, config)))
    cache.reorder(sequences, [2, 0, 0])
    (k, v), q = randn_kv(rng, 6, config), randn_q(rng, 6, config)
    found.append(cache.attend(0, sequences, q, lengths=[2, 1, 3], k=k, v=v))
    cache.truncate(sequences, keep=70)
    cache.flush(sequences)
    return [*found, cache.attend(0, sequences, q, lengths=[1, 2, 3])]


def test_every_call_takes_a_batch_in_place_of_a_list():
    cache, sequences = scene()
    other, same = scene()
    found = life_of(cache, cache.batch(sequences))
    for mine, theirs in zip(found, life_of(other, same), strict=True):
        assert_same_bits(mine, theirs)
    assert [cache.length(s) for s in sequences] == [70] * 3


def test_a_batch_says_what_it_holds():
    cache, (a, b, c) = scene()
    batch = cache.batch([c, a])
    assert isinstance(batch, pk.Batch)
    assert (batch.ids, len(batch), repr(batch)) == ([c, a], 2, f"Batch([{c}, {a}])")
    assert len(cache.batch((a, b, c))) == 3
    empty = cache.batch([])
    assert (empty.ids, len(empty), repr(empty)) == ([], 0, "Batch([])")
    cache.flush(empty)


def test_the_order_of_a_batch_is_its_own(rng):
    cache, (a, b, _) = scene()
    other, _ = scene()
    q, k, v = randn_step(rng, 2, cache.config)
    out = cache.decode(0, cache.batch([b, a]), q, k, v)
    assert_same_bits(out.flip(0), other.decode(0, [a, b], q.flip(0), k.flip(0), v.flip(0)))


def test_a_batch_stays_good_while_other_sequences_come_and_go(rng):
    cache, (a, b, c) = scene()
    other, _ = scene()
    batch = cache.batch([a, c])
    for each in (cache, other):
        extra = [each.add() for _ in range(40)]
        each.fork(a)
        each.remove(b)
        for s in extra[::2]:
            each.remove(s)
        each.reorder([c, a], [1, 1])
    step = randn_step(rng, 2, cache.config)
    assert_same_bits(cache.decode(0, batch, *step), other.decode(0, [a, c], *step))


@pytest.mark.cuda
def test_advance_takes_a_batch():
    cache, sequences = scene()
    cache.advance(cache.batch(sequences[:2]))
    assert [cache.length(s) for s in sequences] == [91, 2, 130]


def test_layers_share_a_batch(rng):
    cache, sequences = scene(layers=3)
    other, _ = scene(layers=3)
    batch = cache.batch(sequences)
    for layer in range(3):
        step = randn_step(rng, 3, cache.config)
        mine = cache.decode(layer, batch, *step)
        assert_same_bits(mine, other.decode(layer, sequences, *step))


CALLS: dict[str, Callable] = {
    "prefill": lambda cache, batch, q, k, v: cache.prefill(0, batch, k, v, [1, 1]),
    "decode": lambda cache, batch, q, k, v: cache.decode(0, batch, q, k, v),
    "attend": lambda cache, batch, q, k, v: cache.attend(0, batch, q, lengths=[1, 1], k=k, v=v),
    "truncate": lambda cache, batch, q, k, v: cache.truncate(batch, drop=1),
    "reorder": lambda cache, batch, q, k, v: cache.reorder(batch, [0, 0]),
    "flush": lambda cache, batch, q, k, v: cache.flush(batch),
    "advance": lambda cache, batch, q, k, v: cache.advance(batch),
}


@pytest.mark.parametrize("call", CALLS.items(), ids=CALLS)
def test_a_batch_with_a_removed_sequence_is_refused(call, rng):
    name, act = call
    cache, (a, b, c) = scene()
    batch = cache.batch([a, c])
    cache.remove(c)
    with unchanged(cache), pytest.raises(ValueError, match=rf"\[{name}\] sequences: {c} is not a"):
        act(cache, batch, *randn_step(rng, 2, cache.config))
    cache.flush(cache.batch([a, b]))


@pytest.mark.parametrize("call", CALLS.items(), ids=CALLS)
def test_a_batch_of_another_cache_is_refused(call, rng):
    """Its sequences have the same names there."""
    name, act = call
    cache, _ = scene()
    other, (a, b, _) = scene()
    sentence = rf"\[{name}\] sequences: expected a batch of this cache, got one of another"
    with unchanged(cache), pytest.raises(ValueError, match=sentence):
        act(cache, other.batch([a, b]), *randn_step(rng, 2, cache.config))


def test_a_batch_outlives_its_cache():
    cache, sequences = scene()
    batch = cache.batch(sequences)
    cache.close()
    del cache
    assert batch.ids == sequences
    for _ in range(3):
        later, _ = scene()
        with pytest.raises(ValueError, match="got one of another"):
            later.flush(batch)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda c: c.batch(), TypeError, r"\[batch\] sequences: expected, and not given"),
        (lambda c: c.batch(0), TypeError, r"\[batch\] sequences: expected a list of integers, got"),
        (lambda c: c.batch("01"), TypeError, r"\[batch\] sequences: expected a list of integers"),
        (lambda c: c.batch([0, 1.5]), TypeError, r"\[batch\] sequences: expected integers alone"),
        (lambda c: c.batch(c.batch([0])), TypeError, r"\[batch\] sequences: expected a list of in"),
        (lambda c: c.batch([0, 9]), ValueError, r"\[batch\] sequences: 9 is not a sequence of thi"),
        (lambda c: c.batch([1, 1]), ValueError, r"\[batch\] sequences: expected each once, got 1 "),
        (lambda c: c.flush(0), TypeError, r"\[flush\] sequences: expected a list of integers, got"),
        (lambda c: c.length(c.batch([0])), TypeError, r"\[length\] sequence: expected an integer"),
        (lambda c: c.remove(c.batch([0])), TypeError, r"\[remove\] sequence: expected an integer"),
        (lambda c: pk.Batch([0]), TypeError, "Batch"),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(call, error, sentence):
    cache, _ = scene()
    with unchanged(cache), pytest.raises(error, match=sentence):
        call(cache)


def test_a_closed_cache_makes_no_batch():
    cache, sequences = scene()
    cache.close()
    with pytest.raises(ValueError, match="this cache is closed"):
        cache.batch(sequences)
