"""Blocks that share a mean: however a sequence came to be, the same bits.

test_sequences.py has the same for whole keys. Here a zone grows by whole blocks, and its balance is
set once, from its first keys and the queries of a few windows of positions.
"""

import hypothesis.strategies as st
import numpy as np
import oracle_blocks
import pariskv_core as pk
import pytest
import torch
from hypothesis import given, settings
from support import (
    assert_same_bits,
    assert_same_sequence,
    f64,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    state_of,
)

BLOCKS = (64, 128, 256)
# With a sink of 4 a zone opens at 1,024 tokens; queries are looked at in windows before that.
OPENING = 1024
WINDOWS = oracle_blocks.observed(4)
FIRST, LAST = WINDOWS[0], WINDOWS[-1]


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
        [1, 1399],
        [1399, 1],
        [LAST.start, 16, 360],
        [FIRST.start + 1, 7, WINDOWS[1].start - FIRST.start, 500, 300],
        [FIRST.stop, WINDOWS[1].start - FIRST.stop, 900],
        [OPENING + 31, 1, 412],
        [64] * 20 + [60],
        [0, 100, 0, 1300],
        [1] * 1100 + [300],
    ],
    ids=lambda chunks: f"{chunks[:4]}"[:24],
)
def test_a_prompt_in_chunks_equals_the_prompt_at_once(chunks, block, queries):
    assert_chunks_equal_the_whole(chunks, queries, block=block)


@given(
    st.lists(st.integers(0, 600), min_size=1, max_size=6), st.booleans(), st.sampled_from(BLOCKS)
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
    assert_chunks_equal_the_whole([700, 1, 899], True, sink=sink, local=local, dtype=dtype)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("local", "update"), [(32, 48), (0, 1), (1, 7)])
def test_a_sequence_decoded_from_its_first_token_equals_its_prompt(block, local, update, device):
    config = block_config(block, local=local, update=update, device=device)
    whole = filled(config, 1300)
    steps = pk.Cache(config)
    s = steps.add()
    q = randn_q(whole.rng, 1300, config)
    for i in range(1300):
        out = steps.decode(0, [s], q[i : i + 1], whole.k[i : i + 1], whole.v[i : i + 1])
        assert torch.isfinite(out).all()
    steps.flush()
    assert_same_sequence(steps, s, whole.cache, whole.s, q[0])
    after_one = pk.Cache(config)
    t = after_one.add()
    for part in (slice(0, 1), slice(1, 1300)):
        after_one.prefill(0, [t], whole.k[part], whole.v[part])
    assert_same_sequence(after_one, t, whole.cache, whole.s, q[0])


def test_a_zone_opens_with_whole_blocks_and_not_before(device, rng):
    for block in BLOCKS:
        config = block_config(block, device=device)
        cache = pk.Cache(config)
        s = cache.add()
        for total in range(1, 1500, 6):
            cache.prefill(0, [s], *randn_kv(rng, 6 if total > 1 else 1, config))
            end = (cache.length(s) - 32) // block * block
            expected = max(end - 4, 0) if cache.length(s) - 32 >= OPENING else 0
            assert regions_of(cache, s)[1] == expected
            assert cache.summaries(0, s).signs.shape[1] == expected


@pytest.mark.parametrize("queries", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("kept", [1500, 1408, 1400, 1217, 1088, 1057, 1056])
def test_a_cut_into_a_block_and_the_same_tokens_again(kept, queries, device):
    # The block comes back into the window whole, and enters the zone as it was.
    config = block_config(device=device)
    f = filled(config, 1600, queries=queries)
    twin = filled(config, 1600, queries=queries)
    f.cache.truncate([f.s], drop=[1600 - kept])
    assert regions_of(f.cache, f.s)[1] == (kept - 32) // 64 * 64 - 4
    rest = slice(kept, 1600)
    f.cache.prefill(0, [f.s], f.k[rest], f.v[rest], q=None if f.q is None else f.q[rest])
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize(
    "kept", [0, 1, 100, FIRST.start, FIRST.stop, 600, LAST.start, LAST.stop, 1055]
)
def test_a_zone_that_was_closed_opens_as_if_for_the_first_time(kept, device):
    config = block_config(device=device)
    f = filled(config, 1300, queries=True)
    other = filled(config, 1300, seed=9, queries=True)
    other.cache.truncate([other.s], drop=[1300 - kept])
    assert regions_of(other.cache, other.s)[1] == 0
    fresh = pk.Cache(config)
    s = fresh.add()
    # Queries that were given stay given, up to where the sequence was cut.
    fresh.prefill(0, [s], other.k[:kept], other.v[:kept], q=other.q[:kept])
    for cache, t in ((other.cache, other.s), (fresh, s)):
        cache.prefill(0, [t], f.k, f.v, q=f.q)
    assert_same_sequence(other.cache, other.s, fresh, s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize("window", range(4))
def test_a_cut_within_a_window_leaves_the_balance_to_the_ones_before(window, device):
    # The squares of a window's queries are one sum, which a cut cannot part.
    config = block_config(device=device)
    f = filled(config, 1300, queries=True)
    cut = WINDOWS[window].start + 10
    f.cache.truncate([f.s], drop=1300 - cut)
    f.cache.prefill(0, [f.s], f.k[cut:], f.v[cut:], q=f.q[cut:])
    fresh = pk.Cache(config)
    s = fresh.add()
    begin = WINDOWS[window].start
    fresh.prefill(0, [s], f.k[:begin], f.v[:begin], q=f.q[:begin])
    fresh.prefill(0, [s], f.k[begin:], f.v[begin:])
    assert_same_bits(f.cache.summaries(0, f.s).balance, fresh.summaries(0, s).balance)
    assert_same_sequence(f.cache, f.s, fresh, s, randn_q(f.rng, 1, config)[0])


def test_other_tokens_after_a_cut_are_those_of_a_new_sequence(device):
    config = block_config(device=device)
    f = filled(config, 1600)
    k, v = randn_kv(f.rng, 300, config)
    f.cache.truncate([f.s], drop=[250])
    f.cache.prefill(0, [f.s], k, v)
    fresh = pk.Cache(config)
    s = fresh.add()
    fresh.prefill(0, [s], torch.cat([f.k[:1350], k]), torch.cat([f.v[:1350], v]))
    assert_same_sequence(f.cache, f.s, fresh, s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize("at", [0, 3, 250, 1000, 1100])
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
            chunk = randn_kv(rng, 290 + turn, config)
            queries = randn_q(rng, 290 + turn, config)
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
    prompts = [(*randn_kv(rng, n, config), randn_q(rng, n, config)) for n in (1300, 1070, 1600)]
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
    lengths = [1, 1023, 0, 1055, 1056, 1057, 1600]
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


def test_queries_outside_the_windows_do_not_matter(device):
    config = block_config(device=device)
    f = filled(config, 1200, queries=True)
    balance = f.cache.summaries(0, f.s).balance
    q = f.q * 100
    for window in WINDOWS:
        q[window] = f.q[window]
    assert_same_bits(balance_of(config, f.k, f.v, q), balance)
    for position in [at for w in WINDOWS for at in (w.start, w.stop - 1)]:
        q = f.q.clone()
        q[position, :, 3] = 30
        assert (balance_of(config, f.k, f.v, q)[:, 3] < balance[:, 3]).all()


def test_queries_with_a_gap_count_as_none(device):
    config = block_config(device=device)
    f = filled(config, 1200, queries=True)
    without = balance_of(config, f.k, f.v, None)
    assert (balance_of(config, f.k, f.v, f.q) != without).any()
    for missing in (slice(0, 245), slice(245, 246), slice(250, 1200)):
        cache = pk.Cache(config)
        s = cache.add()
        for begin, end in ((0, 245), (245, 246), (246, 250), (250, 1200)):
            gone = missing.start <= begin and end <= missing.stop
            part = slice(begin, end)
            cache.prefill(0, [s], f.k[part], f.v[part], q=None if gone else f.q[part])
        assert_same_bits(cache.summaries(0, s).balance, without, str(missing))


def test_windows_before_a_gap_count(device):
    config = block_config(device=device)
    f = filled(config, 1200, queries=True)
    seen = []
    for whole in range(5):
        # A window that lacks a query, and all behind it.
        end = WINDOWS[whole].stop - 1 if whole < 4 else 1200
        cache = pk.Cache(config)
        s = cache.add()
        cache.prefill(0, [s], f.k[:end], f.v[:end], q=f.q[:end])
        cache.prefill(0, [s], f.k[end:], f.v[end:])
        mine = cache.summaries(0, s).balance
        for head in range(2):
            keys = f64(rows_of(cache, s)[0])[:OPENING, head]
            queries = np.array([f64(f.q)[w, 2 * head : 2 * head + 2] for w in WINDOWS[:whole]])
            expected = oracle_blocks.balance(keys, 4, 64, queries if whole else None)
            assert_same_bits(mine[head], expected, f"{whole} windows")
        seen.append(mine.tobytes())
    assert len(set(seen)) == 5


def test_a_strided_view_of_queries_is_read_as_it_is(device):
    config = block_config(device=device)
    f = filled(config, 1200, queries=True)
    wide = torch.full((2400, 8, 70), float("nan"), device=device)
    view = wide[::2, ::2, 3:67]
    view.copy_(f.q)
    assert_same_bits(
        balance_of(config, f.k, f.v, view, [250, 950]), f.cache.summaries(0, f.s).balance
    )
