"""HardKV and PRKV on a GPU beside the CPU: kept rows, pages and digests are equal bit for bit.

What is kept at all, and what steps attend to, is test_hardkv.py's, test_prkv.py's and
test_prkv_pages.py's, which run on either backend.
"""

from __future__ import annotations

import itertools

import pariskv_core as pk
import pytest
import torch
from hardkv_life import make_config
from kept_both import Both, digests, seen
from replays import assert_replays_are_eager
from support import (
    DTYPES,
    HEAD_DIMS,
    assert_same_bits,
    randn_kv,
    randn_q,
    randn_step,
    rows_of,
    settled,
    with_changes,
)

pytestmark = pytest.mark.cuda

POLICIES = {
    "hardkv top p": pk.HardKV(most=120, p=0.8),
    "hardkv fixed": pk.HardKV(most=64, p=1.0, metric="attention"),
    "hardkv patient": pk.HardKV(most=50, p=0.6, least=5, pool=3, patience=4),
    "prkv quarter": pk.PRKV(budget=128, static_share=0.25, page=16),
    "prkv auto": pk.PRKV(budget=96, static_share="auto", page=8, digest="max"),
    "prkv pages alone": pk.PRKV(budget=64, static_share=0.0, page=32),
    "prkv kept alone": pk.PRKV(budget=50, static_share=1.0),
}
LARGE = dict(dtype="bfloat16", head_dim=128, value_dim=128, kv_heads=8, query_heads=32)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_thousand_steps_keep_and_find_what_the_cpu_does(policy):
    life = Both(policy, dtype="bfloat16", head_dim=128, value_dim=128)
    life.add(700)
    life.add(90, queries=False)
    life.live(1000)
    if policy != POLICIES["prkv pages alone"]:
        assert life.caches[1].stats().keeps > 50


@pytest.mark.parametrize(
    "policy",
    [
        pk.HardKV(most=60, p=0.7),
        pk.PRKV(budget=64, static_share="auto", page=8),
        pk.PRKV(budget=64, static_share="auto", page=8, digest="max"),
        pytest.param(pk.PRKV(budget=96, page=8), marks=pytest.mark.sanitize),
    ],
    ids=["hardkv", "mean", "max", "quarter"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_size_keeps_and_finds_what_the_cpu_does(dtype, head_dim, policy):
    life = Both(policy, dtype=dtype, head_dim=head_dim, value_dim=head_dim)
    life.add(400, chunks=3)
    for _ in range(50):
        life.decode()
    life.check()


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("sink", [0, 5, 70])
def test_every_page_keeps_and_finds_what_the_cpu_does(page, sink):
    life = Both(pk.PRKV(budget=128, static_share=0.5, page=page), dtype="float16", sink=sink)
    life.add(500)
    for _ in range(100):
        life.decode()
    life.check()


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("value_dim", [64, 192])
def test_every_page_finds_values_of_another_size(page, value_dim):
    sizes = dict(head_dim=80, value_dim=value_dim)
    life = Both(pk.PRKV(budget=320, page=page), even=True, dtype="float16", update=64, **sizes)
    life.add(2500)
    for _ in range(70):
        life.decode()
    life.check()


@pytest.mark.parametrize(
    "policy",
    [
        pk.HardKV(most=300, p=0.9),
        pk.PRKV(budget=128, static_share="auto", page=16),
        pk.PRKV(budget=128, page=8),
    ],
    ids=["hardkv", "auto", "quarter"],
)
@pytest.mark.parametrize("heads", [(1, 1), (32, 1), (5, 1), (16, 1), (4, 8), (1, 64), (2, 64)])
def test_any_number_of_heads_keeps_and_finds_what_the_cpu_does(heads, policy):
    group, kv_heads = heads
    spoiled = policy == pk.PRKV(budget=128, page=8)
    counts = dict(query_heads=group * kv_heads, kv_heads=kv_heads)
    life = Both(policy, even=spoiled, dtype="float16", **counts)
    life.add(900)
    life.add(250)
    for _ in range(50):
        life.decode(spoiled)
    life.check()
    if kv_heads >= 8 and isinstance(policy, pk.HardKV):
        kept = [len(rows) for rows in seen(life.caches[1], life.sequences[0])[0]]
        assert max(kept) > 3 * min(kept)


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        # Scratch of a head is several megabytes: heads come some at a time.
        (pk.HardKV(most=2048, p=0.95, pool=63), {}),
        (pk.PRKV(budget=2048, static_share=0.25), {}),
        (pk.PRKV(budget=2048, static_share="auto"), {}),
        # Of so many rows a block cannot list all.
        (pk.PRKV(budget=6000), dict(update=128, local=64)),
        (pk.PRKV(budget=1024), dict(update=128, local=64)),
    ],
    ids=["hardkv", "quarter", "auto", "more than listed", "listed"],
)
def test_a_large_zone_is_looked_at_in_several_launches(policy, changes):
    life = Both(policy, even=bool(changes), segment_tokens=1024, **LARGE, **changes)
    life.add(90_000)
    life.check()
    for _ in range(5 if changes else 30):
        life.decode()
    life.check()


@pytest.mark.parametrize("share", [0.5, "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_refreshes_look_at_the_pages_that_the_cpu_looks_at(dtype, share):
    """Two zones of which a part is looked at, and one of which all is."""
    life = Both(pk.PRKV(budget=256, static_share=share), dtype=dtype, segment_tokens=1024)
    for tokens in (9_000, 12_000, 8_000):
        life.add(tokens)
    for _ in range(60):
        life.decode()
    life.check()


@pytest.mark.sanitize
@pytest.mark.parametrize("share", [0.5, "auto"])
def test_keys_and_queries_that_are_not_finite_count_as_on_the_cpu(share):
    """Small enough for slow checkers: every kernel of a choice runs, and of a cut."""
    policy = pk.PRKV(budget=48, static_share=share, page=16)
    life = Both(policy, dtype="bfloat16", head_dim=64, value_dim=64)
    rows = life.rows

    def hostile(count: int) -> tuple[torch.Tensor, ...]:
        q, k, v = rows(count)
        k[1::17, 0, 3] = torch.inf
        k[4::23, :, 0] = torch.nan
        k[5::29] = 0
        q[::3, 1] = torch.nan
        return q, k, v

    life.rows = hostile
    life.add(300)
    life.rows = rows
    for _ in range(30):
        life.decode()
    life.check()
    life.both(lambda cache: cache.truncate(life.sequences, drop=120))
    life.check()
    for _ in range(20):
        life.decode()
    life.check()


@pytest.mark.parametrize(
    "policy",
    [
        pk.HardKV(most=100, p=0.8),
        pk.PRKV(budget=96, static_share=0.5, page=16),
        pk.PRKV(budget=200, page=8, static_share=0),
    ],
    ids=["hardkv", "half", "pages alone"],
)
def test_rows_come_from_wherever_they_are(policy, rng):
    """From device memory, over the bus, or from a row cache: a step has the same bits.

    A prompt that follows others chooses among rows that have left for host memory.
    """
    config = make_config(policy, dtype="float16", device="cuda", placement="device")
    row_caches = [-1] if isinstance(policy, pk.HardKV) else [0, -1, 16]
    caches = [pk.Cache(config)] + [
        pk.Cache(with_changes(config, placement="host", row_cache=rows)) for rows in row_caches
    ]
    batch = [(cache, cache.add()) for cache in caches]
    q = randn_q(rng, 1, config)
    for count in (900, 40, 300, 1, 64):
        (k, v), queries = randn_kv(rng, count, config), randn_q(rng, count, config)
        for cache, s in batch:
            cache.prefill(0, [s], k, v, q=queries)
            settled(cache)
            assert seen(cache, s) == seen(*batch[0])
        for step in range(60):
            q = (0.95 * q + 0.3 * randn_q(rng, 1, config)).to(q.dtype)
            k, v = randn_kv(rng, 1, config)
            if step == 30:
                for cache, s in batch:
                    cache.truncate([s], drop=35)
            outputs = [cache.decode(0, [s], q, k, v) for cache, s in batch]
            for other in outputs[1:]:
                assert_same_bits(outputs[0], other, f"step {step}")
    stored = [rows_of(cache, s) for cache, s in batch]
    for other in stored[1:]:
        for mine, theirs in zip(stored[0], other, strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "policy",
    [
        pk.HardKV(most=40, p=0.7),
        pk.PRKV(budget=48, static_share="auto", page=8),
        pk.PRKV(budget=64, static_share=0.25, page=8),
        pk.PRKV(budget=64, static_share=1, page=8),
    ],
    ids=["hardkv", "auto", "quarter", "kept alone"],
)
def test_replayed_steps_are_eager_ones_across_choices(dtype, policy):
    """A graph of three sequences, of which one keeps nothing at first."""
    config = make_config(policy, layers=2, dtype=dtype, device="cuda", dense_below=150)
    assert assert_replays_are_eager(config, seen) > 20


@pytest.mark.parametrize(
    ("policy", "remembered"),
    [
        (pk.HardKV(most=50, p=0.8), 40),
        (pk.PRKV(budget=64, static_share="auto", page=16), 64),
        (pk.PRKV(budget=96, page=8), 64),
    ],
    ids=["hardkv", "auto", "quarter"],
)
def test_a_prompt_in_chunks_and_a_sequence_in_a_batch_have_the_same_bits(policy, remembered, rng):
    config = make_config(policy, dtype="bfloat16", head_dim=128, value_dim=128, device="cuda")
    together = pk.Cache(config)
    lengths = [200, 77, 640, 33]
    batch, alone = [], []
    for length in lengths:
        (k, v), q = randn_kv(rng, length, config), randn_q(rng, length, config)
        cache = pk.Cache(config)
        alone.append((cache, cache.add()))
        cache.prefill(0, [alone[-1][1]], k, v, q=q)
        batch.append(together.add())
        # The last chunk has as many tokens as queries are remembered.
        cuts = [*range(48, length - remembered, 48), max(length - remembered, 0)]
        for begin, end in itertools.pairwise([0, *cuts, length]):
            if begin < end:
                together.prefill(0, [batch[-1]], k[begin:end], v[begin:end], q=q[begin:end])
    for _ in range(60):
        step = randn_step(rng, len(lengths), config)
        out = together.decode(0, batch, *step)
        for i, (cache, s) in enumerate(alone):
            assert_same_bits(out[i : i + 1], cache.decode(0, [s], *(x[i : i + 1] for x in step)))
    for mine, (cache, s) in zip(batch, alone, strict=True):
        assert seen(together, mine) == seen(cache, s)
        assert digests(together, mine) == digests(cache, s)
    assert any(seen(cache, s) for cache, s in alone)
