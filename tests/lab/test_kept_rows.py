"""PRKV and HARD-KV in torch, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pariskv_core as pk
import pytest
import torch
from quality import kept_rows
from quality.measures import measure
from quality.methods import logits_of, make_method, padded

DIM, GROUP, TOKENS = 32, 2, 400


def chosen_by(method, queries: torch.Tensor, rows: int) -> torch.Tensor:
    return method.select(queries, rows, torch.full(queries.shape[:2], -math.inf))


# --- PRKV ----------------------------------------------------------------------------------------


def test_observed_attention_is_averaged_after_the_softmax():
    """Heads that look at opposite things: their mean query would look at nothing."""
    keys = 2 * torch.tensor([[2.0, 0], [0, 0], [-2, 0], [0, 0]])
    recent = torch.tensor([[[1.0, 0], [-1.0, 0]]]) / math.sqrt(2)
    votes = kept_rows.observed(keys, recent)
    torch.testing.assert_close(votes, torch.tensor([0.395, 0.105, 0.395, 0.105]), atol=1e-3, rtol=0)


def test_without_a_static_part_prkv_is_arkvale(gauss):
    keys, queries = gauss(384, DIM), gauss(5, GROUP, DIM)  # whole pages
    methods = make_method("prkv", static=0.0), make_method("arkvale")
    for method in methods:
        method.prefill(keys, gauss(64, GROUP, DIM))
    ours, theirs = (chosen_by(method, queries, 96).sort(dim=1).values for method in methods)
    assert torch.equal(ours, theirs)


def test_with_nothing_but_a_static_part_it_keeps_what_was_observed(gauss):
    keys, recent = gauss(TOKENS, DIM), gauss(64, GROUP, DIM)
    method = make_method("prkv", static=1.0)
    method.prefill(keys, recent)
    attention = logits_of(recent, keys).softmax(-1).mean(dim=(0, 1))
    chosen = chosen_by(method, gauss(3, GROUP, DIM), 96)
    assert all(set(row.tolist()) == set(attention.topk(96).indices.tolist()) for row in chosen)


@pytest.mark.parametrize("rebuilt", [True, False])
def test_rows_are_static_ones_and_pages_of_the_others(gauss, rebuilt):
    keys, recent = gauss(TOKENS, DIM), gauss(64, GROUP, DIM)
    method = make_method("prkv", static=0.5, page=16, rebuilt=rebuilt)
    method.prefill(keys, recent)
    static = method.is_static(96)
    assert int(static.sum()) == 48
    pages = method.page_of(static)
    scores = method.page_scores(queries := gauss(4, GROUP, DIM), pages, static)
    for row, of_pages in zip(chosen_by(method, queries, 96), scores, strict=True):
        assert len(set(row.tolist())) == 96 and bool(static[row[:48]].all())
        found = row[48:]
        assert not static[found].any()
        assert int(of_pages.argmax()) in pages[found].tolist()
        # Whole pages in the order of their scores; of the last one what there is room for.
        owners = pages[found].unique()
        assert of_pages[owners].min() >= of_pages.topk(len(owners)).values.min()
        if rebuilt:
            assert len(owners) == 3


def test_a_page_is_scored_by_its_live_rows_alone(gauss):
    keys, queries = gauss(64, DIM), gauss(3, GROUP, DIM)
    static = torch.zeros(64, dtype=torch.bool)
    static[5], static[32:] = True, True
    keys[5] = 1e4
    method = make_method("prkv", page=32)
    method.prefill(keys, gauss(64, GROUP, DIM))
    scores = method.page_scores(queries, torch.arange(64) // 32, static)
    live = keys[:32][~static[:32]]
    centre = (live.amin(0) + live.amax(0)) / 2
    away = (live - centre).abs().mean(0)
    expected = (queries @ centre + queries.abs() @ away).mean(dim=1)
    torch.testing.assert_close(scores[:, 0], expected)
    assert (scores[:, 1] == -math.inf).all()


def test_keys_that_come_later_are_found_in_pages(gauss):
    keys, queries = gauss(TOKENS, DIM), gauss(1, GROUP, DIM)
    method = make_method("prkv", static=0.5, page=16)
    method.prefill(keys, gauss(64, GROUP, DIM))
    method.append(10 * queries.mean(dim=1).expand(32, -1))
    assert (chosen_by(method, queries, 64) >= TOKENS).sum() == 32


def test_prkv_without_recent_queries_is_an_error(gauss):
    with pytest.raises(ValueError, match="PRKV chooses by the prompt's last queries"):
        make_method("prkv").prefill(gauss(TOKENS, DIM), None)


def rows_of_the_engine(
    policy: pk.PRKV, keys: torch.Tensor, recent: torch.Tensor, queries: torch.Tensor
) -> torch.Tensor:
    """By a cache of one kv head: the zone's keys, and a window that has the recent queries."""
    tokens, dim = keys.shape
    config = pk.Config(
        layers=1,
        query_heads=GROUP,
        kv_heads=1,
        head_dim=dim,
        dtype="float32",
        sink=0,
        local=len(recent),
        policy=policy,
    )
    k = torch.cat([keys, keys.new_zeros(len(recent), dim)])[:, None].contiguous()
    q = torch.cat([keys.new_zeros(tokens, GROUP, dim), recent]).contiguous()
    with pk.Cache(config) as cache:
        sequence = cache.add()
        cache.prefill(0, [sequence], k, k, q=q)
        found = [cache.explain(0, sequence, step) for step in queries]
    parts = [[part for part in (why.kept, why.positions) if part.size] for why in found]
    rows = [torch.from_numpy(np.concatenate(part, axis=1)) for part in parts]
    return torch.cat([padded(row, policy.budget) for row in rows])


@pytest.mark.parametrize("static", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("loud", [0.0, 20.0])
def test_the_engine_catches_the_share_that_its_copy_in_torch_does(gauss, static, loud):
    """Queries that look for a few directions, whose keys lie together as a text's do."""
    tokens, dim, rows = 2048, 64, 256
    themes = 3 * gauss(24, dim)
    keys = gauss(tokens, dim) + themes[torch.arange(tokens) // 16 % 24]
    keys[:, 5] += loud
    recent = gauss(64, GROUP, dim) + themes[torch.arange(64) % 6, None]
    queries = gauss(40, GROUP, dim) + themes[torch.arange(40) % 8, None]
    resident = torch.full(queries.shape[:2], -math.inf)
    share = {}
    copy = make_method("prkv", static=static, rebuilt=False)
    copy.prefill(keys, recent)
    for name, chosen in {
        "engine": rows_of_the_engine(
            pk.PRKV(budget=rows, static_share=static), keys, recent, queries
        ),
        "torch": copy.select(queries, rows, resident),
    }.items():
        share[name] = measure(queries, keys, chosen, resident).share().mean().item()
    # The last page of the copy is cut where the budget ends, the engine's pages are whole.
    assert share["engine"] == pytest.approx(share["torch"], abs=0.015)
    if static in (0, 1):
        assert share["engine"] == pytest.approx(share["torch"], abs=0.002)


# --- HARD-KV -------------------------------------------------------------------------------------


def test_counts_hold_one_part_of_each_heads_attention():
    heads = [torch.tensor(of).softmax(0) for of in ([4.0, 0, 1, 3, -1, 0.5, 2, 0], [0.0] * 8)]
    masses = [kept_rows.mass_of_most(of) for of in heads]
    assert masses[0][2] == pytest.approx(0.92416, abs=1e-5)
    counts = kept_rows.counts_by_mass(masses, 5)
    assert counts == [2, 7] or counts == [3, 7]  # p is between .84 and .93: the sum is at most 10
    assert sum(counts) <= 10 and counts[0] < counts[1]
    assert kept_rows.counts_by_mass(masses, 5, most=5) == [5, 5]
    assert kept_rows.counts_by_mass(masses, 8) == [8, 8]


def test_neighbours_share_the_largest_logit():
    keys = torch.zeros(20, 4)
    keys[9, 0] = 6.0
    recent = torch.ones(3, GROUP, 4)
    found = kept_rows.pooled(keys, recent)
    assert sorted(found.topk(7).indices.tolist()) == list(range(6, 13))
    assert found.sum() == pytest.approx(1)
