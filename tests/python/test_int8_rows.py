"""kv_dtype="int8": rows of the zone in 8 bits, resident ones as they came."""

import numpy as np
import oracle_blocks
import pariskv_core as pk
import pytest
import torch
from oracle_copies import copied, eight_bits, narrow_keys, narrow_values
from oracle_tail import sampled
from support import (
    DTYPES,
    SEARCHES,
    assert_output_close,
    assert_same_bits,
    assert_same_sequence,
    bits,
    decode_oracle,
    f64,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    state_of,
    unchanged,
)

# Of normal numbers: half a level is up to 1/254 of the largest of a row's K or V, about 3.
OFF = 0.02


def int8_config(**changes) -> pk.Config:
    return make_config(**{"kv_dtype": "int8", **changes})


def zone_of(cache: pk.Cache, s: int) -> slice:
    sink, retrieval, _, _ = regions_of(cache, s)
    return slice(sink, sink + retrieval)


def stored(cache: pk.Cache, s: int, k: torch.Tensor, v: torch.Tensor) -> list[np.ndarray]:
    """What a cache has of all its rows, which are given."""
    zone, known = zone_of(cache, s), cache.summaries(0, s)
    rows = [x.float().cpu().numpy().copy() for x in (k, v)]
    block = cache.config.policy.block
    if block == 0 or zone.start == zone.stop:
        for x in rows:
            x[zone] = eight_bits(x[zone])
        return rows
    opening = oracle_blocks.opening(zone.start) - zone.start
    for head in range(cache.config.kv_heads):
        keys, values = (x[:, head] for x in rows)
        blocks = oracle_blocks.blocks_of(
            f64(k[:, head]), (zone.start, zone.stop), block, known.balance[head]
        )
        keys[zone] = narrow_keys(keys[zone], blocks)
        values[zone] = narrow_values(values[zone], opening)
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 192), (80, 512)])
@pytest.mark.parametrize(("block", "tokens", "end"), [(0, 300, 268), (64, 1300, 1216)])
def test_rows_of_the_zone_are_rounded_and_the_others_are_not(
    dtype, head_dim, value_dim, block, tokens, end
):
    config = int8_config(dtype=dtype, head_dim=head_dim, value_dim=value_dim, block=block)
    f = filled(config, tokens)
    zone = zone_of(f.cache, f.s)
    assert (zone.start, zone.stop) == (4, end)
    expected = stored(f.cache, f.s, f.k, f.v)
    for mine, given, own in zip(rows_of(f.cache, f.s), (f.k, f.v), expected, strict=True):
        assert_same_bits(mine.cpu(), torch.tensor(own, device="cpu").to(mine.dtype))
        assert not torch.equal(mine[zone], given[zone])


@pytest.mark.parametrize("search", SEARCHES)
def test_a_step_follows_the_oracle_of_rounded_rows(search):
    config = int8_config(**SEARCHES[search])
    f = filled(config, 1300)
    twin = filled(make_config(**SEARCHES[search]), 1300)
    keys = f.k
    for _ in range(60):  # over a flush
        q, k, v = randn_step(f.rng, 1, config)
        keys = torch.cat([keys, k])
        out = f.cache.decode(0, [f.s], q, k, v)
        expected = decode_oracle(f.cache, f.s, q[0], keys)
        assert_output_close(out[0], expected.out, "float32")
        plain = twin.cache.decode(0, [twin.s], q, k, v)
    assert f.cache.stats().searched_tokens == 60
    assert np.abs(f64(out) - f64(plain)).max() > 0


def estimated(config, q, keys, values, zone, selected):
    """(output, log-sum-exp) of each query head, with a tail."""
    out, lse = [], []
    tail_rows = config.policy.tail_rows
    tail = sampled(zone.start, zone.stop, tail_rows, config.policy.seed)
    for head in range(config.query_heads):
        kv = head // (config.query_heads // config.kv_heads)
        own = selected[kv][selected[kv] >= 0]
        weights = np.ones(len(keys))
        weights[zone] = 0
        weights[tail] = (zone.stop - zone.start) / len(tail)
        weights[own] = 1
        # Where a row of the tail is not selected it is attended to as its copy.
        k, v = keys[:, kv].copy(), values[:, kv].copy()
        for x in (k, v):
            mine = x[own]
            x[tail] = copied(x[tail], tail_rows)
            x[own] = mine
        logits = k @ q[head] / np.sqrt(config.head_dim)
        shares = weights * np.exp(logits - logits.max())
        out.append(shares @ v / shares.sum())
        lse.append(logits.max() + np.log(shares.sum()))
    return np.array(out), np.array(lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_with_a_tail_equals_attention_to_rounded_rows(dtype):
    config = int8_config(
        dtype=dtype, block=64, tail="sample", tail_rows=32, segment_tokens=256, head_dim=128
    )
    f = filled(config, 1500)
    keys, values = [f.k], [f.v]
    for _ in range(100):
        q, k, v = randn_step(f.rng, 1, config)
        keys.append(k), values.append(v)
        out, lse = f.cache.decode(0, [f.s], q, k, v, return_lse=True)
    why = f.cache.explain(0, f.s, q[0])
    zone = zone_of(f.cache, f.s)
    assert zone.stop > 1500
    k, v = (x.astype(np.float64) for x in stored(f.cache, f.s, torch.cat(keys), torch.cat(values)))
    expected, total = estimated(config, f64(q[0]), k, v, zone, np.asarray(why.positions))
    tolerance = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}[dtype]
    np.testing.assert_allclose(f64(out)[0], expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(f64(lse)[0], total, rtol=1e-4, atol=1e-4)
    heads = config.query_heads // config.kv_heads
    for head, exact in enumerate(np.asarray(why.exact)):
        own = np.asarray(why.positions)[head // heads]
        logits = k[own, head // heads] @ f64(q[0])[head] / np.sqrt(config.head_dim)
        np.testing.assert_allclose(exact, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"dense_below": 760}, {"top_k": 760}])
def test_what_is_attended_to_in_full_stays_as_it_came(changes):
    config = int8_config(dtype="bfloat16", **changes)
    f, twin = filled(config, 700), filled(config.replace(kv_dtype="auto"), 700)
    for _ in range(50):
        step = randn_step(f.rng, 1, config)
        assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))
    assert zone_of(f.cache, f.s).stop == config.sink
    for _ in range(150):
        f.cache.decode(0, [f.s], *randn_step(f.rng, 1, config))
    assert zone_of(f.cache, f.s).stop >= 760
    f.cache.truncate([f.s], keep=700)
    assert zone_of(f.cache, f.s).stop == config.sink


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_near_those_of_a_plain_cache(dtype):
    # Nearly all rows are selected, so that both attend to the same ones.
    config = int8_config(dtype=dtype, head_dim=128, top_k=600, schedule=[(0, 1.0, 1.0)])
    f, twin = filled(config, 700), filled(config.replace(kv_dtype="auto"), 700)
    for _ in range(60):
        q, k, v = randn_step(f.rng, 1, config)
        ours = f.cache.decode(0, [f.s], q, k, v)
        plain = twin.cache.decode(0, [twin.s], q, k, v)
        error = np.abs(f64(ours) - f64(plain)).max()
        assert 0 < error < OFF
    exact = f.cache.attend(0, [f.s], q)
    keys, values = (f64(x) for x in rows_of(f.cache, f.s))
    if dtype == "float32":
        logits = np.einsum("hd,nhd->hn", f64(q[0]), keys.repeat(2, axis=1)) / np.sqrt(128)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        expected = np.einsum("hn,nhd->hd", shares, values.repeat(2, axis=1))
        assert_output_close(exact[0], expected, dtype)
    np.testing.assert_allclose(f64(exact), f64(twin.cache.attend(0, [twin.s], q)), atol=OFF)


def test_a_prompt_is_attended_to_as_it_came():
    config = int8_config()
    plain = make_config()
    rng = np.random.default_rng(1)
    q = randn_q(rng, 500, config)
    k, v = randn_kv(rng, 500, config)
    caches = [pk.Cache(c) for c in (config, plain)]
    ids = [cache.add() for cache in caches]
    ours, theirs = (cache.attend(0, [s], q, k=k, v=v) for cache, s in zip(caches, ids, strict=True))
    assert_same_bits(ours, theirs)
    # A second part sees the first one's rows in 8 bits.
    q, k, v = randn_step(rng, 50, config)
    ours, theirs = (
        f64(cache.attend(0, [s], q, k=k, v=v)) for cache, s in zip(caches, ids, strict=True)
    )
    assert 0 < np.abs(ours - theirs).max() < OFF


@pytest.mark.parametrize("chunks", [[1299, 1], [100] * 13, [700, 600], [1] * 40 + [1260]])
@pytest.mark.parametrize("search", SEARCHES)
def test_a_prompt_in_chunks_is_stored_as_the_whole(search, chunks):
    config = int8_config(dtype="bfloat16", **SEARCHES[search])
    whole = filled(config, 1300)
    cache = pk.Cache(config)
    s = cache.add()
    for k, v in zip(whole.k.split(chunks), whole.v.split(chunks), strict=True):
        cache.prefill(0, [s], k, v)
    flushes = {"flushes", "encoded_keys"}
    ours, theirs = state_of(cache), state_of(whole.cache)
    assert {n: x for n, x in ours.items() if n not in flushes} == {
        n: x for n, x in theirs.items() if n not in flushes
    }
    step = randn_step(whole.rng, 1, config)
    assert_same_sequence(cache, s, whole.cache, whole.s, step[0][0])
    assert_same_bits(cache.decode(0, [s], *step), whole.cache.decode(0, [whole.s], *step))


@pytest.mark.parametrize("threads", [1, 3])
def test_forks_share_rows_and_go_their_own_ways(threads):
    config = int8_config(threads=threads, block=64, tail="sample", tail_rows=16)
    f, twin = filled(config, 1300), filled(config, 1300)
    before = f.cache.stats().row_bytes
    fork = f.cache.fork(f.s)
    assert f.cache.stats().row_bytes == before
    for _ in range(120):
        mine, others = randn_step(f.rng, 1, config), randn_step(f.rng, 1, config)
        a = f.cache.decode(0, [f.s], *mine)
        f.cache.decode(0, [fork], *others)
        assert_same_bits(a, twin.cache.decode(0, [twin.s], *mine))
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, mine[0][0])
    f.cache.remove(fork)
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, mine[0][0])


@pytest.mark.parametrize("kept", [1599, 1500, 1408, 1217, 1100, 1057, 700, 65, 5, 2, 0])
@pytest.mark.parametrize("block", [0, 64])
def test_a_cut_and_the_same_tokens_again(kept, block):
    # Rows that come back from the zone are what is read of them, as if they had been given so.
    config = int8_config(block=block, sink=70, segment_tokens=64)
    f = filled(config, 1600)
    before = rows_of(f.cache, f.s)
    f.cache.truncate([f.s], keep=kept)
    for mine, given in zip(rows_of(f.cache, f.s), before, strict=True):
        assert_same_bits(mine, given[:kept])
    end = zone_of(f.cache, f.s).stop
    k, v = (
        torch.cat([given[:end], stood[end:kept], given[kept:]])
        for given, stood in zip((f.k, f.v), before, strict=True)
    )
    cache = pk.Cache(config)
    twin = cache.add()
    cache.prefill(0, [twin], k, v)
    f.cache.prefill(0, [f.s], f.k[kept:], f.v[kept:])
    assert_same_sequence(f.cache, f.s, cache, twin, randn_q(f.rng, 1, config)[0])
    assert f.cache.stats().row_bytes == cache.stats().row_bytes
    for mine, given in zip(rows_of(f.cache, f.s), (f.k, f.v), strict=True):
        assert np.abs(f64(mine) - f64(given)).max() < 2 * OFF


@pytest.mark.parametrize("kept", [1500, 1405, 1100])
def test_after_a_cut_rows_are_resident_as_they_are_written(kept):
    config = int8_config(block=64, segment_tokens=64, local=100)
    f, again = filled(config, 1600), filled(config, 1600)
    for cache, s in ((f.cache, f.s), (again.cache, again.s)):
        cache.truncate([s], keep=kept)
    end = zone_of(f.cache, f.s).stop
    keys = torch.cat([f.k[:end], rows_of(f.cache, f.s)[0][end:]])
    for _ in range(150):
        q, k, v = randn_step(f.rng, 1, config)
        keys = torch.cat([keys, k])
        out = f.cache.decode(0, [f.s], q, k, v)
        assert_same_bits(out, again.cache.decode(0, [again.s], q, k, v))
        expected = decode_oracle(f.cache, f.s, q[0], keys)
        assert_output_close(out[0], expected.out, "float32")
        why = f.cache.explain(0, f.s, q[0])
        assert why.searched == expected.searched
        if why.searched:  # by rows of the window, some of which came back from the zone
            np.testing.assert_array_equal(why.details.coarse, np.stack(expected.coarse))
        assert_same_bits(f.cache.attend(0, [f.s], q), again.cache.attend(0, [again.s], q))


@pytest.mark.parametrize(("head_dim", "most"), [(64, 136), (128, 264), (256, 520)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_the_zone_takes_a_byte_a_number_and_two_scales(head_dim, most, dtype):
    config = int8_config(head_dim=head_dim, dtype=dtype, segment_tokens=256)
    f = filled(config, 1024)
    before = f.cache.stats().row_bytes
    tokens = 8 * 256
    for k, v in zip(*(x.split(256) for x in randn_kv(f.rng, tokens, config)), strict=True):
        f.cache.prefill(0, [f.s], k, v)
    grown = f.cache.stats().row_bytes - before
    assert grown == tokens * config.kv_heads * most
    # Plain are the block of the sink, and those from the one on that the window begins in. A CPU
    # has rows in blocks of 64, a GPU in whole segments.
    element = 4 if dtype == "float32" else 2
    size = 64 if config.device.startswith("cpu") else config.segment_tokens
    regions = f.cache.regions(f.s)
    zone_end, total = regions.sink + regions.retrieval, 1024 + tokens
    blocks = 1 + -(-total // size) - zone_end // size
    plain = blocks * size * config.kv_heads * 2 * head_dim * element
    narrow = -(-zone_end // size) * size * config.kv_heads * most
    assert f.cache.stats().row_bytes == narrow + plain


def test_a_tail_is_copied_in_8_bits():
    config = int8_config(block=64, tail="sample", tail_rows=32, head_dim=64)
    f = filled(config, 1500)
    f.cache.decode(0, [f.s], *randn_step(f.rng, 1, config))
    rows, common = 2 * 32 * 2 * 68, 2 * (64 + 64) * 4
    assert f.cache.stats().kept_bytes == config.kv_heads * (rows + common)


HOSTILE = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("search", SEARCHES)
def test_rows_that_are_not_finite_are_never_selected(search, value):
    config = int8_config(schedule=[(0, 1.0, 1.0)], **SEARCHES[search])
    f = filled(config, 1300)
    k = f.k.clone()
    k[100, 1, 7] = value
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, f.v)
    rows = rows_of(cache, s)[0]
    assert not torch.isfinite(rows[100, 1]).any()
    assert torch.isfinite(rows[100, 0]).all()
    assert cache.stats().unusable_keys == 1
    for _ in range(5):
        step = randn_step(f.rng, 1, config)
        out = cache.decode(0, [s], *step)
        assert torch.isfinite(out).all()
        assert 100 not in np.asarray(cache.explain(0, s, step[0][0]).positions)[1]


def test_a_huge_key_costs_its_neighbours_a_scale_at_most():
    # It moves the mean of its block, and the centre and the balance of its head.
    config = int8_config(block=64)
    f = filled(config, 1300)
    k = f.k.clone()
    k[200] *= 1e30
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, f.v)
    assert zone_of(cache, s).stop > 1200
    off = np.abs(f64(rows_of(cache, s)[0]) - f64(k)).max(axis=2)
    size = np.abs(f64(k)).max(axis=2)
    assert (off < 0.2 * size).all()
    assert (np.median(off / size, axis=0) < 0.02).all()


def test_huge_small_and_zero_rows_stay_finite():
    config = int8_config()
    k, v = randn_kv(np.random.default_rng(1), 300, config)
    most = float(np.finfo(np.float32).max)
    v[100] = most
    v[101, :, 0] = -most
    k[102], v[102] = 0, 0
    k[103] *= 1e-45
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v)
    keys, values = rows_of(cache, s)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()
    np.testing.assert_allclose(f64(values[100]), most, rtol=1e-6)
    assert (values[102] == 0).all()


def test_threads_and_batches_leave_the_bits():
    configs = [int8_config(threads=threads, block=64) for threads in (1, 3)]
    outs = []
    for config in configs:
        cache = pk.Cache(config)
        rng = np.random.default_rng(4)
        ids = [cache.add() for _ in range(3)]
        for s, tokens in zip(ids, (1300, 40, 1150), strict=True):
            cache.prefill(0, [s], *randn_kv(rng, tokens, config))
        steps = [randn_step(rng, 3, config) for _ in range(60)]
        outs.append([cache.decode(0, ids, *step) for step in steps])
    for mine, theirs in zip(*outs, strict=True):
        assert_same_bits(mine, theirs)


MODEL = {"layers": 1, "query_heads": 2, "kv_heads": 1, "head_dim": 64}


def test_settings():
    assert pk.Config(**MODEL).kv_dtype == "auto"
    config = pk.Config(**MODEL, kv_dtype="int8")
    assert config.kv_dtype == "int8"
    assert "kv_dtype='int8'" in repr(config)
    assert config != config.replace(kv_dtype="auto")
    with pytest.raises(ValueError, match='kv_dtype: expected "auto" or "int8", got "int4"'):
        pk.Config(**MODEL, kv_dtype="int4")


@pytest.mark.parametrize("policy", [pk.HardKV(), pk.PRKV()])
def test_other_policies_refuse(policy):
    name = type(policy).__name__
    with pytest.raises(
        ValueError, match=f"kv_dtype: expected auto with the policy {name}, got int8"
    ):
        pk.Config(**MODEL, kv_dtype="int8", policy=policy)


def test_more_than_the_budget_holds_changes_nothing():
    config = int8_config(memory_budget=16 << 20, segment_tokens=256)
    f = filled(config, 1024)
    k, v = randn_kv(f.rng, 1024, config)
    refused = 0
    for _ in range(1000):
        try:
            f.cache.prefill(0, [f.s], k, v)
        except pk.OutOfMemory:
            refused += 1
            with unchanged(f.cache), pytest.raises(pk.OutOfMemory):
                f.cache.prefill(0, [f.s], k, v)
            break
    assert refused == 1
    assert np.isfinite(bits(rows_of(f.cache, f.s)[0])).all()
    f.cache.remove(f.s)
    other = f.cache.add()
    f.cache.prefill(0, [other], f.k, f.v)
    assert_same_bits(rows_of(f.cache, other)[0][:4], f.k[:4])
