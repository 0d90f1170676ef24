"""HARD-KV: the rows that are kept, against the oracle, and what a step attends to."""

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from hardkv_life import Life, f32, kept_of, make_config, random_life
from oracle_hardkv import Model, Query
from support import ARITHMETIC, f64, randn_kv, randn_q, randn_step

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
    lives = random_life(Life(config, seed), seed, steps=40, prompt=120, turn=60)
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


@pytest.mark.parametrize("seed", range(3))
def test_hostile_rows_and_queries_keep_what_the_oracle_keeps(seed):
    """Zeros, giants, dwarfs, copies, and rows that are no numbers."""
    config = make_config(pk.HardKV(most=40, p=0.9, metric=["attention", "snapkv"][seed % 2]))
    rng = np.random.default_rng(seed)
    model, cache = Model(pk.Cache(config).config), pk.Cache(config)
    s = cache.add()
    for count in (200, 60, 90):
        (k, v), q = randn_kv(rng, count, config), randn_q(rng, count, config)
        for rows in (k, q):
            for factor in (0.0, 1e30, 1e-30, 1e4, 1e-42, np.nan, np.inf):
                rows[torch.from_numpy(rng.random(rows.shape[:2]) < 0.03)] *= factor
        scale = [0.125, 1e20, 1e-20][int(rng.integers(3))]
        cache.prefill(0, [s], k, v, q=q, scale=scale)
        model.prefill(f32(k), [Query(row, scale=scale) for row in f32(q)])
        explanation = cache.explain(0, s, q[0])
        assert kept_of(explanation.kept) == [head.kept for head in model.heads]
        assert kept_of(explanation.details.held) == [sorted(head.held) for head in model.heads]


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


def test_equal_rows_are_kept_from_the_lowest_on():
    config = make_config(pk.HardKV(most=1000, p=0.5, metric="attention"), local=32)
    rows = torch.ones(436, 2, 64)
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], rows, rows, q=torch.ones(436, 4, 64))
    for head in kept_of(cache.explain(0, s, torch.ones(4, 64)).kept):
        assert head == list(range(4, 204))


def test_every_layer_keeps_rows_of_its_own(rng):
    config = make_config(pk.HardKV(most=16, p=0.8), layers=2)
    both = pk.Cache(config)
    s = both.add()
    alone = [pk.Cache(config.replace(layers=1)) for _ in range(2)]
    for layer, cache in enumerate(alone):
        (k, v), q = randn_kv(rng, 150, config), randn_q(rng, 150, config)
        both.prefill(layer, [s], k, v, q=q)
        cache.prefill(0, [cache.add()], k, v, q=q)
    for _ in range(9):
        for layer, cache in enumerate(alone):
            step = randn_step(rng, 1, config)
            expected = cache.decode(0, cache.sequences(), *step)
            assert torch.equal(both.decode(layer, [s], *step), expected)
    for cache in (both, *alone):
        cache.flush()
        cache.truncate(cache.sequences(), drop=30)
    q = randn_q(rng, 1, config)[0]
    found = [both.explain(layer, s, q).kept for layer in range(2)]
    for layer, cache in enumerate(alone):
        assert np.array_equal(found[layer], cache.explain(0, cache.sequences()[0], q).kept)
    assert not np.array_equal(*found)


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


@pytest.mark.parametrize("loud", [0, 20, 100])
def test_whole_numbers_cost_next_to_none_of_the_attention(loud, rng):
    """The kept rows get what the best ones in doubles get, within .002, loud channels or not."""
    policy = pk.HardKV(most=100, p=1.0, metric="attention")
    config = make_config(policy, head_dim=128, local=32)  # so that all queries see all of the zone
    k, v = randn_kv(rng, 1000, config)
    q = 1.5 * randn_q(rng, 1000, config)
    k[..., 7] += loud
    k[..., 90] -= loud / 2
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


def test_queries_are_remembered_before_outputs_take_their_place(rng):
    config = make_config(pk.HardKV(most=30, p=0.7))
    cache, twin = pk.Cache(config), pk.Cache(config)
    s, t = cache.add(), twin.add()
    for _ in range(90):
        q, k, v = randn_step(rng, 1, config)
        out = twin.decode(0, [t], q, k, v)
        cache.decode(0, [s], q, k, v, out=q)
        assert torch.equal(q, out)
    probe = randn_q(rng, 1, config)[0]
    assert np.array_equal(cache.explain(0, s, probe).kept, twin.explain(0, t, probe).kept)


def test_a_cut_that_leaves_no_query_attends_to_the_whole_zone(rng):
    """Queries of the tokens that were cut chose rows among these: of the others none is kept."""
    config = make_config(pk.HardKV(most=64, p=1.0))
    (k, v), q = randn_kv(rng, 4000, config), randn_q(rng, 4000, config)
    k[2000:, :, 0] += 12.0
    q[2000:, :, 0] += 12.0
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=q)
    assert min(min(head) for head in kept_of(cache.explain(0, s, q[-1]).kept)) >= 2000
    cache.truncate([s], keep=1500)
    assert cache.explain(0, s, q[-1]).kept.size == 0
    assert cache.stats().kept_rows == 0
    step = randn_step(rng, 1, config)
    out = cache.decode(0, [s], *step)
    sums = 2e-3 if config.device.startswith("cuda") else 20 * ARITHMETIC
    np.testing.assert_allclose(f64(out), f64(cache.attend(0, [s], step[0])), rtol=0, atol=sums)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_cut_chooses_anew_by_the_queries_that_are_left(policy):
    """As a prompt does that ends where the cut is and brings these queries alone."""
    tokens, cut = 300, 10
    life = Life(make_config(policy), 4)
    rng = np.random.default_rng(4)
    (k, v), q = randn_kv(rng, tokens, life.config), randn_q(rng, tokens, life.config)
    life.cache.prefill(0, [life.s], k, v, q=q)
    life.model.prefill(f32(k), [Query(row) for row in f32(q)])
    life.values = f32(v)
    before = life.kept()
    life.truncate(cut)
    life.check()
    assert life.kept() != before

    cache = pk.Cache(life.config)
    s, unasked, rest = cache.add(), slice(tokens - 32), slice(tokens - 32, tokens - cut)
    cache.prefill(0, [s], k[unasked], v[unasked])
    cache.prefill(0, [s], k[rest], v[rest], q=q[rest])
    explanation = cache.explain(0, s, q[0])
    assert (kept_of(explanation.kept), kept_of(explanation.details.held)) == life.kept()
    for _ in range(5):
        life.decode()


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


def test_blocks_of_a_zone_that_grows_have_few_sizes():
    """A new size is memory that a GPU has to be asked for."""
    life = Life(make_config(pk.HardKV(most=400, p=0.5)))
    life.prefill(200)
    sizes = []
    for _ in range(200):
        life.decode()
        sizes.append(life.cache.stats().kept_bytes)
    assert life.cache.stats().keeps > 8
    assert len(set(sizes)) <= 6
    assert max(sizes) <= 2.6 * min(sizes)
