"""What still works when rows were dropped, and what is refused before anything changes."""

from __future__ import annotations

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from dropped_life import DROPPED, first_dropped, kept_rows, started
from hardkv_life import make_config
from oracle_hardkv import Model, Query
from support import ARITHMETIC, assert_same_bits, f64, randn_kv, randn_q, randn_step


def test_a_second_turn_chooses_from_what_is_left():
    """Kept rows, held rows, and the turn itself: the oracle's choice without the others."""
    config = make_config(pk.HardKV(most=20, p=0.7, placement="dropped"))
    twin = pk.Cache(config)
    t = twin.add()
    model = Model(twin.config)
    rng = np.random.default_rng(0)
    (k, v), q = randn_kv(rng, 300, config), randn_q(rng, 300, config)
    twin.prefill(0, [t], k, v, q=q)
    model.prefill(k.float().cpu().numpy(), [Query(row) for row in q.float().cpu().numpy()])
    step = randn_step(rng, 1, config)
    twin.decode(0, [t], *step)
    model.decode(step[1].float().cpu().numpy(), Query(step[0].float().cpu().numpy()[0]))
    assert twin.regions(t).dropped > 0
    (k, v), q = randn_kv(rng, 80, config), randn_q(rng, 80, config)
    twin.prefill(0, [t], k, v, q=q)
    begin, end = len(model.k), model.zone[1]
    model._append(k.float().cpu().numpy())
    model.regions.prefill(range(begin, len(model.k)))
    model._remember(begin, 80, [Query(row) for row in q.float().cpu().numpy()])
    model._flushed(end, whole=False)
    assert kept_rows(twin, t)[0] == [head.kept for head in model.heads]
    assert kept_rows(twin, t)[1] == [sorted(head.held) for head in model.heads]


def test_calls_that_need_dropped_rows_are_refused_before_anything_changes():
    cache, s, rng = started(make_config(DROPPED))
    config, twin = cache.config, cache.fork(s)
    first, dropped = first_dropped(cache), cache.regions(s).dropped
    total, end = cache.length(s), first_dropped(cache) + dropped
    assert (first, dropped) == (64, 256)
    gone = rf"rows {first} to {end - 1} of sequence {s} were dropped after others had been chosen"
    (k, v), q = randn_kv(rng, 9, config), randn_q(rng, 9, config)
    before = cache.stats()
    refused = {
        r"\[attend\] sequences: expected all of their rows \(decode takes a turn": [
            lambda: cache.attend(0, [s], q),
            lambda: cache.attend(0, [s], q, k=k, v=v),
        ],
        r"\[prefill\] q: expected the queries of these tokens": [
            lambda: cache.prefill(0, [s], k, v)
        ],
        r"\[read\] positions: expected rows that are stored, got 300 to 320, but": [
            lambda: cache.read(0, s, 300, 320)
        ],
        rf"\[truncate\] drop: expected {total - end - 16} tokens or fewer, or {total - 64} or more,"
        rf" got {total - end - 15}, since": [
            lambda: cache.truncate([twin, s], drop=[0, total - end - 15])
        ],
        rf"\[truncate\] keep: expected {end + 16} tokens or more, or 64 or fewer, got 65, since": [
            lambda: cache.truncate([s], keep=65)
        ],
    }
    for start, calls in refused.items():
        for call in calls:
            with pytest.raises(ValueError, match=start) as caught:
                call()
            assert gone.replace("\\", "") in str(caught.value)
            assert 'the policy HardKV with the placement "host" stores all rows' in str(
                caught.value
            )
    after = cache.stats()
    for name in ("tokens", "row_bytes", "kept_bytes", "keeps", "dropped_rows"):
        assert getattr(after, name) == getattr(before, name)
    for _ in range(40):
        step = randn_step(rng, 1, config)
        assert_same_bits(cache.decode(0, [s], *step), cache.decode(0, [twin], *step))


def test_save_names_the_policy(tmp_path):
    cache, s, _ = started(make_config(DROPPED))
    with pytest.raises(ValueError, match=r"\[save\] policy: expected one whose sequences fit"):
        cache.save(s, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_calls_that_do_not_need_dropped_rows_work():
    cache, s, rng = started(make_config(DROPPED))
    config, end = cache.config, first_dropped(cache) + cache.regions(s).dropped
    assert cache.read(0, s, 0, 64)[0].shape[0] == 64
    assert cache.read(0, s, end, end + 20)[0].shape[0] == 20
    kept, _ = kept_rows(cache, s)
    cache.truncate([s], drop=cache.length(s) - end - config.local)
    assert cache.length(s) == end + config.local
    assert kept_rows(cache, s)[0] == [[p for p in head if p < end] for head in kept]
    before = cache.regions(s).retrieval
    cache.flush([s])
    for _ in range(60):
        assert torch.isfinite(cache.decode(0, [s], *randn_step(rng, 1, config))).all()
    assert cache.regions(s).retrieval > before
    out = cache.decode(0, [s], randn_q(rng, 1, config))  # a layer that shares these rows
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("cut", [20, 50], ids=["queries are left", "none is"])
def test_a_cut_into_the_zone_leaves_the_kept_rows_that_are_not_cut(cut, rng):
    """There is nothing to choose from but what was kept, so no row comes in for those cut."""
    config = make_config(pk.HardKV(most=40, p=1.0, placement="dropped"))
    cache = pk.Cache(config)
    s, rows = cache.add(), [randn_kv(rng, 300, config)]
    cache.prefill(0, [s], *rows[0], q=randn_q(rng, 300, config))
    for _ in range(30):
        step = randn_step(rng, 1, config)
        rows.append(step[1:])
        cache.decode(0, [s], *step)
    regions, before = cache.regions(s), kept_rows(cache, s)
    zone_end = 4 + regions.retrieval - cut
    cache.truncate([s], drop=regions.buffer + cut)
    total = cache.length(s)
    assert (cache.regions(s).dropped, total) == (regions.dropped, zone_end + config.local)
    kept, held = ([[p for p in head if p < zone_end] for head in heads] for heads in before)
    assert kept_rows(cache, s) == (kept, held)
    assert kept != before[0]

    q, *row = randn_step(rng, 1, config)
    k, v = (f64(torch.cat([pair[i] for pair in rows])) for i in (0, 1))
    k, v = (np.concatenate([x[:total], f64(y)]) for x, y in zip((k, v), row, strict=True))
    attended = [np.r_[:4, head, zone_end : total + 1] for head in kept]
    expected, _ = oracle.attention_over(f64(q)[0], k, v, attended, oracle.Logits(None, 0.0))
    out = cache.decode(0, [s], q, *row)
    sums = 2e-3 if config.device.startswith("cuda") else 20 * ARITHMETIC
    np.testing.assert_allclose(f64(out)[0], expected, rtol=0, atol=sums)


@pytest.mark.parametrize("keep", [0, 3, 64])
def test_a_sequence_that_is_cut_before_its_dropped_rows_is_whole_again(keep):
    cache, s, rng = started(make_config(DROPPED))
    config = cache.config
    cache.truncate([s], keep=keep)
    assert cache.regions(s).dropped == cache.stats().dropped_rows == 0
    (k, v), q = randn_kv(rng, 90, config), randn_q(rng, 90, config)
    cache.attend(0, [s], q, k=k, v=v)
    assert cache.read(0, s, 0, keep + 90)[0].shape[0] == keep + 90
    for _ in range(70):
        cache.decode(0, [s], *randn_step(rng, 1, config))
    assert cache.regions(s).dropped > 0


@pytest.mark.parametrize("update", [1, 24])
def test_where_no_query_is_left_the_latest_rows_are_kept(update):
    """A truncation forgets the queries: the zone cannot be attended to in full any more."""
    cache, s, rng = started(make_config(DROPPED, update=update, local=64, segment_tokens=64))
    for _ in range(200):
        regions = cache.regions(s)
        if 4 + regions.retrieval >= 64 + regions.dropped + 40:  # rows to take back
            break
        cache.decode(0, [s], *randn_step(rng, 1, cache.config))
    cache.truncate([s], drop=40)
    zone = cache.regions(s).retrieval
    if update == 1:
        cache.decode(0, [s], *randn_step(rng, 1, cache.config))
    else:
        for _ in range(20):
            cache.decode(0, [s], *randn_step(rng, 1, cache.config))
        cache.truncate([s], drop=20)
        cache.flush([s])
    begin, end = 4, 4 + cache.regions(s).retrieval
    assert cache.regions(s).retrieval >= zone
    for head in kept_rows(cache, s)[0]:
        assert begin < min(head)
        assert head[-1] == end - 1 or update != 1
    assert torch.isfinite(cache.decode(0, [s], *randn_step(rng, 1, cache.config))).all()


def test_a_step_can_be_taken_back_at_once():
    """Rows go with the step after the one that chose: a pass that failed halfway is undone."""
    cache, s, rng = started(make_config(DROPPED), steps=0)
    for _ in range(300):
        twin = cache.fork(s)
        cache.decode(0, [twin], *randn_step(rng, 1, cache.config))
        cache.truncate([twin], drop=1)
        cache.remove(twin)
        cache.decode(0, [s], *randn_step(rng, 1, cache.config))
    assert cache.regions(s).dropped > 256


@pytest.mark.cpu("a GPU has other budgets: test_cuda_failures.cpp fails its allocations")
def test_a_flush_without_memory_changes_nothing_and_works_when_there_is_some(rng):
    policy = pk.HardKV(most=200, p=1.0, patience=0, placement="dropped")
    config = make_config(policy, head_dim=256, value_dim=256, segment_tokens=64)
    free, tight = pk.Cache(config), pk.Cache(config.replace(memory_budget=6 << 20))
    (k, v), q = randn_kv(rng, 400, config), randn_q(rng, 400, config)
    caches, s = (free, tight), 0
    for cache in caches:
        cache.prefill(0, [cache.add()], k, v, q=q)
    others, refused = [], 0
    for _ in range(150):
        step = randn_step(rng, 1, config)
        expected = free.decode(0, [s], *step)
        while True:
            try:  # another sequence takes what is left
                other = tight.add()
                others.append(other)
                tight.prefill(0, [other], k[:64], v[:64])
            except pk.OutOfMemory:
                break
        before, kept = tight.stats(), kept_rows(tight, s)
        regions = repr(tight.regions(s))
        try:
            out = tight.decode(0, [s], *step)
        except pk.OutOfMemory:
            refused += 1
            after = tight.stats()
            for name in ("tokens", "row_bytes", "kept_bytes", "keeps", "dropped_rows"):
                assert getattr(after, name) == getattr(before, name)
            assert repr(tight.regions(s)) == regions
            assert kept_rows(tight, s) == kept
            for other in others:
                tight.remove(other)
            others = []
            out = tight.decode(0, [s], *step)
        assert_same_bits(out, expected)
    assert refused > 2
    assert tight.regions(s).dropped > 300
