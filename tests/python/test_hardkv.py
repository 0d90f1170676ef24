"""HARD-KV: the rows that are kept, against the oracle, and what a step attends to."""

import copy
import json
import pickle
import subprocess
import sys

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from oracle_hardkv import Model, Query
from support import (
    ARITHMETIC,
    HERE,
    LEVELS,
    ROUNDING,
    child_environment,
    f64,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    tensor,
)

pytestmark = pytest.mark.cpu("the CUDA backend has no code for HardKV yet")


def make_config(policy: pk.HardKV | None = None, **changes) -> pk.Config:
    fields = {
        "layers": 1,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "value_dim": 64,
        "dtype": "float32",
        "sink": 4,
        "local": 16,
        "update": 24,
        "dense_below": 0,
        "policy": policy or pk.HardKV(most=24),
        "segment_tokens": 64,
        "threads": 2,
    }
    return pk.Config(**{**fields, **changes})


def f32(array: torch.Tensor) -> np.ndarray:
    return array.float().numpy()


def kept_of(positions: np.ndarray) -> list[list[int]]:
    return [[int(p) for p in head if p >= 0] for head in positions]


class Life:
    """A sequence and its model, which have everything done to both of them."""

    def __init__(self, config: pk.Config, seed: int = 0, cache: pk.Cache | None = None):
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.cache = cache or pk.Cache(config)
        self.s = self.cache.add()
        self.model = Model(self.cache.config)
        self.values = np.zeros((0, config.kv_heads, config.value_dim))

    def keys(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = randn_kv(self.rng, count, self.cache.config)
        k *= tensor(self.rng.gamma(1, 1, (count, self.config.kv_heads, 1)), self.config)
        self.values = np.concatenate([self.values, f32(v)])
        return k, v

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        return self.model.k.astype(np.float64), self.values

    def prefill(self, count: int, queries: bool = True, **options) -> None:
        k, v = self.keys(count)
        q = randn_q(self.rng, count, self.config) if queries else None
        self.cache.prefill(0, [self.s], k, v, q=q, **options)
        asked = [Query(row, **options) for row in f32(q)] if queries else None
        self.model.prefill(f32(k), asked)

    def attend(self, count: int, **options) -> None:
        q, (k, v) = randn_q(self.rng, count, self.config), self.keys(count)
        out = self.cache.attend(0, [self.s], q, k=k, v=v, **options)
        self.model.attend(f32(k), [Query(row, **options) for row in f32(q)])
        logits = oracle.Logits(options.get("scale"), options.get("softcap", 0.0))
        expected, _ = oracle.causal_attention(f64(q), *self.rows(), logits)
        self.close(out, expected)

    def decode(self, **options) -> None:
        q, (k, v) = randn_q(self.rng, 1, self.config), self.keys(1)
        out, lse = self.cache.decode(0, [self.s], q, k, v, return_lse=True, **options)
        self.model.decode(f32(k), Query(f32(q)[0], **options))
        logits = oracle.Logits(options.get("scale"), options.get("softcap", 0.0))
        expected, totals = oracle.attention_over(
            f64(q)[0], *self.rows(), self.model.attended(), logits
        )
        self.close(out[0], expected)
        np.testing.assert_allclose(f64(lse)[0], totals, rtol=1e-5, atol=1e-4)

    def flush(self) -> None:
        self.cache.flush([self.s])
        self.model.flush()

    def truncate(self, count: int) -> None:
        count = min(count, len(self.model.k))
        self.cache.truncate([self.s], drop=count)
        self.model.truncate(count)
        self.values = self.values[: len(self.model.k)]

    def fork(self) -> "Life":
        twin = copy.copy(self)
        twin.s, twin.model = self.cache.fork(self.s), self.model.copy()
        twin.rng = np.random.default_rng(int(self.rng.integers(2**31)))
        return twin

    def close(self, out: torch.Tensor, expected: np.ndarray) -> None:
        # The sums of a step are floats; a weight that 16 bits round differs by a unit or two.
        allowed = ROUNDING[self.config.dtype] * np.abs(expected) + 20 * ARITHMETIC
        assert (np.abs(f64(out) - expected) <= allowed).all()

    def kept(self) -> tuple[list[list[int]], list[list[int]]]:
        q = randn_q(self.rng, 1, self.config)[0]
        explanation = self.cache.explain(0, self.s, q)
        assert not explanation.searched
        if explanation.details is None:
            assert explanation.kept.size == 0
            return [], []
        assert isinstance(explanation.details, pk.HardKVExplanation)
        return kept_of(explanation.kept), kept_of(explanation.details.held)

    def check(self) -> None:
        assert regions_of(self.cache, self.s) == self.model.regions.counts()
        for stored, given in zip(rows_of(self.cache, self.s), self.rows(), strict=True):
            assert np.array_equal(f32(stored), given)
        kept, held = self.kept()
        heads = self.model.heads or []
        if len(self.model.k) < self.cache.config.dense_below:
            heads = []
        assert kept == [head.kept for head in heads]
        assert held == [sorted(head.held) for head in heads]


POLICIES = {
    "fixed": pk.HardKV(most=16, p=1.0, metric="attention", patience=0),
    "fixed and pooled": pk.HardKV(most=16, p=1.0, metric="snapkv", pool=5),
    "by attention": pk.HardKV(most=20, p=0.6, metric="attention"),
    "at least": pk.HardKV(most=20, p=0.3, least=6, metric="snapkv", pool=7),
    "patient": pk.HardKV(most=12, p=0.5, metric="snapkv", pool=3, patience=3),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_a_random_life_keeps_what_the_oracle_keeps(policy, seed):
    config = make_config(policy, dense_below=[0, 90][seed % 2])
    lives = [Life(config, seed)]
    rng = np.random.default_rng(1000 + seed)
    options = [{}, {"scale": 0.5}, {"softcap": 2.0}, {"scale": 0.07, "softcap": 5.0}]
    for step in range(40):
        life = lives[rng.integers(len(lives))]
        some = options[rng.integers(4)]
        deed = rng.integers(12)
        if step == 0 or deed == 0:
            life.prefill(int(rng.integers(1, 120)), queries=bool(rng.integers(4)), **some)
        elif deed <= 6:
            for _ in range(rng.integers(1, 30)):
                life.decode(**some)
        elif deed == 7:
            life.attend(int(rng.integers(1, 60)), **some)
        elif deed == 8:
            life.flush()
        elif deed == 9 and len(lives) < 4:
            lives.append(life.fork())
        else:
            life.truncate(int(rng.integers(1, [8, 40, 90][rng.integers(3)])))
        for each in lives:
            each.check()
    assert sum(life.model.keeps for life in lives) > 5
    assert lives[0].cache.stats().keeps > 5


SHAPES = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "head_dim 80": {"head_dim": 80, "value_dim": 80},
    "head_dim 192 of 128": {"head_dim": 192, "value_dim": 128, "dtype": "bfloat16"},
    "head_dim 512": {"head_dim": 512, "value_dim": 64},
    "one query head each": {"query_heads": 2},
    "group of 16": {"query_heads": 32},
    "one kv head": {"query_heads": 33, "kv_heads": 1},
    "many kv heads": {"query_heads": 24, "kv_heads": 24},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_keeps_what_the_oracle_keeps(changes):
    life = Life(make_config(pk.HardKV(most=20, p=0.7, pool=3), **changes), 7)
    life.prefill(150)
    life.check()
    for _ in range(60):
        life.decode()
    life.check()
    assert life.model.keeps == 3


def test_defaults_and_regions_are_the_papers():
    policy = pk.HardKV()
    assert (policy.most, policy.p, policy.least) == (2048, 0.9, 0)
    assert (policy.metric, policy.pool, policy.patience) == ("snapkv", 7, 1)
    with pk.Cache(make_config(policy, sink=-1, local=-1, update=-1, dense_below=-1)) as cache:
        config = cache.config
        assert (config.sink, config.local, config.update) == (4, 32, 128)
        assert config.dense_below == 0


CHANGED = {"most": 7, "p": 0.25, "least": 3, "metric": "attention", "pool": 1, "patience": 0}


@pytest.mark.parametrize("field", CHANGED)
def test_settings_print_compare_copy_and_pickle(field):
    policy = pk.HardKV(**CHANGED)
    assert getattr(policy, field) == CHANGED[field]
    config = make_config(policy)
    for twin in (
        eval(repr(policy), {"HardKV": pk.HardKV}),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        pickle.loads(pickle.dumps(config)).policy,
        policy.replace(),
    ):
        assert twin == policy
        assert hash(twin) == hash(policy)
    other = policy.replace(**{field: getattr(pk.HardKV(), field)})
    assert other != policy
    assert config.replace(policy=other) != config
    assert policy != pk.ParisKV()


REFUSED = {
    "most": ({"most": 0}, "policy.most: expected 1 to 8388608, got 0"),
    "p of nothing": ({"p": 0.0}, "policy.p: expected a share above 0 and at most 1, got 0"),
    "p above one": ({"p": 1.5}, "policy.p: expected a share above 0 and at most 1, got 1.5"),
    "p that is no number": ({"p": float("nan")}, "policy.p: expected a share above 0"),
    "least above most": (
        {"most": 5, "least": 6},
        r"policy.least: expected 0 to policy.most \(5\), got 6",
    ),
    "negative least": ({"least": -1}, "policy.least: expected 0 to policy.most"),
    "even pool": ({"pool": 6}, "policy.pool: expected an odd number of neighbours, 1 to 63, got 6"),
    "huge pool": ({"pool": 65}, "policy.pool: expected an odd number of neighbours"),
    "patience": ({"patience": 16}, "policy.patience: expected 0 to 15, got 16"),
    "metric": ({"metric": "rkv"}, 'policy.metric: expected "attention" or "snapkv", got "rkv"'),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pk.HardKV(**settings)


def test_a_local_window_of_none_is_refused():
    with pytest.raises(ValueError, match="local: expected 1 token or more with the policy HardKV"):
        make_config(local=0)


def test_a_gpu_is_refused_when_the_cache_is_made():
    config = make_config(device="cuda")
    with pytest.raises(ValueError, match=r"device: expected cpu with the policy HardKV.*cuda:0"):
        pk.Cache(config)


def test_one_that_keeps_everything_is_dense():
    """Without a limit the zone is attended to in full, and no copies are made."""
    life = Life(make_config(pk.HardKV(most=500, p=1.0)))
    life.prefill(300)
    for _ in range(30):
        life.decode()
    assert life.kept() == ([], [])
    assert life.cache.stats().kept_rows == 0


def test_a_prompt_without_queries_is_attended_to_in_full_until_a_flush():
    life = Life(make_config())
    life.prefill(200, queries=False)
    life.check()
    assert life.kept() == ([], [])
    for _ in range(24):
        life.decode()
    life.check()
    assert len(life.kept()[0]) == 2


def test_counts_follow_the_attention_and_stay_within_their_bounds():
    """A head that spreads its attention keeps `most`, a head with one key that matters keeps it."""
    config = make_config(pk.HardKV(most=40, p=0.9, metric="attention"), query_heads=2)
    rng = np.random.default_rng(1)
    k, v = randn_kv(rng, 200, config)
    q = torch.ones(200, 2, 64)
    k[:, 0] *= 1e-3
    k[:, 1] *= 1e-3
    k[77, 1] = 10.0
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=q)
    kept = kept_of(cache.explain(0, s, q[0]).kept)
    assert [len(head) for head in kept] == [40, 1]
    assert kept[1] == [77]
    assert cache.stats().kept_rows == 41


def test_the_count_is_the_attentions_and_the_order_the_metrics():
    """The brief's example (A9): three rows hold .9 of the attention, pooled or not."""
    z = np.array([4, 0, 1, 3, -1, 0.5, 2, 0])
    config = make_config(
        pk.HardKV(most=8, p=0.9, metric="attention"), query_heads=1, kv_heads=1, sink=0, local=1
    )
    kept = {}
    for metric in ("attention", "snapkv"):
        rows = torch.zeros(9, 1, 64)
        rows[:8, 0, 0] = torch.tensor(z)
        q = torch.full((9, 1, 64), torch.nan)
        q[8] = 0.0  # the one that has a say: with the scale of 1 / 8, its logits are z
        q[8, 0, 0] = 8.0
        cache = pk.Cache(config.replace(policy=pk.HardKV(most=8, p=0.9, metric=metric, pool=3)))
        s = cache.add()
        cache.prefill(0, [s], rows, rows, q=q)
        kept[metric] = kept_of(cache.explain(0, s, q[8]).kept)[0]
    assert kept["attention"] == [0, 3, 6]
    # Pooled by 3 the best are the neighbours of 0, then those of 3, the first of which is 2.
    assert kept["snapkv"] == [0, 1, 2]


def test_a_prompt_in_chunks_keeps_what_a_prompt_in_one_piece_keeps():
    config = make_config(pk.HardKV(most=20, p=0.8))
    rng = np.random.default_rng(3)
    k, v = randn_kv(rng, 300, config)
    q = randn_q(rng, 300, config)
    found = []
    for cuts in ([], [100], [17, 200, 268]):
        cache = pk.Cache(config)
        s = cache.add()
        for part in torch.arange(300).tensor_split(cuts):
            cache.prefill(0, [s], k[part], v[part], q=q[part])
        explanation = cache.explain(0, s, q[0])
        found.append((kept_of(explanation.kept), kept_of(explanation.details.held)))
    assert found[0] == found[1] == found[2]


def test_a_row_that_is_held_comes_back():
    """Keys are axes, and queries ask for one axis at a time."""
    config = make_config(
        pk.HardKV(most=2, p=1.0, metric="attention", patience=1),
        query_heads=1,
        kv_heads=1,
        sink=0,
        local=1,
        update=32,
    )
    cache = pk.Cache(config)
    s = cache.add()
    axes = 4 * torch.eye(64)[:, None]

    def kept() -> tuple[list[int], list[int]]:
        explanation = cache.explain(0, s, axes[0])
        return kept_of(explanation.kept)[0], kept_of(explanation.details.held)[0]

    def ask(*wanted: int) -> None:
        for _ in range(32):
            q = sum(axes[w] for w in wanted)
            cache.decode(0, [s], q[None], -axes[60:61], axes[60:61])

    cache.prefill(0, [s], axes[:40], axes[:40], q=axes[[5] * 40] + axes[[9] * 40])
    assert kept() == ([5, 9], [])
    ask(5, 20)  # 20 was forgotten with the prompt's choice; a newcomer that gets least comes in
    first, held = kept()
    assert 5 in first
    assert 9 in first + held
    ask(5, 9)
    assert kept()[0] == [5, 9]


def test_a_query_that_is_not_finite_has_no_say(rng):
    config = make_config(pk.HardKV(most=10, p=1.0, metric="attention"))
    k, v = randn_kv(rng, 100, config)
    q = randn_q(rng, 100, config)
    bad = q.clone()
    bad[80, 0, 3] = np.nan
    bad[81, 1] = np.inf
    model = Model(pk.Cache(config).config)
    model.prefill(f32(k), [Query(row) for row in f32(bad)])
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=bad)
    assert kept_of(cache.explain(0, s, q[0]).kept) == [head.kept for head in model.heads]
    # None with a say: the latest rows of the zone, which ends at 84.
    nothing = torch.full_like(q, np.nan)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=nothing)
    assert kept_of(cache.explain(0, s, q[0]).kept) == [list(range(74, 84))] * 2


def test_whole_numbers_cost_next_to_none_of_the_attention(rng):
    """The kept rows get what the best ones in doubles get, within .002."""
    config = make_config(pk.HardKV(most=100, p=1.0, metric="attention"), head_dim=128)
    k, v = randn_kv(rng, 1000, config)
    q = 1.5 * randn_q(rng, 1000, config)
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=q)
    begin, end = 4, 4 + cache.regions(s).retrieval
    for head, kept in enumerate(kept_of(cache.explain(0, s, q[0]).kept)):
        group = f64(q[-32:, 2 * head : 2 * head + 2])
        logits = np.einsum("qgd,kd->qgk", group, f64(k[begin:end, head])) / np.sqrt(128)
        logits = logits.max(axis=1)
        shares = np.exp(logits - oracle.log_sum_exp(logits)[:, None]).mean(axis=0)
        best = np.sort(shares)[-100:].sum()
        assert shares[np.array(kept) - begin].sum() >= 0.998 * best


def test_a_key_that_is_not_finite_is_never_kept(rng):
    config = make_config(pk.HardKV(most=70, p=1.0))
    k, v = randn_kv(rng, 100, config)
    k[20:60, 0, 5] = np.inf
    k[30, 1, 0] = np.nan
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=randn_q(rng, 100, config))
    first, second = kept_of(cache.explain(0, s, randn_q(rng, 1, config)[0]).kept)
    assert first == [*range(4, 20), *range(60, 84)]
    assert len(second) == 70
    assert 30 not in second


def test_a_step_that_appends_nothing_and_an_explanation_ask_nothing(rng):
    """Layers that share rows attend with queries of their own: these do not count."""
    config = make_config()
    one, other = Life(config, 5), Life(config, 5)
    for life in (one, other):
        life.prefill(100)
        for _ in range(10):
            life.decode()
    for _ in range(40):
        one.cache.decode(0, [one.s], randn_q(rng, 1, config))
        one.cache.explain(0, one.s, randn_q(rng, 1, config)[0])
    for life in (one, other):
        for _ in range(20):
            life.decode()
        life.check()
    assert one.kept() == other.kept()


def test_a_batch_keeps_what_each_keeps_alone(rng):
    config = make_config(pk.HardKV(most=16, p=0.8))
    lengths = [1, 30, 200, 77, 0, 140]
    k, v = randn_kv(rng, sum(lengths), config)
    q = randn_q(rng, sum(lengths), config)
    together = pk.Cache(config)
    batch = [together.add() for _ in lengths]
    together.prefill(0, batch, k, v, lengths, q=q)
    alone, at = [], 0
    for length in lengths:
        cache = pk.Cache(config)
        part = slice(at, at + length)
        alone.append((cache, cache.add()))
        cache.prefill(0, [alone[-1][1]], k[part], v[part], q=q[part])
        at += length
    for _ in range(50):
        step = randn_step(rng, len(lengths), config)
        out = together.decode(0, batch, *step)
        for i, (cache, s) in enumerate(alone):
            assert torch.equal(out[i : i + 1], cache.decode(0, [s], *(x[i : i + 1] for x in step)))
    for mine, (cache, s) in zip(batch, alone, strict=True):
        a, b = together.explain(0, mine, step[0][0]), cache.explain(0, s, step[0][0])
        assert np.array_equal(a.kept, b.kept)
        assert np.array_equal(a.details.held, b.details.held)


def test_a_beam_takes_what_is_kept_along(rng):
    life = Life(make_config(), 2)
    life.prefill(150)
    other = Life(life.config, 3, life.cache)
    other.prefill(90)
    life.cache.reorder([life.s, other.s], [1, 1])
    other.check()
    life.model, life.values = other.model.copy(), other.values
    life.check()
    for each in (life, other):
        for _ in range(30):
            each.decode()
        each.check()


def test_forks_share_what_is_kept_until_one_chooses_anew():
    life = Life(make_config(pk.HardKV(most=20, p=1.0)))
    life.prefill(200)
    stats = life.cache.stats()
    assert (stats.kept_rows, stats.keeps) == (40, 1)
    ring = 32 * (8 + 4 * (64 + 8))
    assert stats.kept_bytes > ring + 40 * 512
    twin = life.fork()
    shared = life.cache.stats()
    assert shared.kept_rows == 80
    assert shared.kept_bytes < stats.kept_bytes + 2 * ring
    for _ in range(24):
        twin.decode()
    twin.check()
    life.check()
    assert life.cache.stats().kept_bytes > shared.kept_bytes + 40 * 512
    life.cache.remove(life.s)
    life.cache.remove(twin.s)
    empty = life.cache.stats()
    assert (empty.kept_rows, empty.kept_bytes) == (0, 0)


def test_levels_and_threads_do_not_show():
    script = HERE / "kept_digest.py"
    found = {}
    for level in LEVELS:
        for threads in (1, 3):
            done = subprocess.run(
                [sys.executable, str(script), str(threads)],
                env=child_environment(PARISKV_CPU_LEVEL=level),
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            if "PARISKV_CPU_LEVEL" in done.stderr:
                continue  # this machine lacks the instructions
            assert done.returncode == 0, done.stderr
            found[level, threads] = json.loads(done.stdout)
    assert len(found) >= 2
    assert len({json.dumps(each) for each in found.values()}) == 1
