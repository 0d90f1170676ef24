"""The sample of a tail: its chances, its nesting, and what it makes of periodic text."""

import numpy as np
import pariskv_core as pk
import pytest
import torch
from oracle_tail import Tournament, sampled
from support import assert_same_bits, make_config, randn_kv, randn_q, randn_step

ROWS = 32


@pytest.mark.parametrize(("begin", "rows"), [(4, 16), (0, 32), (61, 50)])
def test_a_tail_is_nested_in_that_of_a_shorter_zone(begin, rows):
    tournament = Tournament(9000)
    level, drawn = tournament.of(begin, begin + 1, rows)
    for end in range(begin + 2, 9000, 7):
        next_level, found = tournament.of(begin, end, rows)
        assert next_level in (level, level + 1)
        assert len(found) <= 2 * rows and len(found) >= min(rows, end - begin)
        older = found[found < end - 7]
        assert np.isin(older, drawn).all()
        if next_level == level:
            assert len(older) == len(drawn) or (found[: len(drawn)] == drawn).all()
        level, drawn = next_level, found


def test_every_position_has_the_same_chance():
    seeds, end = 4000, 512
    for level in (1, 4, 7):  # 7: coins of two hashes
        size = 1 << level
        times = np.zeros(end)
        for seed in range(seeds):
            times[Tournament(end, seed).rows(level)[: end // size]] += 1
        chance = 1 / size
        off = np.abs(times - seeds * chance) / np.sqrt(seeds * chance * (1 - chance))
        assert (off > 3).mean() < 0.01  # .0027 by chance
        assert off.max() < 4.5
        assert 0.85 < np.square(off).mean() < 1.15


def test_neighbours_are_drawn_apart_from_one_another():
    """Places in two intervals, over seeds: as often together as chance has it."""
    seeds, level = 4000, 3
    drawn = np.array([Tournament(256, seed).rows(level)[:32] % 8 for seed in range(seeds)])
    for a, b in [(0, 1), (2, 3), (3, 4), (0, 16), (7, 8), (15, 31)]:
        both = np.histogram2d(drawn[:, a], drawn[:, b], bins=8)[0]
        expected = seeds / 64
        assert np.square(both - expected).sum() / expected < 63 + 4 * np.sqrt(2 * 63)


def errors(shares, values, columns):
    """Squared distances of outputs from that of all keys, for samples of columns."""
    counts = np.stack([np.bincount(drawn, minlength=len(shares)) for drawn in columns]) * shares
    outs = counts @ values / counts.sum(axis=1, keepdims=True)
    return np.square(outs - shares @ values / shares.sum()).sum(axis=1)


@pytest.mark.parametrize("level", [3, 5, 8])
def test_periods_are_estimated_as_well_as_chance_has_it(level, rng):
    """Text whose lines have 2 to 130 tokens: each column has a key and a value of its own."""
    rows, seeds = 512, 40
    positions = rows << level
    drawn = [Tournament(positions, seed).rows(level)[:rows] for seed in range(seeds)]
    anywhere = [rng.choice(positions, rows, replace=False) for _ in range(seeds)]
    evenly = [np.arange(at, positions, 1 << level) for at in range(0, 1 << level, 2)]
    off = []
    for period in range(2, 131):
        shares, values = np.exp(rng.standard_normal(period)), rng.standard_normal((period, 8))
        samples = (drawn, anywhere, evenly)
        columns = [[each % period for each in sample] for sample in samples]
        off.append([errors(shares, values, each).mean() for each in columns])
    by_draw, by_chance, by_stride = np.sqrt(off).T
    assert np.sqrt(np.mean((by_draw / by_chance) ** 2)) < 1.05
    assert (by_draw / by_chance).max() < 1.5
    assert (by_stride / by_chance).max() > 4  # lines of as many tokens as the stride, for one


def test_sums_are_right_on_average():
    """Over seeds, for attention that only a few rows get."""
    begin, end, rows = 4, 1500, 32
    rng = np.random.default_rng(3)
    shares = np.exp(2 * rng.standard_normal(end))
    sums = []
    for seed in range(3000):
        drawn = sampled(begin, end, rows, seed)
        sums.append(shares[drawn].sum() * (end - begin) / len(drawn))
    exact, spread = shares[begin:end].sum(), np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - exact) < 3 * spread


class Walk:
    """A sequence that grows, is cut, forked, saved and loaded; and all of its rows."""

    def __init__(self, config: pk.Config, seed: int, path):
        self.config, self.path, self.rng = config, path, np.random.default_rng(seed)
        self.cache = pk.Cache(config)
        self.s = self.cache.add()
        self.k, self.v = randn_kv(self.rng, 700, config)
        self.cache.prefill(0, [self.s], self.k, self.v)

    def append(self, k, v):
        self.k, self.v = torch.cat([self.k, k]), torch.cat([self.v, v])

    def step(self):
        deed = self.rng.choice(["prefill", "decode", "cut", "fork", "save"])
        if deed == "prefill":
            k, v = randn_kv(self.rng, int(self.rng.integers(1, 900)), self.config)
            self.cache.prefill(0, [self.s], k, v)
            self.append(k, v)
        elif deed == "decode":
            for _ in range(int(self.rng.integers(1, 80))):
                q, k, v = randn_step(self.rng, 1, self.config)
                self.cache.decode(0, [self.s], q, k, v)
                self.append(k, v)
        elif deed == "cut":
            keep = int(self.rng.integers(600, len(self.k) + 1))
            self.cache.truncate([self.s], keep=keep)
            self.k, self.v = self.k[:keep], self.v[:keep]
        elif deed == "fork":
            old, self.s = self.s, self.cache.fork(self.s)
            if self.rng.random() < 0.5:
                self.cache.remove(old)
        else:
            self.cache.save(self.s, self.path)
            self.cache.remove(self.s)
            self.s = self.cache.load(self.path)

    def check(self):
        """The bits of a sequence that got the same rows at once."""
        fresh = pk.Cache(self.config)
        s = fresh.add()
        fresh.prefill(0, [s], self.k, self.v)
        for cache, own in ((self.cache, self.s), (fresh, s)):
            cache.flush([own])
        assert str(self.cache.regions(self.s)) == str(fresh.regions(s))
        q = randn_q(self.rng, 1, self.config)
        mine = self.cache.decode(0, [self.s], q, return_lse=True)
        for a, b in zip(mine, fresh.decode(0, [s], q, return_lse=True), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("seed", range(4))
def test_any_walk_leads_to_the_same_rows(seed, tmp_path, device):
    config = make_config(block=64, tail="sample", tail_rows=ROWS, segment_tokens=256, device=device)
    walk = Walk(config, seed, tmp_path / "walk")
    for _ in range(14):
        walk.step()
        walk.check()


def test_another_seed_draws_other_rows(device):
    lse = {}
    for seed in (1, 2):
        config = make_config(
            block=64, tail="sample", tail_rows=ROWS, seed=seed, dtype="float32", device=device
        )
        cache, rng = pk.Cache(config), np.random.default_rng(0)
        s = cache.add()
        cache.prefill(0, [s], *randn_kv(rng, 1500, config))
        lse[seed] = cache.decode(0, [s], randn_q(rng, 1, config), return_lse=True)[1]
    assert not torch.allclose(lse[1], lse[2], atol=1e-3)
