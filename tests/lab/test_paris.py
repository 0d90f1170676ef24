"""The lab's engine is the engine, and its copy in torch does what the engine does."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from quality import codec
from quality.methods import make_method
from quality.paris import PUBLISHED_SCHEDULE, TIERS, Engine, Paris, published
from quality.workloads import Spec, make
from support import assert_same_bits, config_of

ROWS, RATIO = 50, 0.05
SEED = 42


@pytest.fixture(scope="module")
def scene():
    """Queries (steps, group, dim), zone keys, what is resident (steps, group)."""
    load = make(Spec(tokens=6000, steps=6))
    queries, keys = torch.from_numpy(load.asks[0].queries), torch.from_numpy(load.keys)
    resident = torch.logsumexp(queries @ keys[:4].T / math.sqrt(128), dim=-1)
    return queries, keys[4:].contiguous(), resident


def summary(keys: torch.Tensor) -> oracle.Summary:
    return oracle.encode(keys.double().numpy(), oracle.rotation_signs(128, SEED))


# --- The real one --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["engine", "published"])
def test_explain_shows_the_selected_rows(scene, name):
    queries, keys, resident = scene
    engine = make_method(name, candidates=RATIO)
    engine.prefill(keys, None)
    chosen = engine.select(queries, ROWS, resident)
    assert chosen.shape == (len(queries), ROWS)
    # Beside it, a cache of our own that holds resident rows: sinks whose log-sum-exp is that one.
    config = config_of(
        layers=1,
        query_heads=4,
        kv_heads=1,
        head_dim=128,
        dtype="float32",
        sink=4,
        local=0,
        dense_below=0,
        top_k=ROWS,
        schedule=[(0, RATIO, 0.2)],
        block=0,
        tail="none",
        scorer="sign_norm" if name == "engine" else "votes",
        group_rule="attention_mass" if name == "engine" else "mean_query",
    )
    load = torch.from_numpy(make(Spec(tokens=6000, steps=6)).keys)[:, None].contiguous()
    with pk.Cache(config) as cache:
        s = cache.add()
        cache.prefill(0, [s], load, load)
        for step, query in enumerate(queries):
            why = cache.explain(0, s, query)
            assert why.searched and why.zone_begin == 4
            np.testing.assert_array_equal(chosen[step].numpy(), why.positions[0] - 4)


def test_appended_keys_are_searched_like_prompt_keys(scene):
    queries, keys, resident = scene
    grown, whole = make_method("engine"), make_method("engine")
    grown.prefill(keys[:4000], None)
    grown.select(queries, ROWS, resident)  # the cache is there by now
    grown.append(keys[4000:5500])
    grown.append(keys[5500:])
    whole.prefill(keys, None)
    assert torch.equal(grown.select(queries, ROWS, resident), whole.select(queries, ROWS, resident))


def test_another_budget_is_another_search(scene):
    queries, keys, resident = scene
    engine = Engine(candidates=1.0)
    engine.prefill(keys, None)
    few, many = (engine.select(queries, rows, resident) for rows in (10, 40))
    assert torch.equal(many[:, :10], few)


def test_a_zone_no_larger_than_the_budget_is_taken_whole(scene):
    queries, keys, resident = scene
    engine = Engine()
    engine.prefill(keys[:30], None)
    assert engine.select(queries, 40, resident)[0].tolist() == [*range(30), *[-1] * 10]


def test_the_published_one_is_set_as_published(scene):
    queries, keys, _ = scene
    engine = published()
    engine.prefill(keys, None)
    config = engine.cache(queries.shape[1], 100).config
    assert (config.policy.scorer, config.policy.group_rule) == ("votes", "mean_query")
    assert [tuple(step) for step in config.policy.schedule] == [
        (n, pytest.approx(b), pytest.approx(r)) for n, b, r in PUBLISHED_SCHEDULE
    ]


# --- The copy ------------------------------------------------------------------------------------

RULES = ("attention_mass", "mean_query")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scorer", ["votes", "engine"])
def test_the_torch_copy_finds_the_engines_rows(scene, scorer, rule):
    queries, keys, resident = scene
    copy = Paris(scorer=scorer, group_rule=rule, candidates=RATIO)
    engines = "sign_norm" if scorer == "engine" else scorer
    engine = Engine(candidates=RATIO, scorer=engines, group_rule=rule)
    for method in (copy, engine):
        method.prefill(keys[:5000], None)
        method.append(keys[5000:])
    ours = copy.select(queries, ROWS, resident)
    theirs = engine.select(queries, ROWS, resident)
    # The engine rounds its weights to 8 bits: a row or two at the edge may differ.
    shared = [len(np.intersect1d(a, b)) for a, b in zip(ours, theirs, strict=True)]
    assert min(shared) >= ROWS - 3
    searching = queries.mean(dim=1, keepdim=True) if rule == "mean_query" else queries
    heads = resident[:, : searching.shape[1]]
    coarse = copy.coarse(searching, heads).numpy().astype(np.uint8)
    for step, query in enumerate(queries):
        why = engine.explained(query, ROWS, resident[step])
        assert_same_bits(coarse[step], why.details.coarse[0], "coarse scores")


@pytest.mark.parametrize("scorer", ["standardised", "sign"])
def test_a_standardised_score_has_mean_0_and_spread_1(scene, scorer):
    queries, keys, resident = scene
    copy = Paris(scorer=scorer)
    copy.prefill(keys, None)
    mantissa, exponent = np.frexp(np.linalg.norm(keys.double().numpy(), axis=1))
    norms = np.ldexp(np.floor(mantissa * 32 + 0.5) / 32, exponent)
    norms = norms if scorer == "standardised" else np.ones_like(norms)
    signs = np.where(codec.rotated(keys, SEED).numpy() >= 0, 1.0, -1.0)
    heads = []
    for turned in codec.rotated(queries[0], SEED).double().numpy():
        q = np.rint(turned * 15 / np.abs(turned).max())
        products = (signs @ q) * norms
        spread = np.linalg.norm(q) * np.sqrt((norms**2).mean())
        heads.append((products - products.mean()) / spread)
    expected = np.clip(np.floor(64 + 16 * np.max(heads, axis=0)), 1, 255)
    found = copy.coarse(queries[:1], resident[:1])[0].numpy()
    assert np.abs(found - expected).max() <= 1  # where a norm or a step lies on an edge
    assert (found == expected).mean() > 0.99


def test_its_estimates_are_the_papers(scene):
    queries, keys, _ = scene
    copy = Paris()
    copy.prefill(keys[:300], None)
    signs = oracle.rotation_signs(128, SEED)
    expected = oracle.estimate(summary(keys[:300]), queries[0, 1].double().numpy(), signs)
    found = copy.estimates(queries)[0, 1].numpy()
    # Magnitudes at the edge of two levels may fall to either side.
    assert np.quantile(np.abs(found - expected / math.sqrt(128)), 0.9) < 1e-3
    np.testing.assert_allclose(found, expected / math.sqrt(128), atol=0.3)


def test_alpha_makes_estimates_right_on_the_average(scene):
    # A code is shorter along the true direction than it is long: products come out too small.
    queries, keys, _ = scene
    exact = queries @ keys.T / math.sqrt(128)
    slopes, errors = {}, {}
    for alpha in (True, False):
        copy = Paris(alpha=alpha)
        copy.prefill(keys, None)
        found = copy.estimates(queries)
        slopes[alpha] = ((found * exact).sum() / exact.square().sum()).item()
        errors[alpha] = (found - exact).square().mean().item()
    assert slopes[False] < slopes[True] - 0.001
    assert slopes[True] == pytest.approx(1, abs=0.002)
    assert errors[True] < 0.95 * errors[False]


def test_levels_are_the_engines():
    thresholds, centres = codec.magnitude_levels(8)
    theirs = pk.magnitude_levels()
    np.testing.assert_allclose(thresholds, theirs[0], atol=2e-5)
    np.testing.assert_allclose(centres, theirs[1], rtol=2.0**-11)


@pytest.mark.parametrize("part", [4, 16])
def test_levels_of_parts_are_conditional_means(part, rng):
    thresholds, centres = codec.magnitude_levels(part)
    unit = rng.standard_normal((200_000, part))
    sizes = np.abs(unit / np.linalg.norm(unit, axis=1, keepdims=True)).ravel()
    owner = np.searchsorted(thresholds.numpy(), sizes)
    means = [sizes[owner == level].mean() for level in range(8)]
    np.testing.assert_allclose(centres, means, atol=2e-3)


@pytest.mark.parametrize("part", [4, 8])
def test_a_sign_code_is_the_nearest_centroid(part, rng):
    book = codec.Signs(part)
    rows = torch.from_numpy(rng.standard_normal((50, 128)).astype(np.float32))
    parts = rows.reshape(50, -1, part)
    expected = (parts @ book.centroids[0].T).argmax(dim=-1)
    assert torch.equal(book.codes(rows), expected.T)


def test_a_spherical_codebook_is_of_unit_directions_and_likely_radii(rng):
    book = codec.Sphere(8, directions=64, radii=4, dim=128, seed=1)
    lengths = book.centroids.norm(dim=-1).reshape(4, 64)
    torch.testing.assert_close(lengths, book.radii[:, None].expand(-1, 64))
    unit = rng.standard_normal((4000, 128))
    unit = (unit / np.linalg.norm(unit, axis=1, keepdims=True)).astype(np.float32)
    owner = book.codes(torch.from_numpy(unit)) // 64
    held = torch.bincount(owner.flatten(), minlength=4) / owner.numel()
    assert held.min() > 0.1
    radius = torch.from_numpy(unit).reshape(4000, 16, 8).norm(dim=-1)
    near = (radius[..., None] - book.radii).abs().argmin(dim=-1).T
    assert torch.equal(owner, near)


@pytest.mark.parametrize("tiers", [1, 2, 3, 4, 5, 6])
def test_a_centroid_gets_a_vote_from_every_tier_with_room(scene, tiers):
    queries, keys, _ = scene
    copy = Paris(scorer="votes", tiers=tiers, vote_ratio=0.3)
    copy.prefill(keys[:700], None)
    turned = codec.rotated(queries[0], SEED)
    tables = copy.vote_tables(turned)
    b, head = 5, 2
    counts = np.bincount(copy.codes[b], minlength=256)
    part = turned[head, 8 * b : 8 * b + 8].numpy()
    nearness = copy.codebook.centroids[0].numpy() @ part
    order = np.argsort(-nearness, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    votes = np.zeros(256)
    for tier in TIERS[6 - tiers :]:
        votes[order] += before < math.ceil(700 * 0.3 * tier)
    np.testing.assert_array_equal(tables[b, head].numpy(), votes)
    assert tables.max() == tiers


def test_without_normalising_only_learnt_centroids_differ(scene):
    # A sign pattern is the same at any length; k-means is not.
    queries, keys, resident = scene
    keys = keys * torch.linspace(0.2, 5, len(keys))[:, None]
    for analytic, same in ((True, True), (False, False)):
        found = []
        for normalise in (True, False):
            copy = Paris(scorer="votes", normalise=normalise, analytic=analytic, rerank="none")
            copy.prefill(keys, None)
            found.append(copy.coarse(queries, resident))
        assert torch.equal(*found) == same


def test_learnt_centroids_stay_fixed_after_the_prompt(scene):
    _, keys, _ = scene
    copy = Paris(scorer="votes", analytic=False, part=16, directions=32)
    copy.prefill(keys[:2000], None)
    before = copy.codebook.centroids.clone()
    copy.append(-keys[2000:])
    assert torch.equal(copy.codebook.centroids, before)
    assert copy.codes.shape == (8, len(keys))


def test_rotation_spreads_an_outlier_over_all_dimensions():
    spike = torch.zeros(1, 128)
    spike[0, 7] = 3.0
    turned = codec.rotated(spike, SEED) / math.sqrt(128)
    torch.testing.assert_close(turned.abs(), torch.full((1, 128), 3 / math.sqrt(128)))


def test_an_exact_rerank_of_everything_is_the_oracle(scene):
    queries, keys, resident = scene
    copy = Paris(candidates=1.0, rerank="exact")
    best = make_method("oracle")
    for method in (copy, best):
        method.prefill(keys, None)
    mine, theirs = (m.select(queries, ROWS, resident) for m in (copy, best))
    assert torch.equal(mine.sort(dim=1).values, theirs.sort(dim=1).values)
