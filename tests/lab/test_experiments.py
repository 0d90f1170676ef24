"""Every experiment of the lab, small: does it ask what it says, and can its answer be written?"""

from __future__ import annotations

import json

import pytest
from quality import trial


def shares(table: dict) -> dict[str, float]:
    return {name: numbers["share"] for name, numbers in table.items()}


def test_ingredients_are_a_table_of_workloads_by_methods(measured):
    table = measured["ingredients"]
    json.dumps(table)
    assert set(table["all of it"]) == set(trial.CONTENDERS)
    for row in table.values():
        assert row["oracle"]["share"] == pytest.approx(1, abs=1e-3)
        assert row["oracle"]["recall"] == 1
        assert all(0 <= share <= 1.001 for share in shares(row).values())
    whole = table["all of it"]
    assert whole["oracle"]["planted_found"] == 1
    assert whole[trial.OURS]["share"] > whole["SnapKV"]["share"]
    assert "planted_found" not in table["nothing planted"]["oracle"]


@pytest.mark.parametrize("kind", ["slow_drift", "switch"])
def test_drift_is_a_curve_per_method(measured, kind):
    found, size = measured[kind], measured.size
    json.dumps(found)
    assert found["positions"][0] == size.prompt
    assert found["positions"][-1] == size.prompt + size.decoded
    assert set(found["methods"]) == set(trial.WHILE_DRIFTING)
    for curve in found["methods"].values():
        assert len(curve) == 9


def test_a_method_is_shown_exactly_the_zone(measured):
    seen = []

    class Watcher:
        name = "watcher"

        def prefill(self, keys, recent):
            assert recent.shape[1:] == (4, 128)
            seen.append(keys)

        def append(self, keys):
            seen.append(keys)

    (walk,) = measured.size.trials(tokens=3000, decoded=700, asked_at=(3000, 3000, 3500, 3700))
    lengths = []
    for moment in walk.moments([Watcher()]):
        lengths.append(sum(len(keys) for keys in seen))
        assert len(moment.keys) == lengths[-1] == moment.position - trial.SINK - trial.LOCAL
    assert lengths == [2740, 2740, 3240, 3440]
    assert all(len(keys) for keys in seen)
    assert (moment.keys[0] == walk.keys[trial.SINK]).all()


def test_resident_rows_are_the_sinks_and_the_window(measured):
    (whole,) = measured.size.trials()
    moment = whole.moment()
    logits = moment.queries @ whole.keys.T / 128**0.5
    logits[..., trial.SINK : measured.size.tokens - trial.LOCAL] = float("-inf")
    assert (moment.resident.lse - logits.logsumexp(-1)).abs().max() < 1e-3
    expected = logits.softmax(-1) @ whole.values
    assert (moment.resident.output - expected).abs().max() < 1e-4


def test_switches_give_numbers_before_and_after(measured):
    found = measured["switched_on"]
    json.dumps(found)
    for stages in found.values():
        for before, after in stages.values():
            for at in (before, after):
                assert 0 <= at["coarse_recall"] <= at["recall"] <= 1


def test_alpha_makes_logits_better(measured):
    found = measured["alpha"]
    assert found["on"]["1.0"]["logit_error"] < found["off"]["1.0"]["logit_error"]
    assert found["on"]["0.1"]["recall"] <= found["on"]["1.0"]["recall"]


def test_more_tiers_tie_less(measured):
    found = measured["tiers"]
    assert found["6"]["0.1"]["tied"] < 0.6 * found["1"]["0.1"]["tied"]


def test_finer_codebooks_find_more(measured):
    rows = measured["design_space"]["rows"]
    by = {(r["part"], r["codebook"], r["radii"]): r for r in rows}
    assert by[4, "256 directions", 1]["bits_per_key"] == 256
    assert by[8, "signs", 1]["bits_per_key"] == by[16, "signs", 1]["bits_per_key"] == 128
    fine, coarse = by[4, "256 directions", 1], by[16, "256 directions", 1]
    assert fine["recall"] > coarse["recall"] + 0.1


def test_lengths_report_the_needed_share(measured):
    found = measured["lengths"]
    for line in found.values():
        for numbers in line.values():
            assert 0 < numbers["needed_mass"] <= 1
            assert numbers["needed_recall"] > 0.01
    ours, published = found["sign × norm, now"], found["votes, mean query"]
    assert ours["4000"]["needed_mass"] < published["4000"]["needed_mass"]


def test_budgets_and_candidates_help(measured):
    rows = measured["budgets"]
    assert rows[trial.OURS]["50"]["mass"] < rows[trial.OURS]["2048"]["mass"]
    shares = [at["share"] for at in measured["candidates"]["pariskv_core"].values()]
    assert shares == sorted(shares)
    assert shares[-1] > 0.95
