"""ParisKV(seed=None): rows of a tail are drawn by a secret that goes with its sequence."""

import struct

import numpy as np
import oracle_tail
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    f64,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    with_changes,
)

OWN_SEED = 256  # in the version of a saved file


def secret_config(**changes) -> pk.Config:
    return make_config(**{"block": 64, "tail": "sample", "tail_rows": 16, "seed": None, **changes})


def saved_seed(cache: pk.Cache, s: int, path) -> int | None:
    """What docs/saved-contexts.md says of a file: the seed comes after the layers."""
    cache.save(s, path)
    header = path.read_bytes()
    version, _, _, settings, layers, _ = struct.unpack_from("<6q", header, 8)
    if not version & OWN_SEED:
        return None
    at = 56 + settings + layers * (48 if version & 255 >= 4 else 40)
    return struct.unpack_from("<q", header, at)[0]


def grown(cache: pk.Cache, tokens: int = 1500, seed: int = 0) -> int:
    s, rng = cache.add(), np.random.default_rng(seed)
    k, v = randn_kv(rng, tokens, cache.config)
    cache.prefill(0, [s], k, v)
    return s


def answer(cache: pk.Cache, s: int) -> tuple[torch.Tensor, ...]:
    q = randn_q(np.random.default_rng(9), 1, cache.config)
    return cache.decode(0, [s], q, return_lse=True)


def test_a_policy_tells_what_it_was_given_and_no_secret():
    policy = pk.ParisKV(seed=None)
    assert policy.seed is None
    assert "seed=None" in repr(policy)
    assert policy == eval(repr(policy), {"ParisKV": pk.ParisKV}) != pk.ParisKV()
    assert pk.ParisKV().seed == 42
    assert pk.Cache(secret_config()).config.policy.seed is None


def test_every_sequence_of_every_cache_has_its_own(device, tmp_path):
    found = set()
    for _ in range(2):
        cache = pk.Cache(secret_config(device=device))
        found |= {saved_seed(cache, cache.add(), tmp_path / "x") for _ in range(20)}
    assert len(found) == 40
    assert None not in found
    bits = [sum(seed >> bit & 1 for seed in found) for bit in range(32)]
    assert 4 < min(bits) <= max(bits) < 36


def test_a_seed_that_is_named_is_every_sequences(device, tmp_path):
    cache = pk.Cache(secret_config(seed=7, device=device))
    a, b = grown(cache), grown(cache)
    assert saved_seed(cache, a, tmp_path / "x") is None
    for x, y in zip(answer(cache, a), answer(cache, b), strict=True):
        assert_same_bits(x, y)


def test_two_sequences_of_one_text_draw_other_rows(device):
    cache = pk.Cache(secret_config(device=device))
    one, two = answer(cache, grown(cache))[1], answer(cache, grown(cache))[1]
    assert not torch.allclose(one, two, atol=1e-3)


def test_rows_are_those_that_the_definition_draws_by_the_seed_of_the_file(device, tmp_path):
    config = secret_config(device=device)
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(np.random.default_rng(0), 1500, config)
    cache.prefill(0, [s], k, v)
    q = randn_q(np.random.default_rng(9), 1, config)
    lse = f64(answer(cache, s)[1])[0]
    sink, zone, *_ = regions_of(cache, s)
    selected = cache.explain(0, s, q[0]).positions

    def expected(seed: int) -> np.ndarray:
        drawn = oracle_tail.Tournament(sink + zone, own_seed=seed).of(sink, sink + zone, 16)[1]
        weight = zone / len(drawn)
        found = []
        for head in range(config.query_heads):
            own = set(selected[head // 2].tolist())
            rows = dict.fromkeys((*range(sink), *range(sink + zone, 1500), *own), 1.0)
            rows |= {p: weight for p in drawn.tolist() if p not in own}
            keys = f64(k)[list(rows), head // 2]
            sums = np.exp(keys @ f64(q)[0, head] / 8) * list(rows.values())
            found.append(np.log(sums.sum()))
        return np.array(found)

    seed = saved_seed(cache, s, tmp_path / "x")
    assert np.abs(expected(seed) - lse).max() < 0.02  # keys of the tail are rounded
    assert np.abs(expected(oracle_tail.seed_of(42)) - lse).max() > 0.05


def test_forks_cuts_and_orders_keep_it(device, tmp_path):
    cache = pk.Cache(secret_config(device=device))
    a, b = grown(cache), grown(cache)
    seeds = [saved_seed(cache, s, tmp_path / "x") for s in (a, b)]
    early, late = cache.fork(a, tokens=900), cache.fork(a)
    for x, y in zip(answer(cache, a), answer(cache, late), strict=True):
        assert_same_bits(x, y)
    cache.truncate([a], keep=1200)
    cache.reorder([a, b], [1, 1])
    found = [saved_seed(cache, s, tmp_path / "x") for s in (early, late, a, b)]
    assert found == [seeds[0], seeds[0], seeds[1], seeds[1]]
    for x, y in zip(answer(cache, a), answer(cache, b), strict=True):
        assert_same_bits(x, y)


def test_a_sequence_that_is_cut_and_grows_again_draws_the_same_rows(device):
    cache = pk.Cache(secret_config(device=device))
    s, config = cache.add(), cache.config
    k, v = randn_kv(np.random.default_rng(0), 2500, config)
    cache.prefill(0, [s], k, v)
    before = answer(cache, s)
    cache.truncate([s], keep=0)
    cache.prefill(0, [s], k[:1300], v[:1300])
    cache.prefill(0, [s], k[1300:], v[1300:])
    cache.flush([s])
    for x, y in zip(before, answer(cache, s), strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("other", [None, 42])
def test_a_file_brings_it_to_any_cache_with_these_signs(other, kv_dtype, device, tmp_path):
    config = secret_config(kv_dtype=kv_dtype, device=device)
    cache = pk.Cache(config)
    s = grown(cache)
    seed = saved_seed(cache, s, tmp_path / "x")
    there = pk.Cache(with_changes(config, seed=other))
    t = there.load(tmp_path / "x")
    for step in range(60):
        tensors = randn_step(np.random.default_rng(step), 1, config)
        assert_same_bits(cache.decode(0, [s], *tensors), there.decode(0, [t], *tensors))
    assert saved_seed(there, t, tmp_path / "y") == seed
    cache.save(s, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    # A new sequence has what its cache gives.
    assert (saved_seed(there, there.add(), tmp_path / "y") is None) == (other == 42)


def test_a_file_without_one_goes_on_by_the_seed_of_its_settings(device, tmp_path):
    config = secret_config(seed=42, device=device)
    cache = pk.Cache(config)
    s = grown(cache)
    cache.save(s, tmp_path / "x")
    there = pk.Cache(with_changes(config, seed=None))
    t = there.load(tmp_path / "x")
    for x, y in zip(answer(cache, s), answer(there, t), strict=True):
        assert_same_bits(x, y)
    assert saved_seed(there, t, tmp_path / "x") is None  # as the settings have it
    signs = pk.Cache(with_changes(config, seed=7))
    with pytest.raises(ValueError, match=r"policy.seed 7 as this one, got 42 in"):
        signs.load(tmp_path / "x")


def spoiled(seed: int | None, times: int, device: str) -> float:
    """The error of outputs over keys that lie on rows which the published seed draws, and count for
    nothing beside as many others: root mean square over sequences."""
    tokens, end = 8192, 8192 - 256
    config = pk.Config(
        layers=1, query_heads=1, kv_heads=1, head_dim=64, dtype="float32", threads=1,
        local=192, update=64, dense_below=0, device=device,
        policy=pk.ParisKV(seed=seed, tail_rows=256),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    drawn = oracle_tail.sampled(4, end, 256)
    free = rng.permutation(np.setdiff1d(np.arange(500, end), drawn))[:400]
    drawn = rng.permutation(drawn[drawn > 500])[:80]
    u = rng.standard_normal(64)
    u /= np.linalg.norm(u)
    k, v = 0.5 * rng.standard_normal((tokens, 1, 64)), np.zeros((tokens, 1, 64))
    k[free, 0] = 8 * u + 0.15 * rng.standard_normal((len(free), 64))
    k[drawn, 0] = 7.6 * u + 0.15 * rng.standard_normal((len(drawn), 64))
    v[free, 0, 0] = v[drawn, 0, 1] = 1
    k, v, q = (
        torch.tensor(x, dtype=torch.float32, device=device) for x in (k, v, 8 * u.reshape(1, 1, 64))
    )
    off = []
    for i in range(times):
        cache = pk.Cache(config if seed is None else with_changes(config, seed=seed + i))
        s = cache.add()
        cache.prefill(0, [s], k, v)
        exact = cache.attend(0, [s], q)
        off.append(float((cache.decode(0, [s], q) - exact).norm() / exact.norm()))
    return float(np.sqrt(np.mean(np.square(off))))


def test_a_text_for_the_published_seed_spoils_nothing(device):
    published = spoiled(42, 1, device)
    others, secret = (spoiled(seed, 240, device) for seed in (1000, None))
    assert published > 4 * others
    assert secret < 1.3 * others
