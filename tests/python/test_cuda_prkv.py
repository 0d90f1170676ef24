"""PRKV on a GPU beside the CPU: kept rows, pages and digests are equal bit for bit.

What is kept at all, and what steps attend to, is test_prkv.py's, which runs on either backend.
"""

from __future__ import annotations

import itertools

import numpy as np
import pariskv_core as pk
import pytest
import torch
from hardkv_life import kept_of
from prkv_life import make_config
from replays import assert_replays_are_eager
from support import (
    DTYPES,
    HEAD_DIMS,
    assert_same_bits,
    randn_kv,
    randn_q,
    randn_step,
    settled,
)
from test_cuda_hardkv import Both

pytestmark = pytest.mark.cuda

POLICIES = {
    "quarter": pk.PRKV(budget=128, static_share=0.25, page=16),
    "auto": pk.PRKV(budget=96, static_share="auto", page=8, digest="max"),
    "pages alone": pk.PRKV(budget=64, static_share=0.0, page=32),
    "kept alone": pk.PRKV(budget=50, static_share=1.0),
}


def bits(numbers: np.ndarray) -> list[int]:
    return np.asarray(numbers, np.float32).view(np.uint32).ravel().tolist()


def chosen(cache: pk.Cache, s: int, layer: int = 0, seed: int = 0) -> list:
    """What is kept, and which pages a query finds by which scores."""
    q = randn_q(np.random.default_rng(seed), 1, cache.config)[0].to(cache.config.device)
    found = cache.explain(layer, s, q)
    if found.details is None:
        return []
    details = found.details
    out = [kept_of(found.kept), details.static_rows]
    if found.searched:
        out += [details.pages.tolist(), found.positions.tolist(), bits(details.page_scores)]
    return out


def digests(cache: pk.Cache, s: int, layer: int = 0) -> list:
    found = cache.summaries(layer, s)
    if found.page == 0:
        return []
    return [bits(found.middles), bits(found.distances)]


class Lives(Both):
    """As HardKV's, with pages."""

    def check(self) -> None:
        for s in self.sequences:
            cpu, gpu = self.both(lambda cache: chosen(cache, s))  # noqa: B023
            assert cpu == gpu
            cpu, gpu = self.both(lambda cache: digests(cache, s))  # noqa: B023
            assert cpu == gpu
        cpu, gpu = self.both(lambda cache: cache.stats())
        assert (cpu.keeps, cpu.kept_rows) == (gpu.keeps, gpu.kept_rows)
        assert (cpu.unusable_keys, cpu.encoded_keys) == (gpu.unusable_keys, gpu.encoded_keys)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_thousand_steps_keep_and_find_what_the_cpu_does(policy):
    life = Lives(policy, dtype="bfloat16", head_dim=128, value_dim=128)
    life.add(700)
    life.add(90, queries=False)
    for step in range(1000):
        life.decode()
        deed = life.rng.integers(60)
        if deed == 0:
            tokens = int(life.rng.integers(1, 200))
            for s in life.sequences[:1]:
                life.both(
                    lambda cache: cache.truncate([s], drop=min(tokens, cache.length(s) - 1))  # noqa: B023
                )
        elif deed == 1 and len(life.sequences) < 4:
            source = life.sequences[int(life.rng.integers(len(life.sequences)))]
            forked = life.both(lambda cache: cache.fork(source))  # noqa: B023
            assert forked[0] == forked[1]
            life.sequences.append(forked[0])
        elif deed == 2 and len(life.sequences) > 2:
            gone = life.sequences.pop(0)
            life.both(lambda cache: cache.remove(gone))  # noqa: B023
        elif deed == 3:
            life.both(lambda cache: cache.flush(life.sequences))
        elif deed == 4:
            life.attend(life.sequences[-1], int(life.rng.integers(1, 50)))
        elif deed == 5:
            life.both(lambda cache: cache.reorder(life.sequences[:2], [1, 1]))
        if step % 20 == 0 or deed < 6:
            life.check()
    life.check()
    if policy.static_share != 0:
        assert life.caches[1].stats().keeps > 50


@pytest.mark.parametrize("digest", ["mean", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_size_keeps_and_finds_what_the_cpu_does(dtype, head_dim, digest):
    policy = pk.PRKV(budget=64, static_share="auto", page=8, digest=digest)
    life = Lives(policy, dtype=dtype, head_dim=head_dim, value_dim=head_dim)
    life.add(400, chunks=2)
    for _ in range(60):
        life.decode()
    life.check()


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("sink", [0, 5, 70])
def test_every_page_keeps_and_finds_what_the_cpu_does(page, sink):
    policy = pk.PRKV(budget=128, static_share=0.5, page=page)
    life = Lives(policy, dtype="float16", sink=sink)
    life.add(500)
    for _ in range(100):
        life.decode()
    life.check()


@pytest.mark.parametrize("heads", [(1, 1), (32, 1), (5, 1), (16, 1), (4, 8), (1, 64), (2, 64)])
def test_any_number_of_heads_keeps_and_finds_what_the_cpu_does(heads):
    group, kv_heads = heads
    policy = pk.PRKV(budget=128, static_share="auto", page=16)
    life = Lives(policy, query_heads=group * kv_heads, kv_heads=kv_heads, dtype="float16")
    life.add(900)
    life.add(250)
    for _ in range(50):
        life.decode()
    life.check()


@pytest.mark.parametrize("share", [0.25, "auto"])
def test_a_large_zone_is_looked_at_some_heads_at_a_time(share):
    life = Lives(
        pk.PRKV(budget=2048, static_share=share),
        dtype="bfloat16",
        head_dim=128,
        value_dim=128,
        kv_heads=8,
        query_heads=32,
        segment_tokens=1024,
    )
    life.add(90_000)
    life.check()
    for _ in range(30):
        life.decode()
    life.check()


@pytest.mark.parametrize("share", [0.5, "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_refreshes_look_at_the_pages_that_the_cpu_looks_at(dtype, share):
    """Two zones of which a part is looked at, and one of which all is."""
    life = Lives(pk.PRKV(budget=256, static_share=share), dtype=dtype, segment_tokens=1024)
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
    life = Lives(policy, dtype="bfloat16", head_dim=64, value_dim=64)
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


@pytest.mark.parametrize("placement", ["host", "device"])
def test_rows_come_from_wherever_they_are(placement, rng):
    """A prompt that follows others chooses among rows that have left for host memory."""
    policy = pk.PRKV(budget=96, static_share=0.5, page=16)
    config = make_config(policy, dtype="float16", placement=placement, device="cuda")
    cache, twin = pk.Cache(config), pk.Cache(config.replace(placement="device"))
    s, t = cache.add(), twin.add()
    for count in (500, 40, 300, 1, 64):
        (k, v), q = randn_kv(rng, count, config), randn_q(rng, count, config)
        cache.prefill(0, [s], k, v, q=q)
        twin.prefill(0, [t], k, v, q=q)
        settled(cache)
        assert chosen(cache, s) == chosen(twin, t)
        for _ in range(20):
            step = randn_step(rng, 1, config)
            assert_same_bits(cache.decode(0, [s], *step), twin.decode(0, [t], *step))


@pytest.mark.parametrize("dtype", DTYPES)
def test_replayed_steps_are_eager_ones_across_choices(dtype):
    """A graph of three sequences, of which one keeps nothing at first."""
    policy = pk.PRKV(budget=48, static_share="auto", page=8)
    config = make_config(policy, layers=2, dtype=dtype, device="cuda", dense_below=150)
    keeps = assert_replays_are_eager(config, lambda cache, s, layer, _: chosen(cache, s, layer))
    assert keeps > 20


def test_a_prompt_in_chunks_and_a_sequence_in_a_batch_have_the_same_bits(rng):
    policy = pk.PRKV(budget=64, static_share="auto", page=16)
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
        cuts = [*range(48, length - 64, 48), max(length - 64, 0)]
        for begin, end in itertools.pairwise([0, *cuts, length]):
            if begin < end:
                together.prefill(0, [batch[-1]], k[begin:end], v[begin:end], q=q[begin:end])
    for _ in range(60):
        step = randn_step(rng, len(lengths), config)
        out = together.decode(0, batch, *step)
        for i, (cache, s) in enumerate(alone):
            assert_same_bits(out[i : i + 1], cache.decode(0, [s], *(x[i : i + 1] for x in step)))
    for mine, (cache, s) in zip(batch, alone, strict=True):
        assert chosen(together, mine) == chosen(cache, s)
        assert digests(together, mine) == digests(cache, s)
