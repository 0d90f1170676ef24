"""Each peer of the lab against what its own paper says of it."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from quality import peers
from quality.kmeans import kmeans, nearest
from quality.methods import logits_of, make_method

DIM, GROUP = 32, 4


def nothing_resident(queries: torch.Tensor) -> torch.Tensor:
    return torch.full(queries.shape[:2], -math.inf)


def chosen_by(method, queries: torch.Tensor, rows: int) -> torch.Tensor:
    return method.select(queries, rows, nothing_resident(queries))


# --- SnapKV ------------------------------------------------------------------------------------


def test_snapkv_never_changes_after_the_prefill(gauss):
    keys, recent = gauss(300, DIM), gauss(32, GROUP, DIM)
    method = make_method("snapkv")
    method.prefill(keys, recent)
    first = chosen_by(method, gauss(3, GROUP, DIM), 20)
    method.append(gauss(100, DIM))
    later = chosen_by(method, gauss(3, GROUP, DIM), 20)
    assert torch.equal(first, later)
    assert later.max() < 300


def test_snapkv_keeps_observed_keys_and_their_neighbours(gauss):
    keys, recent = gauss(300, DIM), gauss(40, GROUP, DIM)
    # Everybody in the window looks at row 150; what came before the window does not count.
    recent[:32, ..., 0] = recent[32:, ..., 1] = 9
    keys[20, 0] = keys[150, 1] = 9
    method = make_method("snapkv", window=8, smoothing=5)
    method.prefill(keys, recent)
    chosen = chosen_by(method, gauss(1, GROUP, DIM), 5)[0]
    assert sorted(chosen.tolist()) == [148, 149, 150, 151, 152]


def test_snapkv_votes_are_pooled_sums_of_the_windows_attention(gauss):
    keys, recent = gauss(50, DIM), gauss(4, 2, DIM)
    method = peers.SnapKV(window=4, smoothing=3)
    method.prefill(keys, recent)
    attention = torch.softmax(recent @ keys.T / math.sqrt(DIM), dim=-1).sum(dim=(0, 1))
    expected = [attention[max(0, i - 1) : i + 2].mean() for i in range(50)]
    torch.testing.assert_close(method.votes[0], torch.stack(expected))


# --- Pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [64, 70])
def test_quests_page_score_bounds_every_keys_product(gauss, tokens):
    keys, queries = gauss(tokens, DIM), gauss(6, GROUP, DIM)
    quest = peers.Quest(page=16)
    quest.prefill(keys, None)
    scores = quest.page_scores(queries)
    products = queries @ keys.T
    best = torch.stack([part.amax(dim=-1) for part in products.split(16, dim=-1)], dim=-1)
    assert scores.shape == best.shape
    assert (scores >= best - 1e-4).all()
    # The bound is that of the box and no other: its best corner.
    low, high = keys[:16].amin(dim=0), keys[:16].amax(dim=0)
    corner = torch.maximum(queries * low, queries * high).sum(dim=-1)
    torch.testing.assert_close(scores[..., 0], corner)


def test_arkvales_box_is_as_wide_as_the_mean_distance_from_its_centre(gauss):
    keys, queries = gauss(40, DIM), gauss(6, GROUP, DIM)
    method = peers.ArkVale(page=32)
    method.prefill(keys, None)
    for page, inside in enumerate((keys[:32], keys[32:])):
        centre = (inside.amin(dim=0) + inside.amax(dim=0)) / 2
        width = (inside - centre).abs().mean(dim=0)
        corner = torch.maximum(queries * (centre - width), queries * (centre + width)).sum(dim=-1)
        torch.testing.assert_close(method.page_scores(queries)[..., page], corner)


@pytest.mark.parametrize("kind", [peers.Quest, peers.ArkVale])
def test_pages_that_grow_are_pages_that_were_whole(gauss, kind):
    keys, queries = gauss(150, DIM), gauss(6, GROUP, DIM)
    grown, whole = kind(page=16), kind(page=16)
    grown.prefill(keys[:45], None)
    grown.append(keys[45:47])
    grown.append(keys[47:])
    whole.prefill(keys, None)
    torch.testing.assert_close(grown.page_scores(queries), whole.page_scores(queries))


def test_whole_pages_are_fetched_within_the_budget(gauss):
    keys, queries = gauss(70, DIM), gauss(6, GROUP, DIM)
    method = peers.Quest(page=16)
    method.prefill(keys, None)
    chosen = chosen_by(method, queries, 40)
    assert chosen.shape == (6, 40)
    pages = method.page_scores(queries).mean(dim=1).topk(2, dim=1).indices
    for row, best in zip(chosen, pages, strict=True):
        mine = row[row >= 0]
        every = torch.cat([torch.arange(16 * p, min(16 * p + 16, 70)) for p in best.tolist()])
        assert sorted(mine.tolist()) == sorted(every.tolist())
    # All of it, when there is room: the page that is not full ends where the keys do.
    every = chosen_by(method, queries, 80)[0]
    assert sorted(every[every >= 0].tolist()) == list(range(70))


# --- PQCache -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("subspaces", "bits"), [(2, 6), (8, 3)])
def test_the_tables_sum_is_the_product_with_the_reconstructed_key(gauss, subspaces, bits):
    keys, queries = gauss(400, DIM), gauss(5, GROUP, DIM)
    method = peers.PQCache(subspaces, bits)
    method.prefill(keys, None)
    expected = queries @ method.reconstructed().T / math.sqrt(DIM)
    torch.testing.assert_close(method.estimates(queries), expected, atol=1e-5, rtol=1e-5)
    assert method.centroids.shape == (subspaces, 2**bits, DIM // subspaces)


def test_a_keys_codes_are_its_nearest_centroids(gauss):
    keys = gauss(400, DIM)
    method = peers.PQCache(4, 4)
    method.prefill(keys, None)
    method.append(gauss(10, DIM))
    parts = method.keys.reshape(410, 4, -1).transpose(0, 1)
    distances = torch.cdist(parts, method.centroids)
    mine = distances.gather(2, method.codes[..., None])[..., 0]
    torch.testing.assert_close(mine, distances.amin(dim=2))


def test_centroids_are_the_means_of_their_keys(gauss):
    points = gauss(3, 500, 4)
    centres = kmeans(points, 8, seed=1, rounds=100)
    owner = nearest(points, centres)
    for part in range(3):
        for c in range(8):
            mean = points[part][owner[part] == c].mean(dim=0)
            torch.testing.assert_close(centres[part, c], mean, atol=1e-4, rtol=1e-4)


def test_only_the_refreshed_one_learns_from_new_keys(gauss):
    frozen, fresh = make_method("pqcache"), make_method("pqcache", refresh=64)
    keys = gauss(300, DIM)
    for method in (frozen, fresh):
        method.prefill(keys, None)
    before = frozen.centroids.clone()
    elsewhere = gauss(64, DIM) + 30
    for method in (frozen, fresh):
        method.append(elsewhere[:63])
    assert torch.equal(fresh.centroids, before)  # not enough yet
    for method in (frozen, fresh):
        method.append(elsewhere[63:])
    assert torch.equal(frozen.centroids, before)

    def error(method: peers.PQCache) -> float:
        return (method.reconstructed() - method.keys)[300:].norm(dim=1).mean().item()

    assert error(fresh) < 0.2 * error(frozen)


def test_a_group_adds_up_its_heads_softmax(gauss):
    keys, queries = gauss(300, DIM), 3 * gauss(5, GROUP, DIM)
    method = make_method("pqcache")
    method.prefill(keys, None)
    shares = torch.softmax(queries @ method.reconstructed().T / math.sqrt(DIM), dim=-1)
    best = shares.sum(dim=1).topk(10, dim=1)
    mine = shares.sum(dim=1).gather(1, chosen_by(method, queries, 10))
    torch.testing.assert_close(mine, best.values)


# --- MagicPIG ------------------------------------------------------------------------------------


def test_buckets_collide_as_often_as_the_angle_says(gauss):
    # SimHash: one bit agrees with probability 1 - angle / pi, a bucket of several with its power.
    method = peers.MagicPIG(bits=4, tables=4000)
    key, other = gauss(1, DIM), gauss(1, DIM)
    method.prefill(torch.cat([key, -key]), None)  # their mean is nothing
    for mix in (0.0, 0.5, 2.0):
        query = key + mix * other
        cosine = torch.cosine_similarity(key, query)[0].item()
        expected = (1 - math.acos(min(cosine, 1.0)) / math.pi) ** 4
        rate = method.collisions(query[None])[0, 0, 0].item() / 4000
        assert rate == pytest.approx(expected, abs=0.035)


def test_two_collisions_make_a_sample(gauss):
    keys, queries = gauss(500, DIM), gauss(3, GROUP, DIM)
    method = peers.MagicPIG(bits=6, tables=20)
    method.prefill(keys, None)
    counts = method.collisions(queries)
    sampled = (counts >= 2).any(dim=1)
    for row, there in zip(chosen_by(method, queries, 500), sampled, strict=True):
        assert sorted(row[row >= 0].tolist()) == there.nonzero()[:, 0].tolist()
    assert (counts == 1).any() and not sampled.all()


def test_within_a_budget_keys_with_most_collisions_come_first(gauss):
    keys, queries = gauss(500, DIM), gauss(3, GROUP, DIM)
    method = make_method("magicpig", bits=4, tables=40)
    method.prefill(keys, None)
    counts = method.collisions(queries)
    total = torch.where(counts >= 2, counts, 0).sum(dim=1)
    mine = total.gather(1, chosen_by(method, queries, 30))
    assert torch.equal(mine, total.topk(30, dim=1).values)


def test_keys_are_centred_by_the_prompts_mean_for_good(gauss):
    shift = 5 * gauss(1, DIM)
    keys, queries = gauss(500, DIM), gauss(3, GROUP, DIM)
    plain, shifted = peers.MagicPIG(), peers.MagicPIG()
    plain.prefill(keys, None)
    shifted.prefill(keys + shift, None)
    same = (plain.codes == shifted.codes).float().mean()
    assert same > 0.99
    mean = plain.mean.clone()
    plain.append(gauss(50, DIM) + 9)
    assert torch.equal(plain.mean, mean)
    assert plain.collisions(queries).shape == (3, GROUP, 550)


# --- FAISS ---------------------------------------------------------------------------------------


@pytest.fixture
def faiss() -> ModuleType:
    return pytest.importorskip("faiss", reason="needs FAISS: pip install '.[models]'")


def test_more_bits_find_more(faiss, gauss):
    keys, queries = gauss(3000, DIM), 3 * gauss(8, GROUP, DIM)
    best = make_method("oracle")
    best.prefill(keys, None)
    wanted, found = chosen_by(best, queries, 50).tolist(), []
    for options in ({"bits": 1}, {"bits": 1, "finer": 4, "reranked": 0.1}, {"bits": 4}):
        method = make_method("fastscan", **options)
        method.prefill(keys[:2000], None)
        method.append(keys[2000:])
        pairs = zip(chosen_by(method, queries, 50).tolist(), wanted, strict=True)
        found.append(sum(len(set(a) & set(b)) for a, b in pairs))
    assert found == sorted(found) and found[0] > 0.2 * 400 and found[-1] > 0.8 * 400


def test_a_scan_gives_logits(faiss, gauss):
    keys, queries = gauss(2000, DIM), gauss(2, GROUP, DIM)
    method = make_method("fastscan", bits=4)
    method.prefill(keys, None)
    estimates, logits = method.estimates(method._scan, queries), logits_of(queries, keys)
    assert torch.corrcoef(torch.stack([estimates.flatten(), logits.flatten()]))[0, 1] > 0.97
    assert (estimates - logits).square().mean() < 0.05 * logits.square().mean()
