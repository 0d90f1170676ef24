"""Blocks that share a mean: do they find what matters, also where whole keys fail?"""

import functools

import numpy as np
import oracle
import oracle_blocks
import pariskv_core as pk
import pytest
import workload
from support import config_of, f64, tensor

TOP_K = 100
OBSERVED = oracle_blocks.observed(4)  # of a prompt: windows whose queries set the balance


def cache_of(
    keys: np.ndarray, block: int, group: int, ratio: float, q=None
) -> tuple[pk.Cache, int]:
    config = config_of(
        layers=1,
        query_heads=group,
        kv_heads=1,
        head_dim=keys.shape[-1],
        dtype="float32",
        top_k=TOP_K,
        schedule=[(0, ratio, 0.2)],
        block=block,
        threads=2,
    )
    cache = pk.Cache(config)
    s = cache.add()
    k = tensor(keys, config)
    cache.prefill(0, [s], k, k, q=None if q is None else tensor(q, config))
    return cache, s


def shares(keys: np.ndarray, queries: np.ndarray, block: int, ratio: float = 0.05, q=None):
    """Attention on the selected rows over that on the best ones, per query (steps, group, dim)."""
    cache, s = cache_of(keys, block, queries.shape[1], ratio, q)
    found = []
    for query in queries:
        explanation = cache.explain(0, s, tensor(query, cache.config))
        mass = oracle.group_attention(query, keys[:, 0])
        zone = mass[explanation.zone_begin :][: explanation.zone_tokens]
        found.append(mass[explanation.positions[0]].sum() / np.sort(zone)[-TOP_K:].sum())
    return np.array(found)


@functools.cache
def outlier_load(pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, queries, and a prompt's queries (other ones), with `pairs` of loud channels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload, "OUTLIER_PAIRS", max(pairs, 1))
        spec = workload.Spec(tokens=10_000, steps=26, kv_heads=1, outliers=pairs > 0)
        load = workload.make(spec)
    prompt = np.zeros((10_000, 4, 128))
    for window in OBSERVED:
        prompt[window] = load.queries[10:]
    return load.keys, load.queries[:10], prompt


@pytest.mark.parametrize("queries", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("block", [64, 256])
def test_sixteen_outlier_channels_hide_nothing(block, queries):
    keys, asked, prompt = outlier_load(8)
    found = shares(keys, asked, block, q=prompt if queries else None)
    assert found.mean() >= 0.96
    assert shares(keys, asked, 0).mean() < 0.85  # what whole keys make of them


@pytest.mark.parametrize("queries", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("channel", [7, 127])
def test_a_constant_channel_hides_nothing(channel, queries):
    keys, asked, prompt = outlier_load(0)
    keys = keys.copy()
    keys[..., channel] = 50
    found = shares(keys, asked, 256, q=prompt if queries else None)
    assert found.mean() >= 0.96
    assert shares(keys, asked, 0).mean() < 0.6


def test_blocks_with_logits_of_ten_thousands_are_told_apart(rng):
    # Biases in four channels that queries ask for loudly: so it is in the first layer of Qwen-1.5B.
    keys, asked, prompt = (rng.standard_normal((n, 1, 128)) for n in (6_000, 12, 6_000))
    keys += 10 * np.repeat(rng.standard_normal((94, 1, 128)), 64, axis=0)[:6_000]
    keys[..., :4] = 400
    asked[..., :4] = prompt[..., :4] = 100
    assert np.median(keys[:, 0] @ asked[0, 0] / np.sqrt(128)) > 14_000
    assert shares(keys, asked, 64, ratio=1.0, q=prompt).mean() >= 0.9


@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (128, 4)])
def test_white_keys_lose_nothing(head_dim, group, block, rng):
    # Without any mean or loud channel there is nothing to gain: 64 queries' mean is known to .003.
    differences = []
    for _ in range(2):
        keys = rng.standard_normal((8_000, 1, head_dim))
        asked = rng.standard_normal((32, group, head_dim)) * 2
        prompt = rng.standard_normal((8_000, group, head_dim))
        differences.append(shares(keys, asked, block, q=prompt) - shares(keys, asked, 0))
    assert np.mean(differences) >= -0.005


def rotated(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary positions, halves of a head by halves: rows (tokens, head_dim)."""
    half = rows.shape[1] // 2
    angles = positions[:, None] * 1e4 ** (-np.arange(half) / half)
    cos, sin, x, y = np.cos(angles), np.sin(angles), rows[:, :half], rows[:, half:]
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], axis=1)


def text_after_a_run(run: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys of tokens out of 400 kinds, of which the first `run` are alike; queries that each look
    for tokens of one kind; a prompt's queries."""
    rng = np.random.default_rng(seed)
    count, dim = 8_000, 64
    kinds = rng.standard_normal((400, dim)) * np.exp(rng.normal(0, 0.5, dim))
    tokens, noise = rng.integers(0, 400, count), rng.standard_normal((2, count, dim)) * 0.3
    tokens[:run] = 7
    noise[0, tokens == 7] *= 0.1
    places = np.arange(count)
    keys = rotated(kinds[tokens] + noise[0], places)
    prompt = rotated(kinds[tokens] + noise[1], places)
    asked = rotated(kinds[20:44], np.full(24, count))
    return keys[:, None], asked[:, None], prompt[:, None]


@pytest.mark.parametrize("queries", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("run", [300, 700])
def test_equal_tokens_at_the_start_spoil_nothing(run, queries):
    # Banners, padding, templates: a balance of such keys alone would be that of rotary positions.
    found = []
    for length in (0, run):
        of_seeds = []
        for seed in range(3):
            keys, asked, prompt = text_after_a_run(length, seed)
            of_seeds.append(shares(keys, asked, 64, q=prompt if queries else None).mean())
        found.append(np.mean(of_seeds))
    without, with_run = found
    assert with_run >= without - 0.02


def keys_of_many_norms(sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Random keys with log-normal norms."""
    count = 32_768
    return rng.standard_normal((count, 1, 128)) * np.exp(rng.normal(0, sigma, (count, 1, 1)))


@pytest.mark.parametrize(
    ("sharpness", "lead", "block", "ratio"),
    [
        (16, 35, 256, 0.05),
        (32, 70, 64, 0.05),
        (32, 70, 256, 0.05),
        (64, 140, 256, 0.05),
        (16, 35, 64, 0.0125),  # what long zones rerank
        (32, 70, 256, 0.0125),
    ],
)
def test_the_key_that_leads_a_sharp_head_is_selected(sharpness, lead, block, ratio):
    # The best key leads by tens of nats, and has to be one of few candidates.
    rng = np.random.default_rng(0)
    keys = keys_of_many_norms(0.6, rng)
    cache, s = cache_of(keys, block, 4, ratio)
    leads = []
    for _ in range(16):
        q = rng.standard_normal((4, 128)) * sharpness
        found = cache.explain(0, s, tensor(q, cache.config))
        zone = slice(found.zone_begin, found.zone_begin + found.zone_tokens)
        logits = keys[zone, 0] @ q.T / np.sqrt(128)
        order = np.argsort(-logits, axis=0)
        leads += (np.take_along_axis(logits, order, 0)[0] - np.sort(logits, axis=0)[-2]).tolist()
        best = found.zone_begin + order[0]
        assert np.isin(best, found.details.candidate_positions[0]).all()
        assert np.isin(best, found.positions[0]).all()
    assert np.median(leads) >= 0.8 * lead


@pytest.mark.parametrize(("sigma", "sharpness"), [(0.3, 8), (0.3, 16), (0.6, 8)])
def test_the_key_that_leads_a_sharp_head_is_selected_beside_flat_heads(sigma, sharpness):
    rng = np.random.default_rng(0)
    keys = keys_of_many_norms(sigma, rng)
    cache, s = cache_of(keys, 64, 4, 0.05)
    for _ in range(16):
        q = rng.standard_normal((4, 128)) * np.array([sharpness, sharpness, 1, 1])[:, None]
        found = cache.explain(0, s, tensor(q, cache.config))
        zone = slice(found.zone_begin, found.zone_begin + found.zone_tokens)
        best = found.zone_begin + np.argmax(keys[zone, 0] @ q[:2].T, axis=0)
        assert np.isin(best, found.positions[0]).all()


def test_rows_that_are_worth_nothing_go_by_their_logits(rng):
    # One key has all the attention there is; the others' exponentials are nothing, all alike.
    keys = rng.standard_normal((5_000, 1, 64))
    query = rng.standard_normal(64)
    keys[100] = query * 40
    for block in (0, 64):
        cache, s = cache_of(keys, block, 1, 1.0)
        found = cache.explain(0, s, tensor(query[None], cache.config))
        assert found.positions[0, 0] == 100
        assert found.worth[0, 0] > 0.99 and (found.worth[0, 1:] < 2.0**-100).all()
        assert (np.diff(found.worth[0]) <= 0).all()
        assert (np.diff(found.details.estimated[0]) <= 0).all()
        logits = f64(tensor(keys, cache.config))[4:, 0] @ query
        best = 4 + np.argsort(-logits[: found.zone_tokens])[:TOP_K]
        assert len(np.intersect1d(best, found.positions[0])) >= 85
