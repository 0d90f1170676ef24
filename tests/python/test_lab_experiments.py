"""Every experiment of the lab, small: does it ask what it says, and can its answer be written?"""

from __future__ import annotations

import json

import pytest
from quality import ablations, experiments, trial
from quality.sizes import Size

pytestmark = [
    pytest.mark.cpu("the lab; what it runs on a GPU is tested there"),
    pytest.mark.usefixtures("one_thread"),
]

SMALL = Size(
    tokens=3000, long=5000, prompt=2000, decoded=2000, lengths=(2000, 4000), seeds=1, steps=4
)


def track(items, what):
    return items


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """The contenders that take no time, and one that learns."""
    names = ("oracle", trial.OURS, trial.PUBLISHED, "PQCache 2x6", "Quest", "SnapKV")
    some = {name: trial.CONTENDERS[name] for name in names}
    monkeypatch.setattr(experiments, "CONTENDERS", some)
    monkeypatch.setattr(experiments, "WHILE_DRIFTING", some)


def shares(table: dict) -> dict[str, float]:
    return {name: numbers["share"] for name, numbers in table.items()}


def test_ingredients_are_a_table_of_workloads_by_methods():
    table = experiments.ingredients(SMALL, track)
    json.dumps(table)
    assert len(table) >= 16
    for row in table.values():
        assert row["oracle"]["share"] == pytest.approx(1, abs=1e-3)
        assert row["oracle"]["recall"] == 1
        assert all(0 <= share <= 1.001 for share in shares(row).values())
    whole = table["all of it"]
    assert whole["oracle"]["planted_found"] == 1
    assert whole[trial.OURS]["share"] > whole["SnapKV"]["share"]
    assert "planted_found" not in table["nothing planted"]["oracle"]


@pytest.mark.parametrize("kind", ["slow", "switch"])
def test_drift_is_a_curve_per_method(kind):
    found = experiments.drift(SMALL, track, kind)
    json.dumps(found)
    assert found["positions"][0] == SMALL.prompt
    assert found["positions"][-1] == SMALL.prompt + SMALL.decoded
    for curve in found["methods"].values():
        assert len(curve) == 9
    assert {at["recall"] for at in found["methods"]["oracle"]} == {1.0}


def test_a_method_is_shown_exactly_the_zone():
    seen = []

    class Watcher:
        name = "watcher"

        def prefill(self, keys, recent):
            assert recent.shape[1:] == (4, 128)
            seen.append(keys)

        def append(self, keys):
            seen.append(keys)

    (walk,) = SMALL.trials(decoded=700, asked_at=(3000, 3000, 3500, 3700))
    lengths = []
    for moment in walk.moments([Watcher()]):
        lengths.append(sum(len(keys) for keys in seen))
        assert len(moment.keys) == lengths[-1] == moment.position - trial.SINK - trial.LOCAL
    assert lengths == [2740, 2740, 3240, 3440]
    assert all(len(keys) for keys in seen)
    assert (moment.keys[0] == walk.keys[trial.SINK]).all()


def test_resident_rows_are_the_sinks_and_the_window():
    moment = SMALL.trials()[0].moment()
    whole = SMALL.trials()[0]
    logits = moment.queries @ whole.keys.T / 128**0.5
    logits[..., trial.SINK : 3000 - trial.LOCAL] = float("-inf")
    assert (moment.resident.lse - logits.logsumexp(-1)).abs().max() < 1e-3
    expected = logits.softmax(-1) @ whole.values
    assert (moment.resident.output - expected).abs().max() < 1e-4


def test_switches_give_numbers_before_and_after():
    found = ablations.switched_on(SMALL, track)
    json.dumps(found)
    for stages in found.values():
        for before, after in stages.values():
            for at in (before, after):
                assert 0 <= at["coarse_recall"] <= at["recall"] <= 1


def test_alpha_makes_logits_better():
    found = ablations.alpha(SMALL, track)
    assert found["on"]["1.0"]["logit_error"] < found["off"]["1.0"]["logit_error"]
    assert found["on"]["0.1"]["recall"] <= found["on"]["1.0"]["recall"]


def test_more_tiers_tie_less():
    found = ablations.tiers(SMALL, track)
    assert found["6"]["0.1"]["tied"] < 0.6 * found["1"]["0.1"]["tied"]


def test_finer_codebooks_find_more(monkeypatch):
    rows = ablations.design_space(SMALL, track)["rows"]
    by = {(r["part"], r["codebook"], r["radii"]): r for r in rows}
    assert by[4, "256 directions", 1]["bits_per_key"] == 256
    assert by[8, "signs", 1]["bits_per_key"] == by[16, "signs", 1]["bits_per_key"] == 128
    fine, coarse = by[4, "256 directions", 1], by[16, "256 directions", 1]
    assert fine["recall"] > coarse["recall"] + 0.1


def test_lengths_say_what_share_is_needed():
    found = ablations.lengths(SMALL, track)
    for line in found.values():
        for numbers in line.values():
            assert 0 < numbers["needed_mass"] <= 1
            assert numbers["needed_recall"] > 0.01
    ours, published = found["sign × norm, now"], found["votes, mean query"]
    assert ours["4000"]["needed_mass"] < published["4000"]["needed_mass"]


def test_budgets_and_candidates_help():
    rows = experiments.budgets(SMALL, track)
    assert rows[trial.OURS]["50"]["mass"] < rows[trial.OURS]["2048"]["mass"]
    shares = [at["share"] for at in experiments.candidates(SMALL, track)["pariskv_core"].values()]
    assert shares == sorted(shares)
    assert shares[-1] > 0.95
