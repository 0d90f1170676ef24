"""Does it find what matters? On keys with structure, against the best that exact scores can do."""

import functools

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import workload
from support import config_of, current_device, f64, tensor

SPEC = workload.Spec(tokens=16_384, steps=12)
TOP_K = 100


def measured(scorer: str, group_rule: str, ratio: float, outliers: bool) -> dict[str, np.ndarray]:
    """Per step and kv head: recall, share of the best rows' attention mass, needle found."""
    return measured_on(current_device(), scorer, group_rule, ratio, outliers)


@functools.cache
def measured_on(
    device: str, scorer: str, group_rule: str, ratio: float, outliers: bool
) -> dict[str, np.ndarray]:
    spec = workload.Spec(tokens=SPEC.tokens, steps=SPEC.steps, outliers=outliers)
    load = made(outliers)
    config = config_of(
        layers=1,
        query_heads=8,
        kv_heads=2,
        head_dim=128,
        dtype="float32",
        top_k=TOP_K,
        scorer=scorer,
        group_rule=group_rule,
        schedule=[(0, ratio, 0.2)],
        threads=2,
        device=device,
    )
    cache = pk.Cache(config)
    s = cache.add()
    k, v = tensor(load.keys, config), tensor(load.values, config)
    cache.prefill(0, [s], k, v)
    keys = f64(k)
    sink, zone, _, _ = (
        getattr(cache.regions(s), name) for name in ("sink", "retrieval", "local", "buffer")
    )
    found: dict[str, list[float]] = {"recall": [], "share": [], "needle": []}
    for step in range(spec.steps):
        q = tensor(load.queries[step], config)
        chosen = cache.explain(0, s, q).positions
        for head in range(2):
            mass = oracle.group_attention(f64(q)[4 * head : 4 * head + 4], keys[:, head])
            best = sink + np.argsort(-mass[sink : sink + zone], kind="stable")[:TOP_K]
            mine = chosen[head][chosen[head] >= 0]
            found["recall"].append(len(np.intersect1d(mine, best)) / TOP_K)
            found["share"].append(mass[mine].sum() / mass[best].sum())
            found["needle"].append(float(load.planted[step] in mine))
    return {name: np.array(values) for name, values in found.items()}


@functools.cache
def made(outliers: bool) -> workload.Workload:
    return workload.make(workload.Spec(tokens=SPEC.tokens, steps=SPEC.steps, outliers=outliers))


# Outlier channels are hard on signs: a large mean leaves little of the rest in them. What is asked
# there is what was measured, less a little; without them it is what is promised of real keys.
PLAIN, OUTLIERS = False, True


@pytest.mark.parametrize(
    ("ratio", "outliers", "share"),
    [(0.02, PLAIN, 0.95), (0.05, PLAIN, 1.0), (0.1, OUTLIERS, 0.9), (1.0, OUTLIERS, 1.0)],
)
def test_planted_rows_are_found(ratio, outliers, share):
    assert measured("sign_norm", "attention_mass", ratio, outliers)["needle"].mean() >= share


@pytest.mark.parametrize(
    ("ratio", "outliers", "floor"),
    [
        (0.05, PLAIN, 0.92),
        (0.1, PLAIN, 0.96),
        (1.0, PLAIN, 0.99),
        (0.05, OUTLIERS, 0.70),
        (0.1, OUTLIERS, 0.80),
        (1.0, OUTLIERS, 0.97),
    ],
)
def test_the_default_catches_the_mass(ratio, outliers, floor):
    assert measured("sign_norm", "attention_mass", ratio, outliers)["share"].mean() >= floor


@pytest.mark.parametrize(("outliers", "floor"), [(PLAIN, 0.9), (OUTLIERS, 0.75)])
def test_recall_rises_with_candidates(outliers, floor):
    recalls = [
        measured("sign_norm", "attention_mass", ratio, outliers)["recall"].mean()
        for ratio in (0.02, 0.05, 0.1, 1.0)
    ]
    assert (np.diff(recalls) > 0).all()
    # With every row a candidate, what is missing is the estimate's error alone.
    assert recalls[-1] >= floor


@pytest.mark.parametrize("outliers", [PLAIN, OUTLIERS])
@pytest.mark.parametrize("ratio", [0.05, 0.1])
def test_the_default_beats_the_published_setting(ratio, outliers):
    ours = measured("sign_norm", "attention_mass", ratio, outliers)
    theirs = measured("votes", "mean_query", ratio, outliers)
    assert ours["share"].mean() > theirs["share"].mean() + 0.15
    assert ours["recall"].mean() > theirs["recall"].mean() + 0.2


@pytest.mark.parametrize("outliers", [PLAIN, OUTLIERS])
@pytest.mark.parametrize("scorer", ["sign_norm", "votes"])
def test_each_head_having_a_say_beats_the_mean_query(scorer, outliers):
    # Among all rows, so that the rule alone decides.
    mass = measured(scorer, "attention_mass", 1.0, outliers)["share"].mean()
    mean = measured(scorer, "mean_query", 1.0, outliers)["share"].mean()
    assert mass > mean + 0.1


@pytest.mark.cpu("no engine in it")
def test_the_workload_is_one_where_search_matters():
    # If any rows would do, or if one alone did, every test above would be about nothing.
    for outliers in (PLAIN, OUTLIERS):
        load = made(outliers)
        shares = []
        for query in load.queries:
            logits = query[:4] @ load.keys[:, 0].T / np.sqrt(128)
            mass = np.sort(np.exp(logits - oracle.log_sum_exp(logits)[:, None]).mean(axis=0))
            shares.append([mass[-TOP_K:].sum(), mass[-1], np.median(mass) * TOP_K])
        best, needle, any_rows = np.mean(shares, axis=0)
        assert best > 0.3
        assert needle < 0.6 * best
        assert any_rows < 0.05 * best


@pytest.mark.cpu("no engine in it")
def test_the_workload_is_the_same_everywhere():
    again = workload.make(SPEC)
    np.testing.assert_array_equal(again.keys, made(True).keys)
    np.testing.assert_array_equal(again.queries, made(True).queries)


def test_codes_do_not_age(device):
    # Keys that turn round while decoding goes on: what is found among the new is no worse.
    config = config_of(
        layers=1,
        query_heads=4,
        kv_heads=1,
        head_dim=128,
        dtype="float32",
        top_k=TOP_K,
        schedule=[(0, 0.1, 0.2)],
        dense_below=0,
        device=device,
    )
    before = workload.make(workload.Spec(tokens=6000, kv_heads=1, outliers=PLAIN, seed=1))
    after = workload.make(workload.Spec(tokens=6000, kv_heads=1, outliers=PLAIN, seed=2))
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], tensor(before.keys, config), tensor(before.values, config))
    turned = -after.keys  # another basis, another mean
    for begin in range(0, 6000, 500):
        chunk = slice(begin, begin + 500)
        cache.prefill(0, [s], tensor(turned[chunk], config), tensor(after.values[chunk], config))
    keys = np.concatenate([before.keys, turned])[4 : 12_000 - 256, 0]
    shares = {}
    for name, queries in (("old", before.queries), ("new", -after.queries)):
        found = []
        for query in queries:
            chosen = cache.explain(0, s, tensor(query, config)).positions[0]
            logits = query @ keys.T / np.sqrt(128)
            mass = np.exp(logits - oracle.log_sum_exp(logits)[:, None]).mean(axis=0)
            best = 4 + np.argsort(-mass)[:TOP_K]
            found.append(mass[chosen - 4].sum() / mass[best - 4].sum())
        shares[name] = np.mean(found)
    assert abs(shares["old"] - shares["new"]) < 0.05
    assert min(shares.values()) > 0.9
