"""HardKV on a GPU beside the CPU: what is kept is equal bit for bit, however the steps are made.

What is kept at all, and what steps attend to, is test_hardkv.py's, which runs on either backend.
"""

from __future__ import annotations

import itertools

import numpy as np
import pariskv_core as pk
import pytest
import torch
from hardkv_life import kept_of, make_config
from replays import assert_replays_are_eager, warmed
from support import (
    DTYPES,
    HEAD_DIMS,
    assert_same_bits,
    f64,
    randn_kv,
    randn_q,
    randn_step,
    rows_of,
    settled,
)
from test_cuda_graph import Graph, make_steps

pytestmark = pytest.mark.cuda

# Of outputs: weights are rounded to two terms of 16 bits, floats are added in another order.
APART = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}


def kept_rows(cache: pk.Cache, s: int, layer: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Positions that are attended to, and those that are held, of every kv head."""
    config = cache.config
    q = torch.zeros(
        (config.query_heads, config.head_dim),
        dtype=getattr(torch, config.dtype),
        device=config.device,
    )
    found = cache.explain(layer, s, q)
    if found.details is None:
        return [], []
    return kept_of(found.kept), kept_of(found.details.held)


class Both:
    """The same sequences on the CPU and on a GPU, with everything done to both."""

    def __init__(self, policy: pk.HardKV, seed: int = 0, **changes):
        self.caches = [pk.Cache(make_config(policy, device=d, **changes)) for d in ("cpu", "cuda")]
        self.config = self.caches[0].config
        self.rng = np.random.default_rng(seed)
        self.sizes = torch.linspace(0.1, 16, self.config.kv_heads, device="cpu")[None, :, None]
        self.sequences: list[int] = []

    def both(self, call) -> list:
        return [call(cache) for cache in self.caches]

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """q, k and v, with keys of another size in each head: they need very unequal counts."""
        q = randn_q(self.rng, count, self.config)
        k, v = randn_kv(self.rng, count, self.config)
        return q, (k * self.sizes).to(k.dtype), v

    def add(self, tokens: int, queries: bool = True, chunks: int = 1) -> int:
        q, k, v = self.rows(tokens)

        def prefill(cache: pk.Cache) -> int:
            s, device = cache.add(), cache.config.device
            for part in torch.arange(tokens, device="cpu").chunk(chunks):
                own = [x[part].to(device) for x in (k, v, q)]
                cache.prefill(0, [s], own[0], own[1], q=own[2] if queries else None)
            return s

        mine, theirs = self.both(prefill)
        assert mine == theirs
        self.sequences.append(mine)
        return mine

    def decode(self) -> None:
        step = self.rows(len(self.sequences))
        a, b = self.both(
            lambda cache: cache.decode(
                0, self.sequences, *(x.to(cache.config.device) for x in step), return_lse=True
            )
        )
        bound = APART[self.config.dtype]
        for mine, theirs in zip(a, b, strict=True):
            np.testing.assert_allclose(f64(theirs), f64(mine), rtol=bound, atol=bound)

    def attend(self, s: int, tokens: int) -> None:
        q, k, v = self.rows(tokens)

        def attend(cache: pk.Cache) -> None:
            own = [x.to(cache.config.device) for x in (q, k, v)]
            cache.attend(0, [s], own[0], k=own[1], v=own[2])

        self.both(attend)

    def check(self) -> None:
        for s in self.sequences:
            cpu, gpu = self.both(lambda cache: kept_rows(cache, s))  # noqa: B023
            assert cpu == gpu
        cpu, gpu = self.both(lambda cache: cache.stats())
        assert (cpu.keeps, cpu.kept_rows) == (gpu.keeps, gpu.kept_rows)


POLICIES = {
    "top p": pk.HardKV(most=120, p=0.8),
    "fixed": pk.HardKV(most=64, p=1.0, metric="attention"),
    "patient": pk.HardKV(most=50, p=0.6, least=5, pool=3, patience=4),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_thousand_steps_keep_what_the_cpu_keeps(policy):
    life = Both(policy, dtype="bfloat16", head_dim=128, value_dim=128)
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
    assert life.caches[1].stats().keeps > 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_size_keeps_what_the_cpu_keeps(dtype, head_dim):
    life = Both(pk.HardKV(most=60, p=0.7), dtype=dtype, head_dim=head_dim, value_dim=head_dim)
    life.add(400, chunks=3)
    for _ in range(60):
        life.decode()
    life.check()


@pytest.mark.parametrize("heads", [(1, 1), (32, 1), (5, 1), (16, 1), (4, 8), (1, 64), (2, 64)])
def test_any_number_of_heads_keeps_what_the_cpu_keeps(heads):
    group, kv_heads = heads
    life = Both(
        pk.HardKV(most=300, p=0.9), query_heads=group * kv_heads, kv_heads=kv_heads, dtype="float16"
    )
    life.add(900)
    life.add(250)
    for _ in range(50):
        life.decode()
    life.check()
    counts = [len(rows) for rows in kept_rows(life.caches[1], life.sequences[0])[0]]
    if kv_heads >= 8:
        assert max(counts) > 3 * min(counts)


def test_a_large_zone_is_chosen_from_in_several_launches():
    """Scratch of a head is several megabytes: heads come some at a time."""
    life = Both(
        pk.HardKV(most=2048, p=0.95, pool=63),
        dtype="bfloat16",
        head_dim=128,
        value_dim=128,
        kv_heads=8,
        query_heads=32,
        segment_tokens=1024,
    )
    life.add(70_000)
    life.check()
    for _ in range(30):
        life.decode()
    life.check()


@pytest.mark.parametrize("placement", ["host", "device"])
def test_rows_come_from_wherever_they_are(placement, rng):
    """A prompt that follows others chooses among rows that have left for host memory."""
    config = make_config(
        pk.HardKV(most=100, p=0.8), dtype="float16", placement=placement, device="cuda"
    )
    cache, twin = pk.Cache(config), pk.Cache(config.replace(placement="device"))
    s, t = cache.add(), twin.add()
    for count in (500, 40, 300, 1, 64):
        (k, v), q = randn_kv(rng, count, config), randn_q(rng, count, config)
        cache.prefill(0, [s], k, v, q=q)
        twin.prefill(0, [t], k, v, q=q)
        settled(cache)
        assert kept_rows(cache, s) == kept_rows(twin, t)
        for _ in range(20):
            step = randn_step(rng, 1, config)
            assert_same_bits(cache.decode(0, [s], *step), twin.decode(0, [t], *step))
    k, v = rows_of(cache, s)
    again = rows_of(twin, t)
    assert_same_bits(k, again[0])
    assert_same_bits(v, again[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_replayed_steps_are_eager_ones_across_choices(dtype):
    """A graph of three sequences, of which one keeps nothing at first."""
    config = make_config(
        pk.HardKV(most=40, p=0.7), layers=2, dtype=dtype, device="cuda", dense_below=150
    )
    keeps = assert_replays_are_eager(config, lambda cache, s, layer, _: kept_rows(cache, s, layer))
    assert keeps > 20


def test_a_prompt_in_chunks_and_a_sequence_in_a_batch_have_the_same_bits(rng):
    config = make_config(
        pk.HardKV(most=50, p=0.8), dtype="bfloat16", head_dim=128, value_dim=128, device="cuda"
    )
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
        cuts = [*range(48, length - 40, 48), max(length - 40, 0)]
        for begin, end in itertools.pairwise([0, *cuts, length]):
            if begin < end:
                together.prefill(0, [batch[-1]], k[begin:end], v[begin:end], q=q[begin:end])
    for _ in range(60):
        step = randn_step(rng, len(lengths), config)
        out = together.decode(0, batch, *step)
        for i, (cache, s) in enumerate(alone):
            assert_same_bits(out[i : i + 1], cache.decode(0, [s], *(x[i : i + 1] for x in step)))
    for mine, (cache, s) in zip(batch, alone, strict=True):
        assert kept_rows(together, mine) == kept_rows(cache, s)


def dropping(policy: pk.HardKV = POLICIES["top p"]) -> pk.HardKV:
    return policy.replace(placement="dropped")


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_thousand_steps_drop_what_the_cpu_drops(policy, placement):
    life = Both(
        dropping(policy), dtype="bfloat16", head_dim=128, value_dim=128, placement=placement
    )
    life.add(700, chunks=3)
    life.add(90, queries=False)
    for step in range(1000):
        life.decode()
        deed = life.rng.integers(60)
        if deed == 0:  # tokens of the window and the buffer: no row of the zone is needed
            life.both(lambda cache: cache.truncate(life.sequences[:1], drop=1))
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
            life.both(lambda cache: cache.reorder(life.sequences[:2], [1, 1]))
        if step % 20 == 0:
            life.check()
            mine, theirs = life.both(lambda cache: cache.stats())
            assert mine.dropped_rows == theirs.dropped_rows
            for s in life.sequences:
                assert len(set(life.both(lambda cache: repr(cache.regions(s))))) == 1  # noqa: B023
    assert life.caches[1].stats().dropped_rows > 1000


@pytest.mark.parametrize("placement", ["host", "device"])
def test_dropped_rows_do_not_change_replayed_steps(placement):
    """A graph across drops, beside eager steps, and beside a cache that stores all rows."""
    config = make_config(
        dropping(pk.HardKV(most=40, p=0.7)),
        layers=2,
        dtype="bfloat16",
        device="cuda",
        placement=placement,
    )
    warmed(config)
    caches = [
        pk.Cache(config),
        pk.Cache(config),
        pk.Cache(config.replace(policy=pk.HardKV(most=40, p=0.7))),
    ]
    batches = []
    for each in caches:
        rng = np.random.default_rng(3)
        batch = [each.add() for _ in range(3)]
        for layer in range(2):
            for s, tokens in zip(batch, (700, 120, 64), strict=True):
                k, v = randn_kv(rng, tokens, config)
                each.prefill(layer, [s], k, v, q=randn_q(rng, tokens, config))
        batches.append(batch)
    graph = Graph(caches[0], batches[0])
    for number, step in enumerate(make_steps(config, 3, 300)):
        mine = graph.step(batches[0], step)
        for other in (1, 2):
            theirs = []
            for layer in range(2):
                inputs = (x[layer] for x in step)
                theirs += caches[other].decode(layer, batches[other], *inputs, return_lse=True)
            for a, b in zip(mine, theirs, strict=True):
                assert_same_bits(a, b, f"step {number}")
        if number in (60, 140):
            for index, each in enumerate(caches):
                batch = batches[index]
                batches[index] = [each.fork(batch[0]), *batch[1:]]
                each.remove(batch[0])
    stats = [each.stats() for each in caches]
    assert stats[0].dropped_rows == stats[1].dropped_rows > 1000
    assert stats[0].row_bytes < stats[2].row_bytes / 2


@pytest.mark.parametrize("placement", ["host", "device"])
def test_memory_of_the_device_and_the_host_stays_as_it_is(placement, rng):
    config = make_config(
        dropping(pk.HardKV(most=64)), dtype="float16", device="cuda", placement=placement
    )
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(rng, 3000, config)
    cache.prefill(0, [s], k, v, q=randn_q(rng, 3000, config))
    step = randn_step(rng, 1, config)
    sizes = []
    for token in range(6000):
        cache.decode(0, [s], *step)
        if token >= 200:
            stats = cache.stats()
            sizes.append((stats.row_bytes, stats.memory.live, stats.host_memory.live))
    early, late = np.max(sizes[:800], axis=0), np.max(sizes[800:], axis=0)
    assert late[0] <= early[0]
    tables = 4 * 16 * 9000 // config.segment_tokens  # they grow in powers of two
    assert late[1] <= early[1] + tables
    settled(cache)
    assert cache.stats().host_memory.live <= early[2]
    assert cache.regions(s).dropped > 8500
