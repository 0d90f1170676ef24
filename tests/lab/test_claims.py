"""What two papers say of attention, measured: the measures against their definitions."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pariskv_core.cli.weights import MODELS
from quality import tables
from quality.pretrained import claims, claims_hardkv, claims_prkv, prefix, trail, written
from quality.pretrained.capture import Layer, late_positions
from quality.pretrained.trail import LOCAL, SINK, Head
from quality.sources import Sources
from quality.tables_claims import judged
from tiny_models import tiny_model

PROMPT, STEPS, DIM, GROUP = 1200, 640, 16, 2


@pytest.fixture(scope="module")
def head() -> Head:
    rng = np.random.default_rng(3)

    def rows(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    keys = rows(PROMPT + STEPS, DIM)
    near = keys[rng.integers(0, PROMPT, 64 + STEPS)][:, None]
    return Head(PROMPT, near + rows(64 + STEPS, GROUP, DIM), keys, rows(PROMPT + STEPS, DIM))


def of(measure, head: Head) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    measure(head, found)
    return {what: sum(values) / len(values) for what, values in found.items()}


# --- The trail -----------------------------------------------------------------------------------


def test_a_head_knows_the_queries_before_its_steps(head):
    assert head.steps == STEPS and head.recent == 64
    assert torch.equal(head.asking(0, 64), head.queries[:64])
    assert torch.equal(head.asking(10, 32), head.queries[42:74])
    assert torch.equal(head.at(torch.tensor([0, 5])), head.queries[[64, 69]])


def test_attention_sees_no_later_token(head):
    attention = head.attention(torch.tensor([0, 7]))
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, GROUP))
    assert bool((attention[0, :, PROMPT + 1 :] == 0).all()) and attention[1, 0, PROMPT + 7] > 0


class Bytes(prefix.Pretrained):
    """Whose tokens are bytes."""

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    pieces = ids


@pytest.fixture(scope="module")
def pretrained(transformers) -> prefix.Pretrained:
    model = tiny_model(transformers, "Llama", head_dim=64, num_hidden_layers=8)
    return Bytes(MODELS["smollm2"], None, model)


def test_a_trail_is_what_the_model_attends_to(pretrained):
    ids = torch.randint(256, (100,))
    known = prefix.read(pretrained.model, ids[:70])
    layers = trail.trail(pretrained, known, ids[70:])
    whole = prefix.read(pretrained.model, ids)
    assert list(layers) == [0, 3, 6]  # of eight
    for layer, heads in layers.items():
        for i, of_head in enumerate(heads):
            assert of_head.prompt == 70 and of_head.steps == 30
            torch.testing.assert_close(
                of_head.keys, whole.keys[layer][:, i].float(), atol=2e-2, rtol=2e-2
            )


# --- PRKV ----------------------------------------------------------------------------------------


def test_recall_counts_sinks_window_and_chosen_rows_once():
    attention = torch.full((1, 2, 20), 0.05)
    chosen = torch.tensor([[0, 3, -1]])  # tokens SINK and SINK + 3
    got = claims_prkv.recall(attention, chosen, zone_end=15)
    assert got.item() == pytest.approx((SINK + 5 + 2) * 0.05)
    assert claims_prkv.best_recall(attention, 100, 15).item() == pytest.approx(1)


def test_no_split_catches_more_than_the_best_rows(head):
    found = of(claims_prkv.by_static, head)
    for rows in claims_prkv.ROWS:
        for static in claims_prkv.STATIC:
            got = found[f"S = {static:g}, {rows}"]
            assert found[f"window, {rows}"] < got <= found[f"best, {rows}"] + 1e-6


def test_rows_that_are_chosen_once_are_those_of_the_first_choice(head):
    found = of(lambda h, f: claims_prkv.by_interval(h, f, rows=256), head)
    early, late = (found[f"T = None, S = 1, {when}"] for when in ("early", "late"))
    assert 0 < late <= early + 0.05
    assert found["T = 128, S = 1, early"] != found["T = None, S = 1, early"]


def test_old_rows_and_a_window_are_at_least_old_rows(head):
    found = of(lambda h, f: claims_prkv.by_distance(h, f, rows=200), head)
    for distance in claims_prkv.DISTANCES:
        both = found[f"old best and window, {distance}"]
        assert found[f"old best, {distance}"] < both
    assert found["old best, 1"] < found["best, 1"]


def test_overlap_is_of_the_first_query_and_the_last():
    keys = torch.randn(200, 8)
    same = torch.randn(1, 3, 8).expand(64, -1, -1)
    assert claims_prkv.overlap(same, keys, 64) == 1
    other = torch.cat([same[:63], -same[:1]])
    assert claims_prkv.overlap(other, keys, 64) == 0  # the best of one are the other's worst


def test_heads_that_look_at_opposite_things_lose_by_their_mean_query():
    keys = torch.zeros(PROMPT + STEPS, 2)
    keys[100:120, 0], keys[300:320, 0] = 12.0, -12.0
    queries = torch.tensor([[3.0, 0], [-3.0, 0]]).expand(64 + STEPS, -1, -1)
    found = of(claims_prkv.by_order, Head(PROMPT, queries, keys, keys))
    # By their mean query all rows are alike, and the 256 that are taken may be any.
    assert found["attention, 256"] > 0.99
    assert found["queries of a group, 256"] < found["attention, 256"]


# --- HARD-KV -------------------------------------------------------------------------------------


def test_as_many_rows_are_needed_as_hold_the_share():
    logits = torch.tensor([[4, 0, 1, 3, -1, 0.5, 2, 0]])
    assert claims_hardkv.needed(logits).item() == 3
    assert claims_hardkv.needed(torch.zeros(1, 50)).item() == 45
    assert claims_hardkv.needed(logits, 1.0).item() == 8


def test_a_temperature_gives_so_many_rows_the_share():
    scores = torch.tensor([[4, 3.5, 1.5, 3, 0.8, 1.2, 2, 0.9]])
    assert claims_hardkv.needed(scores).item() == 4
    heat = claims_hardkv.temperature(scores, torch.tensor([3]))
    assert heat.item() == pytest.approx(0.810757, abs=1e-5)
    assert claims_hardkv.needed(scores / (heat[:, None] - 1e-6)).item() == 3


def test_a_plateau_ends_at_the_lowest_temperature():
    heat = claims_hardkv.temperature(torch.tensor([[2.0] * 7 + [0.0]]), torch.tensor([1]))
    assert heat.item() == pytest.approx(1e-3)


def test_the_latest_duplicate_is_spared():
    keys = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [1, 0]])
    got = claims_hardkv.redundancy(keys)
    want = torch.tensor([0.33022, 0.26365, 0.20559, 0.20054])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_a_merged_row_that_is_raised_has_the_sum_of_both():
    keys, values = torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [5.0]])
    left = claims_hardkv.Survivors(keys, values, torch.zeros(2))
    asking = torch.ones(1, 1, 1)
    one = left.best(asking, 1, "merged, raised")
    assert one.keys.item() == pytest.approx(1.857722, abs=1e-5)
    assert one.values.item() == pytest.approx(1.189703, abs=1e-5)
    assert one.logits(asking).item() == pytest.approx(2.048587, abs=1e-5)
    assert left.best(asking, 1, "merged").logits(asking).item() == pytest.approx(1.857722, abs=1e-5)
    assert left.best(asking, 1, "dropped").keys.item() == 2


def test_true_counts_of_attention_need_no_temperature(head):
    found = of(lambda h, f: claims_hardkv.calibration(h, f, at=(0, 512)), head)
    assert found["attention, none, now: count over true"] == pytest.approx(1, abs=1e-6)
    assert found["attention, each query, now: count over true"] == pytest.approx(1, rel=0.05)
    assert found["SnapKV, none, now: count over true"] > 1
    assert (
        found["SnapKV, each query, now: count over true"]
        < (found["SnapKV, none, now: count over true"])
    )
    assert found["SnapKV, temperature changed by a factor, 512"] >= 1


def test_counts_by_mass_and_one_count_have_the_same_mean(head):
    found = claims_hardkv.counts([head])["counts"]  # of one head they are the same rows
    for what in ("recall", "output error"):
        one, many = (found[f"{how}, 256: {what}"] for how in ("one count", "by Top-p"))
        assert one == pytest.approx(many, abs=0.01)
    assert found["one count, 512: output error"] < found["one count, 256: output error"]


def test_what_is_pruned_is_lost(head):
    found = of(lambda h, f: claims_hardkv.pruning(h, f, rows=300), head)
    assert all(found[f"dropped, {at}: lse lost"] > 0 for at in range(0, STEPS, 128))
    # The first choice drops more than half, and none is merged.
    assert found["merged, 0: lse lost"] == found["dropped, 0: lse lost"]
    assert found["merged, raised, 512: lse lost"] != found["dropped, 512: lse lost"]
    zones = of(lambda h, f: claims_hardkv.lengths(h, f, rows=1100), head)
    assert zones["1024: lse lost"] == pytest.approx(0, abs=1e-6)  # all of so short a zone
    assert zones["7168: lse lost"] > 0


# --- By position ---------------------------------------------------------------------------------


def test_bits_by_position_have_means_and_errors():
    kl, bits, whole = torch.arange(8.0), torch.full((8,), 3.0), torch.ones(8)
    found = written.by_position(kl, bits, whole, 4)
    assert found["more_bits"] == [[2.0, 0.0], [2.0, 0.0]]
    error = torch.arange(4.0).std().item() / 2
    assert found["kl"] == [[1.5, pytest.approx(error)], [5.5, pytest.approx(error)]]
    assert found["worst_kl"] == [3.0, 7.0]


def test_logits_differ_from_themselves_by_nothing_at_any_token():
    logits, following = torch.randn(600, 20), torch.randint(20, (600,))
    kl, bits = written.by_token(logits, logits, following)
    assert bool((kl == 0).all()) and len(bits) == 600
    want = -logits.log_softmax(-1)[599, following[599]] / math.log(2)
    assert bits[599].item() == pytest.approx(want.item())


def test_regions_are_those_of_the_engine(head):
    assert head.zone_end(0) == PROMPT - LOCAL and head.zone_end(127) == PROMPT - LOCAL
    assert head.zone_end(128) == PROMPT - LOCAL + 128
    assert len(head.zone(128)) == head.zone_end(128) - SINK


# --- From a model to the page --------------------------------------------------------------------


def test_claims_of_a_model_become_tables(pretrained, monkeypatch, tmp_path):
    monkeypatch.setenv("PARISKV_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(prefix, "load", lambda _: pretrained)
    layer = Layer(*(torch.randn(n, h, 64).half() for n, h in ((2600, 2), (48, 4), (64, 4), (9, 4))))
    manifest = SimpleNamespace(tokens=2600, positions=late_positions(2600))
    taken = SimpleNamespace(manifest=manifest, layers=lambda: [(0, layer)])
    monkeypatch.setattr(claims, "make_all", lambda *_: [taken])
    for name, value in {"READ": 2600, "AFTER": 640, "FACTS": 6, "QUESTIONS": 2}.items():
        monkeypatch.setattr(claims, name, value)
    found = claims.claims(pretrained.weights, lambda of, _: of)
    assert found["heads"] == 6 and set(found["prkv"]["automatic"]) == {"256", "512", "1024", "2048"}
    for regime in ("static", "static, code", "static, questions"):
        at = found["prkv"][regime]
        assert at["window, 256"] < at["S = 0.5, 256"] <= at["best, 256"] <= at["best, 1024"]
    given = Sources(keys={"claims": {"tiny": found}})
    for name in ("claims_prkv", "by_static", "claims_hardkv"):
        lines = tables.ALL[name](given).splitlines()
        assert len(lines) > 6 and "SmolLM2" in lines[0] + lines[2]
        assert len({line.count(" | ") for line in lines[2:]}) == 1


def test_a_claim_of_two_models_that_disagree_has_no_one_verdict():
    claims_of = {"it holds": lambda of: (str(of), of)}
    rows = judged([{"prkv": True}, {"prkv": False}], "prkv", claims_of)
    assert rows == [["it holds", "True", "False", "reproduced; **refuted**"]]


def test_methods_after_a_short_prompt_become_a_table(pretrained):
    some = ("HARD-KV 256, p = 1", "StreamingLLM 512")
    measured = written.measured(pretrained, "documentation", some, lambda _: None, 600, 600, 300)
    found = dict(measured)
    assert list(found) == list(some)
    for at in found.values():
        assert len(at["more_bits"]) == len(at["kl"]) == 2
        assert all(mean >= -1e-6 for mean, _ in at["kl"])
    run = {"model": pretrained.weights.model, "tokens": 600, "written": found}
    given = Sources(inside={"tiny, documentation, 600": run})
    lines = tables.ALL["after_short_prompts"](given).splitlines()
    assert len(lines) == 4 and "300 to 600" in lines[0] and " ± " in lines[3]
