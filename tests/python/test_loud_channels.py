"""Copies of the tail in 8 bits where a few channels are far louder than the others."""

import numpy as np
import pariskv_core as pk
import pytest
from oracle_copies import copied
from oracle_tail import sampled
from support import current_device, f64, tensor

TOKENS = 6000
DIM = 64


def clusters(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Keys in 32 clusters (TOKENS, 1, DIM), with like values."""
    of = rng.integers(0, 32, TOKENS)
    keys = 1.5 * rng.standard_normal((32, DIM))[of] + 0.7 * rng.standard_normal((TOKENS, DIM))
    values = rng.standard_normal((32, DIM))[of] + 0.5 * rng.standard_normal((TOKENS, DIM))
    return keys[:, None], values[:, None]


def turning(loudness: float) -> np.ndarray:
    """A loud channel that rotary positions turn: once in the sequence."""
    return loudness * np.cos(2 * np.pi * np.arange(TOKENS) / TOKENS)


LOUD = {
    "none": lambda keys, values: None,
    "keys, always the same": lambda keys, values: np.add.at(keys, np.s_[:, :, 5], 1000),
    "keys, turning": lambda keys, values: np.add.at(keys, np.s_[:, :, 5], turning(300)[:, None]),
    "keys, at random": lambda keys, values: np.multiply.at(keys, np.s_[:, :, 5], 100),
    "values, always the same": lambda keys, values: np.add.at(values, np.s_[:, :, 5], 1000),
    "values, at random": lambda keys, values: np.multiply.at(values, np.s_[:, :, 5], 300),
}


def off(loud: str, dtype: str) -> tuple[float, float]:
    """The error of outputs over their size, in quiet channels of values: by default, and with
    the same rows unrounded."""
    rng = np.random.default_rng(0)
    keys, values = clusters(rng)
    LOUD[loud](keys, values)
    config = pk.Config(
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_dim=DIM,
        dtype=dtype,
        dense_below=2048,
        device=current_device(),
    )
    cache = pk.Cache(config)
    s = cache.add()
    k, v = tensor(keys, config), tensor(values, config)
    cache.prefill(0, [s], k, v)
    keys, values = f64(k)[:, 0], f64(v)[:, 0]
    quiet = np.arange(DIM) != 5 if loud.startswith("values") else np.ones(DIM, bool)
    regions = cache.regions(s)
    begin, end = regions.sink, regions.sink + regions.retrieval
    tail = sampled(begin, end, 1024)
    found, rounded_none = [], []
    for _ in range(20):
        q = 1.5 * rng.standard_normal((1, 1, DIM))
        # A model asks little of a loud channel: else nothing but it would count.
        q[..., 5] *= 0.02 if loud.startswith("keys") else 1
        q = tensor(q, config)
        logits = keys @ f64(q)[0, 0] / np.sqrt(DIM)
        weights = np.zeros(TOKENS)
        weights[tail] = (end - begin) / len(tail)
        weights[:begin] = weights[end:] = 1
        own = np.asarray(cache.explain(0, s, q[0]).positions)[0]
        weights[own[own >= 0]] = 1
        full, sample = (
            shares @ values / shares.sum()
            for shares in (w * np.exp(logits - logits.max()) for w in (np.ones(TOKENS), weights))
        )
        size = np.linalg.norm(full[quiet])
        out = f64(cache.decode(0, [s], q))[0, 0]
        found.append(np.linalg.norm((out - full)[quiet]) / size)
        rounded_none.append(np.linalg.norm((sample - full)[quiet]) / size)
    return tuple(np.sqrt(np.mean(np.square(x))) for x in (found, rounded_none))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loud", LOUD)
def test_loud_channels_cost_the_others_nothing(loud, dtype):
    by_default, unrounded = off(loud, dtype)
    assert 0.01 < unrounded < 0.2
    assert by_default < 1.1 * unrounded + (0.01 if dtype == "bfloat16" else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_huge_row_takes_no_bits_from_the_others(dtype):
    found = []
    for huge in (None, 1e30):
        rng = np.random.default_rng(0)
        keys, values = clusters(rng)
        drawn = sampled(4, TOKENS - 300, 1024)
        if huge is not None:
            keys[drawn[40]] = 0
            keys[drawn[40:42], :, 3] = -huge  # queries are positive: none attends to these two
            values[drawn[41]] *= huge
        config = pk.Config(
            layers=1,
            query_heads=1,
            kv_heads=1,
            head_dim=DIM,
            dtype=dtype,
            dense_below=2048,
            device=current_device(),
        )
        cache = pk.Cache(config)
        s = cache.add()
        cache.prefill(0, [s], tensor(keys, config), tensor(values, config))
        q = 1.5 * np.abs(rng.standard_normal((1, 1, DIM)))
        found.append(f64(cache.decode(0, [s], tensor(q, config)))[0, 0])
    apart = np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[0])
    assert apart < 0.1


@pytest.mark.cpu("the oracle itself")
def test_rows_are_rounded_by_what_a_channel_has():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((2000, DIM))
    rows[:, 5] = 1000 + 0.5 * rows[:, 5]
    rows[:, 9] *= 300
    left = np.sqrt(((copied(rows, 1024) - rows) ** 2).mean(axis=0)) / rows.std(axis=0)
    assert left.max() < 0.03  # of a channel's own spread
