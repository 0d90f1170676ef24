"""What is not selected is estimated from a row of each interval, with the weight of its keys."""

import numpy as np
import pariskv_core as pk
import pytest
import torch
from oracle_copies import copied
from oracle_tail import sampled
from support import DTYPES, f64, make_config, randn_kv, randn_q, randn_step, tensor

ROWS = 32
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}


def with_tail(**changes) -> pk.Config:
    fields = {"block": 64, "tail": "sample", "tail_rows": ROWS, "segment_tokens": 256}
    return make_config(**{**fields, **changes})


def estimated(config, q, keys, values, regions, selected):
    """(output, log-sum-exp) of each query head, in doubles."""
    total = len(keys)
    begin, end = regions.sink, regions.sink + regions.retrieval
    out, lse = [], []
    for head in range(config.query_heads):
        kv = head // (config.query_heads // config.kv_heads)
        own = selected[kv][selected[kv] >= 0]
        weights = np.zeros(total)
        tail = sampled(begin, end, config.policy.tail_rows, config.policy.seed)
        if len(own) < end - begin:
            weights[tail] = (end - begin) / len(tail)
        weights[:begin] = weights[end:] = 1
        weights[own] = 1
        k, v = keys[:, kv].copy(), values[:, kv].copy()
        rounded = np.isin(tail, own, invert=True)
        for rows in (k, v):
            rows[tail[rounded]] = copied(rows[tail], config.policy.tail_rows)[rounded]
        logits = k @ q[head] / np.sqrt(config.head_dim)
        top = logits.max()
        shares = weights * np.exp(logits - top)
        out.append(shares @ v / shares.sum())
        lse.append(top + np.log(shares.sum()))
    return np.array(out), np.array(lse)


class One:
    """A sequence in a cache, with all of its rows."""

    def __init__(self, config: pk.Config, tokens: int, seed: int = 0, chunks: int = 1):
        self.config, self.rng = config, np.random.default_rng(seed)
        self.cache = pk.Cache(config)
        self.s = self.cache.add()
        k, v = randn_kv(self.rng, tokens, config)
        for part in torch.arange(tokens).tensor_split(chunks):
            self.cache.prefill(0, [self.s], k[part], v[part])
        self.keys, self.values = [k], [v]

    def step(self):
        q, k, v = randn_step(self.rng, 1, self.config)
        self.keys.append(k)
        self.values.append(v)
        out, lse = self.cache.decode(0, [self.s], q, k, v, return_lse=True)
        return q, out, lse

    def check(self):
        q, out, lse = self.step()
        regions = self.cache.regions(self.s)
        why = self.cache.explain(0, self.s, q[0])
        assert why.searched
        keys, values = (f64(torch.cat(x)) for x in (self.keys, self.values))
        expected, total = estimated(
            self.config, f64(q[0]), keys, values, regions, np.asarray(why.positions)
        )
        tolerance = TOLERANCE[self.config.dtype]
        np.testing.assert_allclose(f64(out)[0], expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(f64(lse)[0], total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 192), (80, 64)])
def test_outputs_are_of_weighted_rows(dtype, head_dim, value_dim):
    one = One(with_tail(dtype=dtype, head_dim=head_dim, value_dim=value_dim), 1300)
    one.check()


@pytest.mark.parametrize("tokens", [1060, 1200, 2047, 2090, 4200])
def test_intervals_follow_the_zone(tokens):
    one = One(with_tail(), tokens)
    for _ in range(3):
        one.check()


def test_log_sum_exp_is_nearer_to_full_attention_than_without():
    config = with_tail(top_k=20, tail_rows=256)
    off = {"with": [], "without": []}
    for seed in range(4):
        for name, tail in (("with", "sample"), ("without", "none")):
            one = One(config.replace(policy=config.policy.replace(tail=tail)), 6000, seed)
            q, out, lse = one.step()
            keys, values = (f64(torch.cat(x)) for x in (one.keys, one.values))
            everything = [np.arange(len(keys))] * config.kv_heads
            regions = one.cache.regions(one.s)
            exact, total = estimated(config, f64(q[0]), keys, values, regions, everything)
            off[name].append(
                (np.abs(f64(lse)[0] - total).mean(), np.abs(f64(out)[0] - exact).mean())
            )
    with_, without = (np.array(off[name]).mean(axis=0) for name in ("with", "without"))
    assert with_[0] < 0.1 < 1 < without[0]
    assert with_[1] < without[1] / 3


def test_nothing_is_sampled_where_everything_is_selected():
    outputs = []
    for tail in ("sample", "none"):
        config = with_tail(top_k=5000, schedule=[(0, 1.0, 1.0)], tail=tail)
        outputs.append(One(config, 1300).step()[1:])
    for mine, theirs in zip(*outputs, strict=True):
        assert torch.equal(mine, theirs)


def test_chunks_forks_and_truncation_leave_the_same_rows():
    config = with_tail()
    whole, parts = One(config, 1500), One(config, 1500, chunks=7)
    assert torch.equal(whole.step()[1], parts.step()[1])
    longer = One(config, 1500)
    longer.step()
    twin = longer.cache.fork(longer.s)
    for _ in range(200):
        q, k, v = randn_step(longer.rng, 1, config)
        longer.cache.decode(0, [longer.s], q, k, v)
    longer.cache.truncate([longer.s], keep=1501)
    q, k, v = randn_step(longer.rng, 1, config)
    a = longer.cache.decode(0, [longer.s], q, k, v)
    b = longer.cache.decode(0, [twin], q, k, v)
    assert torch.equal(a, b)


def test_copies_of_its_rows_lie_side_by_side():
    config = with_tail(local=64, update=64)
    one = One(config, 1500)
    assert one.cache.stats().kept_bytes > 0  # a prompt's zone is searched by the next step
    for tokens in (1500, 2000, 3000):
        while one.cache.length(one.s) < tokens:
            one.step()
        one.check()
        stats, regions = one.cache.stats(), one.cache.regions(one.s)
        tail = sampled(regions.sink, regions.sink + regions.retrieval, ROWS)
        assert stats.kept_rows == config.kv_heads * len(tail)
        in_common = 2 * (64 + 64) * 4  # a centre and a unit of each channel
        in_8_bits = 2 * (64 + 4)  # with scales
        assert stats.kept_bytes == config.kv_heads * (in_common + 2 * ROWS * in_8_bits)
    twin = one.cache.fork(one.s)
    assert one.cache.stats().kept_bytes == stats.kept_bytes  # forks share them
    one.cache.truncate([twin], keep=100)
    assert one.cache.stats().kept_rows == stats.kept_rows  # the twin has no zone
    without = One(config.replace(policy=config.policy.replace(tail="none")), 1500)
    assert without.cache.stats().kept_bytes == 0


def test_rows_that_are_not_finite_do_not_count():
    config = with_tail()
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(np.random.default_rng(1), 1300, config)
    rows = sampled(4, 1228, ROWS)  # the zone
    k[rows[10]] = float("nan")
    k[rows[20], :, 3] = float("inf")
    cache.prefill(0, [s], k, v)
    q = randn_q(np.random.default_rng(2), 1, config)
    out = cache.decode(0, [s], q, tensor(np.ones((1, 2, 64)), config), v[:1])
    assert np.isfinite(f64(out)).all()


def test_settings():
    own = pk.ParisKV(block=64, tail="own")
    assert pk.Cache(make_config(block=64, tail="own")).config.policy.tail == "sample"
    assert pk.Cache(make_config(block=0, tail="own")).config.policy.tail == "none"
    assert own.replace(tail_rows=64) != own
    for wrong in (15, 8193):
        with pytest.raises(ValueError, match=r"policy\.tail_rows: expected 16 to 8192, got"):
            own.replace(tail_rows=wrong)
    with pytest.raises(ValueError, match='expected "sample", "none" or "own", got "all"'):
        pk.ParisKV(tail="all")
