"""Experiments on synthetic keys, small: does each ask what it says, and can it be written?"""

from __future__ import annotations

import json

import pytest
from quality import workloads
from quality.experiments import (
    BLOCKS,
    CONTENDERS,
    EXPERIMENTS,
    POINTS,
    WHILE_DRIFTING,
    Size,
)
from quality.methods import make_method
from quality.sources import WORST, means
from quality.walk import LOCAL, SINK, Walk

SIZE = Size(tokens=3000, long=4500, prompt=1200, decoded=1200, seeds=1, steps=4)


def measured(name: str) -> dict:
    found = EXPERIMENTS[name](SIZE, lambda items, what: items)
    json.dumps(found)
    return found


def test_workloads_are_a_table_by_methods(monkeypatch):
    every = workloads.variants
    names = ("all of it", "16 outlier channels", "nothing planted")
    few = {name: every(workloads.Spec())[name] for name in names}
    monkeypatch.setattr(workloads, "variants", lambda spec: few)
    table = measured("workloads")
    assert list(table) == list(names)
    for row in table.values():
        assert list(means(row)) == list(CONTENDERS)
        assert all(row[name + WORST] <= row[name] for name in CONTENDERS)
        assert all(0 <= share <= 1.001 for share in row.values())
        assert row[BLOCKS] > 0.8 > row["SnapKV"]


@pytest.mark.parametrize("kind", ["slow_drift", "switch"])
def test_drift_is_a_curve_per_method(kind):
    found = measured(kind)
    assert found["positions"][0] == SIZE.prompt
    assert found["positions"][-1] == SIZE.prompt + SIZE.decoded
    assert list(found["share"]) == list(WHILE_DRIFTING)
    assert all(len(curve) == POINTS for curve in found["share"].values())


def test_every_method_is_measured_at_every_budget():
    table = measured("budgets")
    assert list(table) == list(CONTENDERS)
    assert all(shares[BLOCKS] > shares["StreamingLLM"] for shares in by_rows(table))


def by_rows(table: dict) -> list[dict[str, float]]:
    rows = next(iter(table.values()))
    return [{name: at[count] for name, at in table.items()} for count in rows]


def test_nothing_catches_more_than_the_oracle():
    (spec,) = SIZE.specs()
    oracle = make_method("oracle")
    (moment,) = Walk(spec).moments([oracle])
    quality = moment.quality(oracle, moment.best())
    assert quality.share().mean().item() == pytest.approx(1, abs=1e-3)
    assert quality.recall.mean() == 1
    best = moment.best()
    assert (best == moment.planted[:, None]).any(dim=1).all()


def test_a_method_is_shown_exactly_the_zone():
    seen = []

    class Watcher:
        name = "watcher"

        def prefill(self, keys, recent):
            assert recent.shape[1:] == (4, 128)
            seen.append(keys)

        def append(self, keys):
            seen.append(keys)

    (spec,) = SIZE.specs(tokens=3000, decoded=700, asked_at=(3000, 3000, 3500, 3700))
    walk, lengths = Walk(spec), []
    for moment in walk.moments([Watcher()]):
        lengths.append(sum(len(keys) for keys in seen))
        assert len(moment.keys) == lengths[-1] == moment.position - SINK - LOCAL
    assert lengths == [2740, 2740, 3240, 3440]
    assert all(len(keys) for keys in seen)
    assert (moment.keys[0] == walk.keys[SINK]).all()


def test_resident_rows_are_the_sinks_and_the_window():
    (spec,) = SIZE.specs()
    whole = Walk(spec)
    (moment,) = whole.moments()
    logits = moment.queries @ whole.keys.T / 128**0.5
    logits[..., SINK : SIZE.tokens - LOCAL] = float("-inf")
    assert (moment.resident.lse - logits.logsumexp(-1)).abs().max() < 1e-3
    expected = logits.softmax(-1) @ whole.values
    assert (moment.resident.output - expected).abs().max() < 1e-4
