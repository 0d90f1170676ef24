"""Explanation.plot: a picture of the rows that `positions` and `kept` name."""

import sys

import numpy as np
import pariskv_core as pk
import pytest
from support import filled, make_config, randn_q

POLICIES = {
    "ParisKV": {},
    "mean query": {"group_rule": "mean_query"},
    "HardKV": {"policy": pk.HardKV(most=64)},
    "attended in full": {"dense_below": 10_000},
}


def explained(changes: dict) -> pk.Explanation:
    config = make_config()
    config = (
        config.replace(policy=changes["policy"]) if "policy" in changes else make_config(**changes)
    )
    f = filled(config, 900, queries=True)
    return f.cache.explain(0, f.s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize("changes", POLICIES.values(), ids=POLICIES.keys())
def test_marks_are_the_rows(changes):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="waits for matplotlib")
    pyplot.switch_backend("agg")
    why = explained(changes)
    axes = why.plot()
    kept, selected = (np.asarray(marks.get_offsets()) for marks in axes.collections[-2:])
    for marks, rows in ((kept, why.kept), (selected, why.positions)):
        expected = [(position, head) for head, row in enumerate(rows) for position in row]
        assert sorted(map(tuple, marks)) == sorted(each for each in expected if each[0] >= 0)
    sizes = axes.collections[-1].get_sizes()
    assert np.isfinite(sizes).all()
    if np.isfinite(why.worth).any():  # the best row of all has the largest mark
        head, at = np.unravel_index(np.nanargmax(why.worth), why.worth.shape)
        best = tuple(selected[np.argmax(sizes)])
        assert best == (why.positions[head, at], head)
    axes.figure.canvas.draw()
    pyplot.close(axes.figure)


def test_it_draws_where_it_is_told():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="waits for matplotlib")
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots()
    why = explained({})
    assert why.plot(axes) is axes
    assert axes.get_title() == f"{why.zone_tokens:,} tokens of the retrieval zone"
    pyplot.close(figure)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"\[plot\] needs matplotlib: pip install matplotlib"):
        explained({}).plot()
