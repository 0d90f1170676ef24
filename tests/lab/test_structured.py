"""Keys with a structure: is each what it says, and does the engine's sample help?"""

from __future__ import annotations

import pytest
import torch
from pariskv_core.cli.errors import Tally
from quality import predicted, structured
from quality.experiments import Size
from quality.sources import WORST, means


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(structured, "TOKENS", 12_288)


@pytest.mark.parametrize("kind", structured.KINDS)
def test_things_that_are_asked_for_are_there(kind):
    keys = structured.KINDS[kind](torch.Generator().manual_seed(3))
    assert keys.thing.shape == (structured.TOKENS,)
    assert torch.isin(keys.asked, keys.thing).all()


def test_lines_and_markers_lie_where_they_should():
    (columns,) = structured.lines(24).thing.view(-1, 24).unique(dim=0)
    assert columns.tolist() == list(range(24))
    assert (structured.markers(64, 7).thing == 0).nonzero()[:2, 0].tolist() == [7, 71]


def test_a_sample_finds_what_the_best_rows_leave_out():
    kinds = ("lines of 32 tokens", "a marker every 16 tokens")
    for kind in kinds:
        found = structured.errors(kind, seed=0, steps=4)
        assert list(found) == list(structured.WAYS)
        without, _, sampled = (sum(of) / len(of) for of in found.values())
        assert sampled < 0.35 * without


def test_the_table_has_every_kind(monkeypatch):
    kinds = dict(list(structured.KINDS.items())[:2])
    monkeypatch.setattr(structured, "KINDS", kinds)
    table = structured.structured(Size(seeds=1, steps=2), lambda items, what: items)
    assert list(table) == list(kinds)
    for line in table.values():
        assert list(means(line)) == list(structured.WAYS)
        assert all(line[way] <= line[way + WORST] for way in structured.WAYS)


def test_errors_are_predicted_for_the_same_steps():
    of = structured.drawn("32 clusters", seed=0, steps=4)
    tally = Tally()
    structured.predictions(of, structured.config_of(tail_rows=1024), tally)
    errors = tally.together()
    assert errors is not None and errors.searches == 4 * structured.KV_HEADS
    assert errors.holds
    outputs = structured.errors("32 clusters", seed=0, steps=4)["1,024 rows"]
    assert 0.5 < errors.relative / (sum(outputs) / 4) < 2


def test_the_table_of_predicted_errors_has_every_kind_and_way(monkeypatch):
    kinds = dict(list(structured.KINDS.items())[:2])
    monkeypatch.setattr(structured, "KINDS", kinds)
    table = predicted.on_structured_keys(Size(seeds=1, steps=2), lambda items, what: items)
    assert list(table) == list(kinds)
    for ways in table.values():
        assert list(ways) == list(predicted.WAYS)
        for at in ways.values():
            assert at["ratio"] == pytest.approx(at["predicted"] / at["true"], rel=0.01)
