"""Blocks that share a mean: however a sequence came to be, the same bits.

test_sequences.py has the same for whole keys. Here a zone grows by whole blocks, and its balance is
set once, from its first keys and the queries of a few positions.
"""

import hypothesis.strategies as st
import numpy as np
import pariskv_core as pk
import pytest
import torch
from hypothesis import given, settings
from support import (
    assert_same_bits,
    assert_same_sequence,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    state_of,
)

BLOCKS = (64, 128, 256)
# With a sink of 4 a zone opens at 256 tokens; of the last 16 before that, queries are looked at.
OPENING = 256
OBSERVED = 16


def block_config(block: int = 64, **changes) -> pk.Config:
    return make_config(**{"block": block, "segment_tokens": 256, **changes})


def parts_of(x: torch.Tensor | None, chunks: list[int]):
    return [None] * len(chunks) if x is None else x.split(chunks)


def assert_chunks_equal_the_whole(chunks: list[int], queries: bool, **changes) -> None:
    config = block_config(**changes)
    whole = filled(config, sum(chunks), seed=sum(chunks), queries=queries)
    pieces = pk.Cache(config)
    s = pieces.add()
    streams = [parts_of(x, chunks) for x in (whole.k, whole.v, whole.q)]
    for k, v, q in zip(*streams, strict=True):
        pieces.prefill(0, [s], k, v, q=q)
    assert state_of(pieces) == state_of(whole.cache)
    step = randn_step(whole.rng, 1, config)
    assert_same_sequence(pieces, s, whole.cache, whole.s, step[0][0])
    assert_same_bits(
        pieces.decode(0, [s], *step), whole.cache.decode(0, [whole.s], *step), "decode"
    )


@pytest.mark.parametrize("queries", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "chunks",
    [
        [1, 699],
        [699, 1],
        [OPENING - OBSERVED, OBSERVED, 444],
        [OPENING - OBSERVED + 1, 7, 436],
        [OPENING + 31, 1, 412],
        [64] * 10 + [60],
        [0, 100, 0, 600],
        [1] * 330 + [370],
    ],
    ids=lambda chunks: f"{chunks[:4]}"[:24],
)
def test_a_prompt_in_chunks_equals_the_prompt_at_once(chunks, block, queries):
    assert_chunks_equal_the_whole(chunks, queries, block=block)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6), st.booleans(), st.sampled_from(BLOCKS)
)
@settings(max_examples=25)
def test_any_chunks_equal_the_whole(chunks, queries, block):
    assert_chunks_equal_the_whole(chunks, queries, block=block)


@pytest.mark.parametrize("sink", [0, 1, 60, 64, 100, 300])
@pytest.mark.parametrize(
    ("local", "dtype"), [(0, "float16"), (1, "bfloat16"), (32, "float32"), (200, "float32")]
)
def test_any_sink_and_window(sink, local, dtype):
    # A sink may end within a block, or fill some; without a window, the newest row is a zone's.
    assert_chunks_equal_the_whole([500, 1, 399], True, sink=sink, local=local, dtype=dtype)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("local", "update"), [(32, 48), (0, 1), (1, 7)])
def test_a_sequence_decoded_from_its_first_token_equals_its_prompt(block, local, update, device):
    config = block_config(block, local=local, update=update, device=device)
    whole = filled(config, 600)
    steps = pk.Cache(config)
    s = steps.add()
    q = randn_q(whole.rng, 600, config)
    for i in range(600):
        out = steps.decode(0, [s], q[i : i + 1], whole.k[i : i + 1], whole.v[i : i + 1])
        assert torch.isfinite(out).all()
    steps.flush()
    assert_same_sequence(steps, s, whole.cache, whole.s, q[0])
    after_one = pk.Cache(config)
    t = after_one.add()
    for part in (slice(0, 1), slice(1, 600)):
        after_one.prefill(0, [t], whole.k[part], whole.v[part])
    assert_same_sequence(after_one, t, whole.cache, whole.s, q[0])


def test_a_zone_opens_with_whole_blocks_and_not_before(device, rng):
    for block in BLOCKS:
        config = block_config(block, device=device)
        cache = pk.Cache(config)
        s = cache.add()
        for total in range(1, 700, 6):
            cache.prefill(0, [s], *randn_kv(rng, 6 if total > 1 else 1, config))
            end = (cache.length(s) - 32) // block * block
            expected = max(end - 4, 0) if cache.length(s) - 32 >= OPENING else 0
            assert regions_of(cache, s)[1] == expected
            assert cache.summaries(0, s).signs.shape[1] == expected


@pytest.mark.parametrize("queries", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("kept", [700, 640, 600, 449, 320, 289, 288])
def test_a_cut_into_a_block_and_the_same_tokens_again(kept, queries, device):
    # The block comes back into the window whole, and enters the zone as it was.
    config = block_config(device=device)
    f = filled(config, 800, queries=queries)
    twin = filled(config, 800, queries=queries)
    f.cache.truncate([f.s], drop=[800 - kept])
    assert regions_of(f.cache, f.s)[1] == (kept - 32) // 64 * 64 - 4
    rest = slice(kept, 800)
    f.cache.prefill(0, [f.s], f.k[rest], f.v[rest], q=None if f.q is None else f.q[rest])
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize("kept", [0, 1, 100, OPENING - OBSERVED, OPENING, 287])
def test_a_zone_that_was_closed_opens_as_if_for_the_first_time(kept, device):
    config = block_config(device=device)
    f = filled(config, 500, queries=True)
    other = filled(config, 500, seed=9, queries=True)
    other.cache.truncate([other.s], drop=[500 - kept])
    assert regions_of(other.cache, other.s)[1] == 0
    fresh = pk.Cache(config)
    s = fresh.add()
    # Queries that were given stay given, up to where the sequence was cut.
    fresh.prefill(0, [s], other.k[:kept], other.v[:kept], q=other.q[:kept])
    for cache, t in ((other.cache, other.s), (fresh, s)):
        cache.prefill(0, [t], f.k, f.v, q=f.q)
    assert_same_sequence(other.cache, other.s, fresh, s, randn_q(f.rng, 1, config)[0])


def test_a_cut_within_the_observed_positions_leaves_the_balance_to_keys(device):
    # The squares of queries are one sum, which a cut cannot part.
    config = block_config(device=device)
    f = filled(config, 500, queries=True)
    f.cache.truncate([f.s], drop=250)
    f.cache.prefill(0, [f.s], f.k[250:], f.v[250:], q=f.q[250:])
    fresh = pk.Cache(config)
    s = fresh.add()
    fresh.prefill(0, [s], f.k, f.v)
    assert_same_sequence(f.cache, f.s, fresh, s, randn_q(f.rng, 1, config)[0])


def test_other_tokens_after_a_cut_are_those_of_a_new_sequence(device):
    config = block_config(device=device)
    f = filled(config, 800)
    k, v = randn_kv(f.rng, 300, config)
    f.cache.truncate([f.s], drop=[250])
    f.cache.prefill(0, [f.s], k, v)
    fresh = pk.Cache(config)
    s = fresh.add()
    fresh.prefill(0, [s], torch.cat([f.k[:550], k]), torch.cat([f.v[:550], v]))
    assert_same_sequence(f.cache, f.s, fresh, s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize("at", [0, 3, 250, 300, 500])
def test_a_fork_and_its_origin_go_their_own_ways(at, device, rng):
    # Forked before the zone opens, each sets its own balance; after it, both keep one.
    config = block_config(layers=2, device=device)
    cache, twin, other = (pk.Cache(config) for _ in range(3))
    k, v = randn_kv(rng, at, config)
    q = randn_q(rng, at, config)

    def begun(cache: pk.Cache) -> int:
        s = cache.add()
        for layer in range(2):
            cache.prefill(layer, [s], k, v, q=q)
        return s

    origin, alike, elsewhere = (begun(c) for c in (cache, twin, other))
    fork = cache.fork(origin)
    pairs = [(cache, origin), (twin, alike)], [(cache, fork), (other, elsewhere)]
    for turn in range(4):
        for pair in pairs:
            chunk = randn_kv(rng, 90 + turn, config)
            queries = randn_q(rng, 90 + turn, config)
            for c, s in pair:
                for layer in range(2):
                    c.prefill(layer, [s], *chunk, q=queries)
        for pair in pairs:
            step = randn_step(rng, 1, config)
            for layer in range(2):
                assert_same_bits(*(c.decode(layer, [s], *step) for c, s in pair))
    for pair in pairs:
        (a, s), (b, t) = pair
        assert_same_sequence(a, s, b, t, randn_q(rng, 1, config)[0])


def test_beams_keep_their_balance(device, rng):
    config = block_config(device=device)
    cache, twin = pk.Cache(config), pk.Cache(config)
    prompts = [(*randn_kv(rng, n, config), randn_q(rng, n, config)) for n in (400, 270, 600)]
    beams, alike = [], []
    for c, found in ((cache, beams), (twin, alike)):
        for k, v, q in prompts:
            found.append(c.add())
            c.prefill(0, [found[-1]], k, v, q=q)
    source = [2, 2, 0]
    cache.reorder(beams, source)
    copies = [twin.fork(alike[i]) for i in source]
    for _ in range(60):
        step = randn_step(rng, 3, config)
        assert_same_bits(cache.decode(0, beams, *step), twin.decode(0, copies, *step))
    probe = randn_q(rng, 1, config)[0]
    for s, t in zip(beams, copies, strict=True):
        assert_same_sequence(cache, s, twin, t, probe)


def test_a_ragged_batch_equals_each_alone(dtype, device, rng):
    config = block_config(dtype=dtype, device=device)
    lengths = [1, 255, 0, 287, 288, 289, 600]
    together = pk.Cache(config)
    sequences = [together.add() for _ in lengths]
    k, v = randn_kv(rng, sum(lengths), config)
    q = randn_q(rng, sum(lengths), config)
    together.prefill(0, sequences, k, v, lengths, q=q)
    alone = []
    for part in zip(*(x.split(lengths) for x in (k, v, q)), strict=True):
        cache = pk.Cache(config)
        alone.append((cache, cache.add()))
        cache.prefill(0, [alone[-1][1]], *part[:2], q=part[2])
    for _ in range(50):
        step = randn_step(rng, len(lengths), config)
        out = together.decode(0, sequences, *step)
        for i, (cache, s) in enumerate(alone):
            mine = cache.decode(0, [s], *(x[i : i + 1] for x in step))
            assert_same_bits(out[i : i + 1], mine, f"sequence {i}")
    for i, (cache, s) in enumerate(alone):
        assert_same_sequence(together, sequences[i], cache, s, step[0][i])


# --- Queries that a prompt brings -----------------------------------------------------------------


def balance_of(config: pk.Config, k, v, q, chunks: list[int] | None = None) -> np.ndarray:
    cache = pk.Cache(config)
    s = cache.add()
    chunks = chunks or [len(k)]
    for part in zip(*(parts_of(x, chunks) for x in (k, v, q)), strict=True):
        cache.prefill(0, [s], *part[:2], q=part[2])
    return cache.summaries(0, s).balance


def test_queries_outside_the_observed_positions_do_not_matter(device):
    config = block_config(device=device)
    f = filled(config, 400, queries=True)
    balance = f.cache.summaries(0, f.s).balance
    q = f.q * 100
    q[OPENING - OBSERVED : OPENING] = f.q[OPENING - OBSERVED : OPENING]
    assert_same_bits(balance_of(config, f.k, f.v, q), balance)
    for position in (OPENING - OBSERVED, OPENING - 1):
        q = f.q.clone()
        q[position, :, 3] = 30
        assert (balance_of(config, f.k, f.v, q)[:, 3] < balance[:, 3]).all()


def test_queries_with_a_gap_count_as_none(device):
    config = block_config(device=device)
    f = filled(config, 400, queries=True)
    without = balance_of(config, f.k, f.v, None)
    assert (balance_of(config, f.k, f.v, f.q) != without).any()
    for missing in (slice(0, 245), slice(245, 246), slice(250, 400)):
        cache = pk.Cache(config)
        s = cache.add()
        for begin, end in ((0, 245), (245, 246), (246, 250), (250, 400)):
            gone = missing.start <= begin and end <= missing.stop
            part = slice(begin, end)
            cache.prefill(0, [s], f.k[part], f.v[part], q=None if gone else f.q[part])
        assert_same_bits(cache.summaries(0, s).balance, without, str(missing))


def test_a_strided_view_of_queries_is_read_as_it_is(device):
    config = block_config(device=device)
    f = filled(config, 400, queries=True)
    wide = torch.full((800, 8, 70), float("nan"), device=device)
    view = wide[::2, ::2, 3:67]
    view.copy_(f.q)
    assert_same_bits(
        balance_of(config, f.k, f.v, view, [250, 150]), f.cache.summaries(0, f.s).balance
    )
