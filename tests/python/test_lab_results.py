"""The lab's page: its tables are those of the results, and its figures can be drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from quality import figures, lm, plots, sources, tables
from quality.sources import Sources, Timed

pytestmark = pytest.mark.cpu("the lab's page")

BUDGETS = (100, 256, 2048)


def outcome(share: float, **facts) -> dict:
    names = ("recall", "share", "worst_head", "mass", "lse_error", "output_error")
    return {**dict.fromkeys(names, share), "share_by_head": [share] * 4, **facts}


@pytest.fixture(scope="module")
def model() -> dict:
    """What quality.lm writes, with shares that were made up."""
    settings = lm.Settings(budgets=BUDGETS)
    runs = {}
    for name, changes in lm.engine_settings(settings).items():
        ratio = changes.get("schedule", [(0, 0.1, 0.2)])[0][1]
        share = (0.99 if "scorer" not in changes else 0.8) - 0.002 / ratio
        facts = {"top_k": changes.get("top_k", 100), "candidate_share": ratio}
        runs[name] = outcome(share, changes=changes, **facts)
    methods = {
        name: {str(rows): outcome(0.2 + 0.05 * i) for rows in BUDGETS}
        for i, name in enumerate([*lm.REFERENCES, *lm.PEERS])
    }
    methods["full attention"] = {"100": {"bits_per_byte": 0.8}}
    costs = {"full attention": {"more": 0.004, "error": 0.001}}
    costs["oracle"] = {"more": 0.001, "error": 0.0002}
    names = [f"{name}, {rows}" for name, by in methods.items() for rows in by]
    curve = {"tokens": [1024, 2048], "share": [0.9, 0.8]}
    curve |= {"share_first": 0.9, "share_last": 0.8, "lost": 0.1}
    found = {
        "settings": {"prompt": 32_768, "steps": 1024, "writers": 4, "budgets": BUDGETS},
        "machine": "a GPU",
        "methods": methods,
        "engine": runs,
        "over": dict.fromkeys([*names, *(f"engine, {run}" for run in runs)], costs),
        "drift": dict.fromkeys(["pariskv_core", *lm.DRIFTING], curve),
    }
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def everything(model) -> Sources:
    found = sources.load()
    times = [Timed({}, 32_768, ratio, 40 + 100 * ratio, 49.0) for ratio in (0.05, 0.1)]
    where = {**found.where, "model": "a GPU", "times": "a GPU, a commit"}
    return Sources(found.synthetic, model, {}, times, where)


def test_the_page_is_of_these_results():
    page = tables.PAGE.read_text()
    made = [tables.filled(page, sources.load(on)) for on in ("cpu", "gpu", None)]
    assert page in made, "python -m quality tables --write"


def test_the_page_has_a_place_for_every_table():
    page = tables.PAGE.read_text()
    for name in tables.TABLES:
        assert page.count(f"<!-- table: {name} -->") == 1
    assert page.count("<!-- table: ") == page.count("<!-- end -->") == len(tables.TABLES)


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_tables(everything, name):
    made = tables.made(name, everything)
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert made.endswith("\n")
    assert rows or name in ("peers_win", "figures", "measured_on")
    assert len({line.count(" | ") for line in rows if "---" not in line}) <= 1


def test_targets_say_what_was_met(everything):
    lines = {
        line.split(" | ")[0].strip("| "): line
        for line in tables.made("targets", everything).splitlines()
    }
    assert lines["share, 5 % of the keys reranked"].endswith("| .950 | .760 | yes |")
    assert lines["share, 10 % of the keys reranked"].endswith("| .970 | .780 |  |")
    assert lines["share, 2 % of the keys reranked"].endswith("| .890 | .700 | **no** |")
    assert lines["bits per byte over the best rows, k = 100, 10 % reranked"].endswith("| yes |")
    assert lines["bits per byte over the best rows, k = 100, 5 % reranked"].endswith("| yes |")
    assert lines["bits per byte over the best rows, k = 256"].endswith("| **no** |")
    assert lines["bits per byte over the best rows, k = 1,024"].endswith("| – | – |  |")
    assert "| .100 | k-means: .100 | **no** |" in lines["share lost while 4K tokens are generated"]


def test_what_is_not_measured_is_not_there(tmp_path):
    assert "Not measured" in tables.made("targets", Sources())
    said = plots.all_of(Sources(), tmp_path)
    assert all(what.startswith("left out") for what in said.values())
    assert not list(tmp_path.iterdir())


def test_numbers_are_short():
    assert [tables.share(x) for x in (0.9781, -0.012, 1.0, 10.5)] == [
        ".978", "-.012", "1.000", "10.500"
    ]  # fmt: skip


@pytest.mark.parametrize("figure", plots.FIGURES, ids=lambda figure: figure.__name__)
def test_figures_are_for_half_a_slide(
    everything, tmp_path: Path, figure: Callable[[Sources, Path], None]
):
    path = tmp_path / "figure.png"
    figure(everything, path)
    assert path.stat().st_size < 120_000
    with Image.open(path) as picture:
        assert picture.size == (1280, 720)
        ink = np.asarray(picture.convert("L")) < 250
    # Nothing touches the edge of the sheet, where it would be cut.
    assert not ink[[0, -1]].any()
    assert not ink[:, [0, -1]].any()


def test_names_are_spread_apart_and_stay_in_order():
    assert figures.spread([0.2, 0.5, 0.9], 0.1, 0, 1) == pytest.approx([0.2, 0.5, 0.9])
    assert figures.spread([0.5, 0.5, 0.52], 0.1, 0, 1) == pytest.approx(
        [0.4067, 0.5067, 0.6067], abs=1e-3
    )
    assert figures.spread([0.98, 0.99], 0.1, 0, 1) == pytest.approx([0.9, 1.0])
    many = figures.spread(sorted(np.random.default_rng(1).random(9) * 0.3), 0.1, 0, 1)
    assert np.diff(many).min() >= 0.1 - 1e-9
    assert many[0] >= -1e-9
    assert many[-1] <= 1


def test_times_come_from_the_benchs_file():
    row = {"tokens": 1000, "batch": 1, "microseconds": [3.0, 1.0, 2.0], "candidates_per_head": 50}
    dense = {"one": [9.0, 7.0, 8.0], "another": [20.0]}
    record = {"results": {"settings": {"top_k": 5}, "decode": [{**row, "dense": dense}]}}
    record["results"]["decode"].append({**row, "batch": 8})
    assert sources.timed([record]) == [Timed({"top_k": 5}, 1000, 0.05, 2.0, 8.0)]
