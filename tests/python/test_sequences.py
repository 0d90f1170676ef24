"""Batches, chunks, forks, beams, truncation: however a sequence came to be, the same bits."""

import math

import hypothesis.strategies as st
import numpy as np
import pariskv_core as pk
import pytest
import torch
from hypothesis import given
from support import (
    SCORERS,
    assert_same_bits,
    assert_same_explanation,
    assert_same_sequence,
    assert_same_summaries,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    state_of,
)


def new_sequence(cache: pk.Cache, k: torch.Tensor, v: torch.Tensor) -> int:
    s = cache.add()
    for layer in range(cache.config.layers):
        cache.prefill(layer, [s], k, v)
    return s


def decode_all_layers(cache: pk.Cache, sequences: list[int], step) -> torch.Tensor:
    outs = [cache.decode(layer, sequences, *step) for layer in range(cache.config.layers)]
    return torch.stack(outs)


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_ragged_batch_equals_each_alone(scorer, dtype, device, rng):
    config = make_config(scorer=scorer, dtype=dtype, device=device)
    lengths = [0, 1, 5, 35, 36, 37, 100, 333, 511]
    together = pk.Cache(config)
    sequences = [together.add() for _ in lengths]
    k, v = randn_kv(rng, sum(lengths), config)
    together.prefill(0, sequences, k, v, lengths)

    alone, at = [], 0
    for length in lengths:
        cache = pk.Cache(config)
        s = new_sequence(cache, k[at : at + length], v[at : at + length])
        alone.append((cache, s))
        at += length

    for _ in range(60):  # every sequence flushes on the way
        step = randn_step(rng, len(lengths), config)
        out, lse = together.decode(0, sequences, *step, return_lse=True)
        for i, (cache, s) in enumerate(alone):
            mine = tuple(x[i : i + 1] for x in step)
            out_i, lse_i = cache.decode(0, [s], *mine, return_lse=True)
            assert_same_bits(out[i : i + 1], out_i, f"sequence {i}")
            assert_same_bits(lse[i : i + 1], lse_i, f"sequence {i}")
    for i, (cache, s) in enumerate(alone):
        assert_same_sequence(together, sequences[i], cache, s, step[0][i])


def test_the_order_of_a_batch_does_not_matter(device, rng):
    config = make_config(device=device)
    a, b = (pk.Cache(config) for _ in range(2))
    lengths = [200, 90, 300]
    k, v = randn_kv(rng, sum(lengths), config)
    parts = list(zip(k.split(lengths), v.split(lengths), strict=True))
    in_a = [new_sequence(a, *part) for part in parts]
    in_b = [new_sequence(b, *part) for part in parts]
    step = randn_step(rng, 3, config)
    turned = [2, 0, 1]
    out_a = a.decode(0, in_a, *step)
    out_b = b.decode(0, [in_b[i] for i in turned], *(x[turned] for x in step))
    assert_same_bits(out_a[turned], out_b)


def test_a_ragged_attend_equals_each_alone(dtype, device, rng):
    config = make_config(dtype=dtype, device=device)
    cache = pk.Cache(config)
    totals, lengths = [70, 9, 200], [33, 9, 1]
    k, v = randn_kv(rng, sum(totals), config)
    parts = zip(k.split(totals), v.split(totals), strict=True)
    sequences = [new_sequence(cache, *part) for part in parts]
    q = randn_q(rng, sum(lengths), config)
    out = cache.attend(0, sequences, q, lengths)
    for s, mine, queries in zip(sequences, out.split(lengths), q.split(lengths), strict=True):
        assert_same_bits(mine, cache.attend(0, [s], queries))


def test_attend_of_a_few_equals_attend_of_one_by_one(dtype, device):
    # What a draft's verification gives must not depend on how many tokens are verified.
    config = make_config(dtype=dtype, device=device)
    f = filled(config, 200)
    q = randn_q(f.rng, 6, config)
    together = f.cache.attend(0, [f.s], q)
    assert_same_bits(together[-1:], f.cache.attend(0, [f.s], q[-1:]))
    assert_same_bits(together[2:], f.cache.attend(0, [f.s], q[2:]))
    f.cache.truncate([f.s], drop=2)
    assert_same_bits(together[:4], f.cache.attend(0, [f.s], q[:4]))


def assert_chunks_equal_the_whole(chunks: list[int], **changes) -> None:
    config = make_config(**changes)
    total = sum(chunks)
    whole = filled(config, total, seed=total)
    pieces = pk.Cache(config)
    s = pieces.add()
    for k, v in zip(whole.k.split(chunks), whole.v.split(chunks), strict=True):
        pieces.prefill(0, [s], k, v)
    assert state_of(pieces) == state_of(whole.cache)
    step = randn_step(whole.rng, 1, config)
    assert_same_sequence(pieces, s, whole.cache, whole.s, step[0][0])
    assert_same_bits(
        pieces.decode(0, [s], *step), whole.cache.decode(0, [whole.s], *step), "decode"
    )


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize(
    "chunks",
    [
        [300],
        [150, 150],
        [1, 299],
        [299, 1],
        [4, 32, 264],
        [36, 28, 236],
        [64] * 4 + [44],
        [0, 100, 0, 200],
        [1] * 60 + [240],
        [7] * 42 + [6],
    ],
    ids=str,
)
def test_a_prompt_in_chunks_equals_the_prompt_at_once(scorer, chunks, dtype):
    assert_chunks_equal_the_whole(chunks, scorer=scorer, dtype=dtype)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=8), st.sampled_from(SCORERS))
def test_any_chunks_equal_the_whole(chunks, scorer):
    assert_chunks_equal_the_whole(chunks, scorer=scorer)


def test_a_second_turn_goes_on_where_decode_left_off(device, rng):
    # prefill, decode, prefill: the second prefill flushes what decode left in the buffer.
    config = make_config(device=device)
    turns = filled(config, 100)
    steps = [randn_step(rng, 1, config) for _ in range(10)]
    for step in steps:
        turns.cache.decode(0, [turns.s], *step)
    k, v = randn_kv(rng, 50, config)
    turns.cache.prefill(0, [turns.s], k, v)

    whole = pk.Cache(config)
    s = new_sequence(
        whole,
        torch.cat([turns.k, *(step[1] for step in steps), k]),
        torch.cat([turns.v, *(step[2] for step in steps), v]),
    )
    assert_same_sequence(turns.cache, turns.s, whole, s, randn_q(rng, 1, config)[0])


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("at", [0, 3, 40, 64, 100, 200])
def test_a_fork_and_its_origin_go_their_own_ways(scorer, at, device, rng):
    config = make_config(scorer=scorer, layers=2, device=device)
    cache, twin, other = (pk.Cache(config) for _ in range(3))
    k, v = randn_kv(rng, at, config)
    origin, alike, elsewhere = (new_sequence(c, k, v) for c in (cache, twin, other))
    fork = cache.fork(origin)
    assert fork != origin
    probe = randn_q(rng, 1, config)[0]
    assert_same_sequence(cache, fork, cache, origin, probe)
    for _ in range(70):
        # The two take turns to write first, so that either may find the other's blocks.
        mine, theirs = randn_step(rng, 1, config), randn_step(rng, 1, config)
        a = decode_all_layers(cache, [origin], mine)
        b = decode_all_layers(cache, [fork], theirs)
        assert_same_bits(a, decode_all_layers(twin, [alike], mine))
        assert_same_bits(b, decode_all_layers(other, [elsewhere], theirs))
    assert_same_sequence(cache, origin, twin, alike, probe)
    assert_same_sequence(cache, fork, other, elsewhere, probe)


def test_a_fork_outlives_its_origin(device, rng):
    config = make_config(device=device)
    f, twin = filled(config, 300), filled(config, 300)
    fork = f.cache.fork(f.s)
    f.cache.remove(f.s)
    noise = new_sequence(f.cache, *randn_kv(rng, 300, config))  # takes whatever was freed
    assert_same_sequence(f.cache, fork, twin.cache, twin.s, randn_q(rng, 1, config)[0])
    f.cache.remove(fork)
    assert f.cache.sequences() == [noise]


def test_forks_share_storage_until_they_write(device):
    f = filled(make_config(device=device), 64 * 20)
    before = f.cache.stats()
    forks = [f.cache.fork(f.s) for _ in range(5)]
    after = f.cache.stats()
    assert after.row_bytes == before.row_bytes
    assert after.memory.live - before.memory.live < 0.05 * 5 * before.memory.live
    assert after.tokens == 6 * before.tokens
    k, v = randn_kv(f.rng, 1, f.cache.config)
    f.cache.prefill(0, [forks[0]], k, v)
    # One segment more: 1280 tokens fill 20 segments exactly.
    assert f.cache.stats().row_bytes == before.row_bytes * 21 // 20


def test_counted_stats_leave_out_what_sequences_are_asked_for(device):
    f = filled(make_config(layers=2, device=device), 700)
    forks = [f.cache.fork(f.s) for _ in range(3)]
    q = randn_q(f.rng, 1, f.cache.config)
    for layer in range(2):
        f.cache.decode(layer, [forks[0]], q, *randn_kv(f.rng, 1, f.cache.config))
    f.cache.remove(forks[1])
    whole, counted = f.cache.stats(), f.cache.stats(counted=True)
    left_out = {"tokens", "kept_rows", "dropped_rows", "unusable_keys"}
    names = {name for name in dir(pk.Stats) if not name.startswith("_")} - {"memory", "host_memory"}
    assert left_out < names
    for name in names:
        mine, theirs = getattr(counted, name), getattr(whole, name)
        assert mine == (0 if name in left_out else theirs) or math.isnan(theirs), name
    assert whole.tokens > 0
    assert counted.memory.live == whole.memory.live
    for s in f.cache.sequences():
        f.cache.remove(s)
    empty = f.cache.stats(counted=True)
    assert (empty.row_bytes, empty.summary_bytes, empty.kept_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    "source", [[0, 1, 2], [2, 0, 1], [1, 0, 2], [0, 0, 0], [2, 2, 0], [1, 1, 1], [1, 2, 2]]
)
def test_reorder_copies_each_source(source, device, rng):
    config = make_config(layers=2, device=device)
    cache = pk.Cache(config)
    histories = [randn_kv(rng, tokens, config) for tokens in (50, 200, 333)]
    sequences = [new_sequence(cache, *history) for history in histories]
    bystander = new_sequence(cache, *histories[0])
    cache.reorder(sequences, source)
    assert cache.sequences() == [*sequences, bystander]
    probe = randn_q(rng, 1, config)[0]
    reference = pk.Cache(config)
    expected = [new_sequence(reference, *histories[i]) for i in source]
    for s, t in zip(sequences, expected, strict=True):
        assert_same_sequence(cache, s, reference, t, probe)
    # What came from one source goes separate ways afterwards.
    for _ in range(60):
        step = randn_step(rng, 3, config)
        assert_same_bits(
            decode_all_layers(cache, sequences, step), decode_all_layers(reference, expected, step)
        )
    for s, t in zip(sequences, expected, strict=True):
        assert_same_sequence(cache, s, reference, t, probe)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("dropped", [0, 1, 31, 32, 33, 50, 64, 100, 263, 299, 300])
def test_truncation_of_a_prompt_equals_a_shorter_prompt(scorer, dropped, dtype, rng):
    config = make_config(scorer=scorer, dtype=dtype)
    f = filled(config, 300)
    f.cache.truncate([f.s], drop=dropped)
    fresh = pk.Cache(config)
    s = new_sequence(fresh, f.k[: 300 - dropped], f.v[: 300 - dropped])
    probe = randn_q(rng, 1, config)[0]
    assert_same_sequence(f.cache, f.s, fresh, s, probe)
    for _ in range(60):
        step = randn_step(rng, 1, config)
        assert_same_bits(f.cache.decode(0, [f.s], *step), fresh.decode(0, [s], *step))
    assert_same_sequence(f.cache, f.s, fresh, s, probe)


@pytest.mark.parametrize("scorer", SCORERS)
def test_truncation_across_a_flush(scorer, rng):
    # 10 tokens into the buffer after a flush at 48; dropping 70 reaches behind that flush.
    config = make_config(scorer=scorer, layers=2)
    f = filled(config, 200)
    steps = [randn_step(rng, 1, config) for _ in range(58)]
    for step in steps:
        decode_all_layers(f.cache, [f.s], step)
    assert regions_of(f.cache, f.s) == (4, 212, 32, 10)
    f.cache.truncate([f.s], drop=70)
    assert regions_of(f.cache, f.s) == (4, 152, 32, 0)
    fresh = pk.Cache(config)
    s = new_sequence(fresh, f.k[:188], f.v[:188])
    assert_same_sequence(f.cache, f.s, fresh, s, randn_q(rng, 1, config)[0])


def test_truncation_inside_the_buffer_leaves_the_zone_alone(rng):
    config = make_config()
    f, twin = filled(config, 200), filled(config, 200)
    steps = [randn_step(rng, 1, config) for _ in range(30)]
    for step in steps:
        f.cache.decode(0, [f.s], *step)
    for step in steps[:18]:
        twin.cache.decode(0, [twin.s], *step)
    f.cache.truncate([f.s], drop=12)
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, randn_q(rng, 1, config)[0])


def test_truncation_of_a_fork_leaves_the_origin(rng):
    f, twin = filled(make_config(), 300), filled(make_config(), 300)
    fork = f.cache.fork(f.s)
    f.cache.truncate([fork], drop=250)
    f.cache.prefill(0, [fork], *randn_kv(rng, 250, f.cache.config))
    probe = randn_q(rng, 1, f.cache.config)[0]
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, probe)


def test_a_speculative_round_leaves_no_trace(device, rng):
    # Verify a draft with attend, drop what was refused: as if it had never been there.
    config = make_config(device=device)
    f, twin = filled(config, 150), filled(config, 150)
    k, v = randn_kv(rng, 5, config)
    fork = f.cache.fork(f.s)
    f.cache.prefill(0, [fork], k, v)
    f.cache.attend(0, [fork], randn_q(rng, 5, config))
    f.cache.remove(fork)
    step = randn_step(rng, 1, config)
    assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))


def test_a_flush_equals_a_prefill(device, rng):
    config = make_config(layers=2, device=device)
    f = filled(config, 100)
    step = randn_step(rng, 1, config)
    decode_all_layers(f.cache, [f.s], step)
    f.cache.flush([f.s])
    fresh = pk.Cache(config)
    s = new_sequence(fresh, torch.cat([f.k, step[1]]), torch.cat([f.v, step[2]]))
    assert_same_sequence(f.cache, f.s, fresh, s, randn_q(rng, 1, config)[0])


def test_empty_batches_and_empty_lengths(device, rng):
    config = make_config(device=device)
    f, twin = filled(config, 100), filled(config, 100)
    k, v = randn_kv(rng, 0, config)
    q = randn_q(rng, 0, config)
    f.cache.prefill(0, [], k, v, [])
    f.cache.prefill(0, [f.s], k, v)
    f.cache.prefill(0, [f.s], k, v, [0])
    assert f.cache.decode(0, [], q, k, v).shape == (0, 4, 64)
    out, lse = f.cache.attend(0, [f.s], q, [0], return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
    f.cache.truncate([f.s], drop=0)
    f.cache.reorder([], [])
    f.cache.flush([])
    assert f.cache.sequences() == [f.s]
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, randn_q(rng, 1, config)[0])


def test_an_empty_sequence_can_be_forked_truncated_flushed_and_explained(device, rng):
    config = make_config(device=device)
    cache = pk.Cache(config)
    s = cache.add()
    fork = cache.fork(s)
    cache.truncate([s], drop=0)
    cache.flush([s])
    assert regions_of(cache, fork) == (0, 0, 0, 0)
    assert not cache.explain(0, s, randn_q(rng, 1, config)[0]).searched
    summaries = cache.summaries(0, s)
    assert summaries.signs.shape == summaries.weights.shape == (2, 0, 8)
    assert summaries.magnitudes.shape == (2, 0, 64)
    assert summaries.norms.shape == (2, 0)
    cache.remove(s)
    assert cache.length(fork) == 0


def test_handles_are_never_used_again():
    cache = pk.Cache(make_config())
    seen = set()
    for _ in range(50):
        a = cache.add()
        b = cache.fork(a)
        assert not {a, b} & seen
        seen |= {a, b}
        cache.remove(a)
        with pytest.raises(ValueError, match=str(a)):
            cache.length(a)
        cache.remove(b)
    assert cache.sequences() == []


def test_a_sequence_does_not_see_removed_sequences(device, rng):
    config = make_config(device=device)
    f, fresh = filled(config, 300), pk.Cache(config)
    f.cache.remove(f.s)
    k, v = randn_kv(rng, 130, config)
    again, s = new_sequence(f.cache, k, v), new_sequence(fresh, k, v)
    for _ in range(50):
        step = randn_step(rng, 1, config)
        assert_same_bits(f.cache.decode(0, [again], *step), fresh.decode(0, [s], *step))
    assert_same_explanation(f.cache.explain(0, again, step[0][0]), fresh.explain(0, s, step[0][0]))
    assert_same_summaries(f.cache.summaries(0, again), fresh.summaries(0, s))


def test_a_neighbour_cannot_be_felt(device, rng):
    # Change everything about one request; the other's bits do not move.
    config = make_config(device=device)
    calm, wild = pk.Cache(config), pk.Cache(config)
    k, v = randn_kv(rng, 200, config)
    mine = [new_sequence(c, k, v) for c in (calm, wild)]
    theirs = [new_sequence(calm, k, v), new_sequence(wild, *randn_kv(rng, 77, config))]
    for _ in range(50):
        q, k1, v1 = randn_step(rng, 2, config)
        out = calm.decode(0, [mine[0], theirs[0]], q, k1, v1)
        noise = torch.stack([torch.zeros_like(q[0]), torch.full_like(q[0], 1e3)])
        other = wild.decode(0, [mine[1], theirs[1]], q + noise, k1, v1)
        assert_same_bits(out[0], other[0])


def test_reading_rows_back(dtype, device):
    f = filled(make_config(dtype=dtype, device=device), 200)
    k = torch.empty_like(f.k[50:131])
    v = torch.empty_like(k)
    assert f.cache.read(0, f.s, 50, 131, out=(k, v)) is not None
    assert_same_bits(k, f.k[50:131])
    assert_same_bits(v, f.v[50:131])
    if dtype != "bfloat16" or device != "cpu":
        k, v = f.cache.read(0, f.s, 0, 200)
        assert isinstance(k, np.ndarray if device == "cpu" else torch.Tensor)
        assert_same_bits(k, f.k)
        assert_same_bits(v, f.v)
