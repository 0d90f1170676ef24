"""A budget by mass on both backends: nearly the same rows, and shares within rounding."""

import math

import numpy as np
import pytest
from support import (
    DTYPES,
    ROUNDING,
    assert_same_bits,
    explained,
    f64,
    filled,
    make_config,
    randn_q,
    randn_step,
    settled,
    tensor,
)
from test_cuda_equal import GROUPS
from test_cuda_graph import assert_same_results, assert_same_state, eager, make_steps, twins

pytestmark = pytest.mark.cuda

# Worths differ in their last bits between backends: a budget may be reached a row sooner.
SIZES = (0.3, 1.0, 2.0, 6.0)


def rows_of(explanation) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in explanation.positions]


def assert_nearly_the_same_rows(a, b, rows_apart: int = 1) -> None:
    assert_same_bits(a.details.candidate_positions, b.details.candidate_positions, "candidates")
    for head, (mine, theirs) in enumerate(zip(rows_of(a), rows_of(b), strict=True)):
        assert abs(len(mine) - len(theirs)) <= rows_apart
        assert len(set(mine) ^ set(theirs)) <= 2 * rows_apart
        least = min(
            (float(e.worth[head][len(r) - 1]) for e, r in ((a, mine), (b, theirs)) if r),
            default=0.0,
        )
        gap = abs(a.details.mass[head] - b.details.mass[head])
        assert gap <= 1e-3 + (least if len(mine) != len(theirs) else 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("group", "kv_heads"), GROUPS)
def test_both_backends_take_the_same_rows(group, kv_heads, head_dim, dtype):
    shape = {"query_heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for mass, tail in ((0.3, "sample"), (0.7, "none"), (0.95, "sample")):
        fields = {**shape, "dtype": dtype, "block": 64, "tail": tail, "tail_rows": 32, "top_k": 40}
        both = [filled(make_config(**fields, mass=mass, device=d), 1100) for d in ("cpu", "cuda")]
        for size in SIZES:
            q = randn_q(both[0].rng, 1, both[0].cache.config)[0].float().cpu().numpy() * size
            a, b = (f.cache.explain(0, f.s, tensor(q, f.cache.config)) for f in both)
            assert_nearly_the_same_rows(a, b)
            outputs = [f.cache.decode(0, [f.s], tensor(q[None], f.cache.config)) for f in both]
            if rows_of(a) == rows_of(b):
                allowed = 4 * ROUNDING[dtype] + 1e-4
                np.testing.assert_allclose(*map(f64, outputs), atol=allowed, rtol=allowed)
        mine, theirs = (f.cache.stats() for f in both)
        assert abs(mine.fetched_rows - theirs.fetched_rows) <= len(SIZES) * kv_heads
        assert abs(mine.mean_mass - theirs.mean_mass) < 0.01
        assert abs(mine.least_mass - theirs.least_mass) < 0.03


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mass_of_one_gives_the_bits_of_no_budget(dtype, placement):
    fields = {"dtype": dtype, "block": 64, "tail": "sample", "tail_rows": 32, "top_k": 30}
    off, on = (
        filled(make_config(**fields, head_dim=128, mass=mass, placement=placement), 1500)
        for mass in (None, 1.0)
    )
    for _ in range(4):
        step = randn_step(off.rng, 1, off.cache.config)
        a, b = (f.cache.decode(0, [f.s], *step, return_lse=True) for f in (off, on))
        assert_same_bits(a[0], b[0])
        assert_same_bits(a[1], b[1])
    mine, theirs = off.cache.stats(), on.cache.stats()
    assert mine.fetched_rows == theirs.fetched_rows == 4 * 2 * 30
    assert math.isnan(mine.mean_mass)
    assert 0 < theirs.least_mass < theirs.mean_mass < 1


def test_fewer_rows_cross_the_bus():
    fields = {"dtype": "bfloat16", "head_dim": 128, "block": 64, "tail": "sample", "row_cache": 0}
    fetched = []
    for mass in (None, 0.9):
        f = filled(make_config(**fields, tail_rows=64, top_k=100, mass=mass), 5000)
        for _ in range(5):
            q, k, v = randn_step(f.rng, 1, f.cache.config)
            f.cache.decode(0, [f.s], q * 8, k, v)
        fetched.append(settled(f.cache).fetched_rows)
    assert fetched[0] == 5 * 2 * 100
    assert 0 < fetched[1] < fetched[0] / 2


def test_a_replayed_graph_takes_as_many_rows_as_each_step_needs():
    config = make_config(
        layers=2,
        dtype="bfloat16",
        head_dim=128,
        block=64,
        tail="sample",
        tail_rows=32,
        top_k=60,
        mass=0.8,
        row_cache=64,
    )
    graph, sequences, twin, alike = twins(config, [1300, 700])
    counts = []
    for i, (q, k, v) in enumerate(make_steps(config, 2, 16)):
        step = [q * SIZES[i % len(SIZES)], k, v]
        mine, before = graph.step(sequences, step), twin.stats().fetched_rows
        assert_same_results(mine, eager(twin, alike, step), f"step {i}")
        counts.append(twin.stats().fetched_rows - before)
    assert len(set(counts)) > 2  # steps differ in what they take
    a, b = graph.cache.stats(), twin.stats()
    assert (a.fetched_rows, a.mean_mass, a.least_mass) == (
        b.fetched_rows,
        b.mean_mass,
        b.least_mass,
    )
    assert_same_state(graph, sequences, twin, alike)


@pytest.mark.parametrize("top_k", [300, 1200])
def test_more_rows_than_a_block_has_threads(top_k):
    fields = {"head_dim": 128, "block": 64, "top_k": top_k, "schedule": [(0, 0.5, 0.3)]}
    for mass in (0.4, 0.9):
        both = [
            filled(make_config(**fields, mass=mass, tail="sample", device=d), 6000)
            for d in ("cpu", "cuda")
        ]
        for size in SIZES:
            q = randn_q(both[0].rng, 1, both[0].cache.config)[0].cpu().numpy() * size
            a, b = (f.cache.explain(0, f.s, tensor(q, f.cache.config)) for f in both)
            assert_nearly_the_same_rows(a, b, rows_apart=2)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0])
def test_queries_that_mean_harm(broken):
    fields = {"dtype": "bfloat16", "block": 64, "tail": "sample", "tail_rows": 32, "top_k": 20}
    both = [filled(make_config(**fields, mass=0.5, device=d), 900) for d in ("cpu", "cuda")]
    q = randn_q(both[0].rng, 1, both[0].cache.config)[0].float().cpu().numpy()
    one, every = q.copy(), np.full_like(q, broken)
    one[0] = broken
    for asked in (one, every):
        a, b = (f.cache.explain(0, f.s, tensor(asked, f.cache.config)) for f in both)
        assert [len(r) for r in rows_of(a)] == pytest.approx([len(r) for r in rows_of(b)], abs=1)
        np.testing.assert_allclose(a.details.mass, b.details.mass, atol=0.05)
    if broken != 0.0:
        assert np.isnan(b.details.mass).all()
        assert [len(r) for r in rows_of(b)] == [20, 20]
    for name, values in explained(b).items():
        assert values.shape[0] in (2, 4), name
