"""PRKV's steps on a GPU beside the CPU: pages are equal, however the steps are made.

What a step is to find, and to attend to, is test_prkv_pages.py's, which runs on either backend.
"""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from prkv_life import make_config
from replays import assert_replays_are_eager
from support import (
    DTYPES,
    HEAD_DIMS,
    assert_same_bits,
    f64,
    randn_kv,
    randn_q,
    randn_step,
    settled,
    with_changes,
)

pytestmark = pytest.mark.cuda

# Of outputs: floats are added in another order, and rounded to 16 bits.
APART = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}


def found(cache: pk.Cache, s: int, q: torch.Tensor, layer: int = 0) -> dict:
    """All that is said of a step's pages, as bytes."""
    explanation = cache.explain(layer, s, q)
    arrays = {"kept": explanation.kept, "positions": explanation.positions}
    if isinstance(explanation.details, pk.PRKVExplanation):
        details = explanation.details
        arrays |= {"pages": details.pages, "scores": details.page_scores}
        arrays["numbers"] = np.array([details.static_rows, details.first_page])
    return {name: (array.shape, array.tobytes()) for name, array in arrays.items()}


class Both:
    """The same sequences on the CPU and on a GPU, with everything done to both."""

    def __init__(self, policy: pk.PRKV, seed: int = 0, **changes):
        self.caches = [pk.Cache(make_config(policy, device=d, **changes)) for d in ("cpu", "cuda")]
        self.config = self.caches[0].config
        self.rng = np.random.default_rng(seed)
        self.sequences: list[int] = []

    def both(self, call) -> list:
        return [call(cache) for cache in self.caches]

    def add(self, tokens: int, queries: bool = True) -> int:
        (k, v), q = randn_kv(self.rng, tokens, self.config), randn_q(self.rng, tokens, self.config)

        def prefill(cache: pk.Cache) -> int:
            s = cache.add()
            own = [x.to(cache.config.device) for x in (k, v, q)]
            cache.prefill(0, [s], own[0], own[1], q=own[2] if queries else None)
            return s

        mine, theirs = self.both(prefill)
        assert mine == theirs
        self.sequences.append(mine)
        return mine

    def decode(self, spoiled: bool = False) -> None:
        q = randn_q(self.rng, len(self.sequences), self.config)
        k, v = randn_kv(self.rng, len(self.sequences), self.config)
        if spoiled:
            q[0, -1, 2] = np.nan
            q[0, 0, 0] = np.inf
        a, b = self.both(
            lambda cache: cache.decode(
                0,
                self.sequences,
                *(x.to(cache.config.device) for x in (q, k, v)),
                return_lse=True,
            )
        )
        bound = APART[self.config.dtype]
        for mine, theirs in zip(a, b, strict=True):
            np.testing.assert_allclose(f64(theirs), f64(mine), rtol=bound, atol=bound)
        for i, s in enumerate(self.sequences):
            cpu, gpu = self.both(lambda cache: found(cache, s, q[i].to(cache.config.device)))  # noqa: B023
            assert cpu == gpu


POLICIES = {
    "kept and pages": pk.PRKV(budget=96, page=8),
    "pages": pk.PRKV(budget=96, page=16, static_share=0),
    "kept": pk.PRKV(budget=96, page=8, static_share=1),
    "agreed": pk.PRKV(budget=96, page=8, static_share="auto", digest="max"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_thousand_steps_find_what_the_cpu_finds(policy):
    life = Both(policy, dtype="bfloat16", head_dim=128, value_dim=128)
    life.add(700)
    life.add(150, queries=False)
    for step in range(1000):
        life.decode(spoiled=step % 97 == 5)
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
            life.both(lambda cache: cache.reorder(life.sequences[:2], [1, 1]))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_size_finds_what_the_cpu_finds(dtype, head_dim):
    life = Both(pk.PRKV(budget=96, page=8), dtype=dtype, head_dim=head_dim, value_dim=head_dim)
    life.add(600)
    for _ in range(30):
        life.decode()


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("value_dim", [64, 192])
def test_every_page_finds_what_the_cpu_finds(page, value_dim):
    policy = pk.PRKV(budget=320, page=page)
    life = Both(policy, dtype="float16", head_dim=80, value_dim=value_dim, update=64)
    life.add(2500)
    for _ in range(70):
        life.decode()


@pytest.mark.parametrize("heads", [(1, 1), (32, 1), (5, 1), (16, 1), (4, 8), (1, 64), (2, 64)])
def test_any_number_of_heads_finds_what_the_cpu_finds(heads):
    group, kv_heads = heads
    life = Both(
        pk.PRKV(budget=128, page=8),
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        dtype="float16",
    )
    life.add(900)
    life.add(250)
    for _ in range(30):
        life.decode(spoiled=True)


@pytest.mark.parametrize("budget", [1024, 6000])
def test_a_large_zone_is_searched_as_on_the_cpu(budget):
    """Of so many rows a block cannot list all."""
    life = Both(
        pk.PRKV(budget=budget),
        dtype="bfloat16",
        head_dim=128,
        value_dim=128,
        kv_heads=8,
        query_heads=32,
        segment_tokens=1024,
        update=128,
        local=64,
    )
    life.add(70_000)
    for _ in range(5):
        life.decode()


@pytest.mark.parametrize("static_share", [0, 0.25])
def test_rows_come_from_wherever_they_are(static_share, rng):
    """From device memory, over the bus, or from a row cache: the bits of a step are the same."""
    policy = pk.PRKV(budget=200, page=8, static_share=static_share)
    config = make_config(policy, dtype="float16", device="cuda", placement="device")
    caches = [pk.Cache(config)] + [
        pk.Cache(with_changes(config, placement="host", row_cache=rows)) for rows in (0, -1, 16)
    ]
    sequences = [cache.add() for cache in caches]
    q = randn_q(rng, 1, config)
    for count in (900, 40, 300):
        (k, v), queries = randn_kv(rng, count, config), randn_q(rng, count, config)
        for cache, s in zip(caches, sequences, strict=True):
            cache.prefill(0, [s], k, v, q=queries)
            settled(cache)
        for step in range(60):
            q = (0.95 * q + 0.3 * randn_q(rng, 1, config)).to(q.dtype)
            k, v = randn_kv(rng, 1, config)
            if step == 30:
                for cache, s in zip(caches, sequences, strict=True):
                    cache.truncate([s], drop=35)
            outputs = [
                cache.decode(0, [s], q, k, v) for cache, s in zip(caches, sequences, strict=True)
            ]
            for other in outputs[1:]:
                assert_same_bits(outputs[0], other, f"step {step}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static_share", [0.25, 1])
def test_replayed_steps_are_eager_ones_across_choices(dtype, static_share):
    """A graph of three sequences, of which one keeps nothing at first."""
    config = make_config(
        pk.PRKV(budget=64, page=8, static_share=static_share),
        layers=2,
        dtype=dtype,
        device="cuda",
        dense_below=150,
    )
    assert_replays_are_eager(config, lambda cache, s, layer, q: found(cache, s, q, layer))


def test_a_sequence_in_a_batch_has_the_bits_of_one_alone(rng):
    config = make_config(
        pk.PRKV(budget=96, page=8), dtype="bfloat16", head_dim=128, value_dim=128, device="cuda"
    )
    together = pk.Cache(config)
    batch, alone = [], []
    for length in (400, 177, 940, 33):
        (k, v), q = randn_kv(rng, length, config), randn_q(rng, length, config)
        cache = pk.Cache(config)
        alone.append((cache, cache.add()))
        cache.prefill(0, [alone[-1][1]], k, v, q=q)
        batch.append(together.add())
        together.prefill(0, [batch[-1]], k, v, q=q)
    for _ in range(60):
        step = randn_step(rng, len(batch), config)
        out = together.decode(0, batch, *step)
        for i, (cache, s) in enumerate(alone):
            assert_same_bits(out[i : i + 1], cache.decode(0, [s], *(x[i : i + 1] for x in step)))
