"""From what the lab measures to its page: what is kept, the tables made of it, the figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import pytest
from PIL import Image
from quality import figures, kept, lm, markdown, plots, sources, tables, tables_keys
from quality.pretrained import forced, needles, prefilter, shares, stretches
from quality.sources import Sources

BUDGETS = (100, 256, 2048)
HERE = {"cpu": "a processor", "commit": "0123456789abcdef", "uncommitted_changes": False}
_SHARES = dict.fromkeys(("share", "worst_kv_head", "median", "worst_head", "by_mass"), 0.8)
PRETRAINED = {
    "tiny, code, 4096": {
        "model": "Gemma-3-270M Q4",
        "tokens": 4096,
        "text": "code",
        "methods": {
            **dict.fromkeys(shares.METHODS, _SHARES),
            "block 64, 5 %": {**_SHARES, "share": 0.985},
            "block 64, 2 %": {**_SHARES, "share": 0.9497},
        },
    }
}
_KL = {"kl": 0.004, "same_top": 0.9, "bits_per_byte": 0.8}
_FEWER = {**_KL, "rows": 9.04, "mass": 0.91, "least_mass": 0.2}
_FOUND = {"asked": 34.0, "found": 30.0, "log_probability": -1.5}
INSIDE = {
    "tiny, code, 4096": {
        "model": "Gemma-3-270M Q4",
        "tokens": 4096,
        "steps": 512,
        "text": {
            **dict.fromkeys(forced.METHODS, _KL),
            "the default, mass 1": {**_KL, "rows": 100.0, "mass": 0.93, "least_mass": 0.4},
            "the default, mass 0.98": {**_KL, "rows": 61.7, "mass": 0.92, "least_mass": 0.3},
            **dict.fromkeys((f"the default, mass {m}" for m in (0.99, 0.95, 0.9)), _FEWER),
            "block 64, tail 512": {**_KL, "kl": 0.0015},
            "best 400": {**_KL, "kl": 0.002},
        },
        "facts": {name: dict.fromkeys(("words", "all"), _FOUND) for name in needles.ASKED},
        "dictionary": {"full attention": {"pairs": _FOUND, "all": _FOUND}},
        "written": {"StreamingLLM 512": {"stretch": 64, "more_bits": [[1, 0.1]], "kl": [[1, 0.1]]}},
    },
    "tiny, code, 8192": {
        "model": "Gemma-3-270M Q4",
        "tokens": 8192,
        "steps": 512,
        "text": {"full attention": _KL, "best 400": _KL},
        "several": {"full attention": {"several": _FOUND, "all": _FOUND}},
    },
}
_BY_ROWS = {"128": _SHARES, "256": {**_SHARES, "share": 0.7}}
_OF_POLICIES = dict.fromkeys(tables_keys.POLICIES, _BY_ROWS)
_ENDS = {"share_first": 0.98, "share_last": 0.95, "lost": 0.03}
_ENDS |= {"worst_kv_head_first": 0.9, "worst_kv_head_last": 0.8}
_CASES = {f"{t}, {whose}": 0.9 for t in ("documentation", "code") for whose in ("its own",)}
_CASES |= {"documentation, the other's": 0.9, "code, the other's": 0.895}
_TINY = {"model": "Gemma-3-270M Q4", "tokens": 4096}
_STATIC = {
    f"{what}, {rows}": 0.5 if what == "window" else 0.9
    for what in ("best", "window", *(f"S = {s}" for s in ("0", "0.25", "0.5", "0.75", "1")))
    for rows in (256, 1024)
}
_FIRST = ("attention", "queries of a group", "all queries")
_HOW = ("none", "each head", "the first")
CLAIMS = {
    "model": "Gemma-3-270M Q4",
    "prkv": {
        **dict.fromkeys(("static", "static, code", "static, questions"), _STATIC),
        "interval": {
            f"T = {t}, S = {s}, {half}": 0.9
            for t in (32, 128, 512, None)
            for s in ("0.25", "1")
            for half in ("early", "late")
        },
        "distance": {
            f"{what}, {d}": 0.9
            for what in ("best", "old best", "old best and window")
            for d in (8, 32, 128, 512)
        },
        "order": {f"{first}, {rows}": 0.9 for first in _FIRST for rows in (256, 1024)},
        "automatic": {"256": [0.5, 0.25], "1024": [0.5, 0.5]},
    },
    "hardkv": {
        "counts": {
            f"{how}, {rows}: {what}": 0.1
            for how in ("one count", "by Top-p", "by Top-p, at most twice")
            for rows in (256, 512, 1024, 2048)
            for what in ("output error", "recall")
        },
        "calibration": {
            **{
                f"{metric}, {how}, {when}: {what}": 1.0
                for metric in ("SnapKV", "R-KV")
                for how in _HOW
                for when in ("now", "later")
                for what in ("count over true", "attention held")
            },
            **{
                f"{metric}, temperature changed by a factor, 512": 1.1
                for metric in ("SnapKV", "R-KV")
            },
        },
        "pruning": {
            f"{how}, {begin}: {what}": 0.1
            for how in ("dropped", "merged", "merged, raised")
            for begin in (0, 128)
            for what in ("lse lost", "output error")
        },
        "lengths": {f"{tokens}: lse lost": 0.1 for tokens in (1024, 2048, 4096, 7168)},
    },
}
_OF_PARTS = {
    f"{rule}, {s}, {when}": 0.5
    for s in ("0.25", "0.5", "auto")
    for when in ("now", "later", "with pages")
    for rule in (
        "all pages",
        "as before",
        *(
            f"{rank}{more}, {part}"
            for rank in (*prefilter.RANKS, "best")
            for more in ("", ", remembers")
            for part in prefilter.PARTS
        ),
    )
}
_OF_PARTS_BY_LAYER = {name: [0.4, 0.6] for name in _OF_PARTS if ", 1/4, " in name}
KEYS = {
    "claims": {"tiny": CLAIMS},
    "written": {
        "tiny": {**_TINY, "written": 1024, "methods": dict.fromkeys(stretches.SETTINGS, _ENDS)}
    },
    "balance": {
        "tiny": {
            **_TINY,
            "cases": {
                case: {name: {**_SHARES, "share": at} for name in stretches.METHODS}
                for case, at in _CASES.items()
            },
        }
    },
    "lengths": {
        "tiny": {
            **_TINY,
            "lengths": {
                tokens: dict.fromkeys(stretches.OF_LENGTHS, _SHARES) for tokens in ("4096", "8192")
            },
        }
    },
    "prefilter": {
        "tiny": {
            **_TINY,
            "lengths": {"8192": {"shares": _OF_PARTS, "by_layer": _OF_PARTS_BY_LAYER}},
        }
    },
    "policies": {
        "tiny": {
            **_TINY,
            "soon": _OF_POLICIES,
            "all": _OF_POLICIES,
            "counts": {"Top-p": {"128": [3, 1400, 128.0], "256": [5, 2100, 256.0]}},
        }
    },
}


def outcome(share: float, **facts) -> dict:
    names = ("recall", "share", "worst_head", "mass", "lse_error", "output_error")
    return {**dict.fromkeys(names, share), "share_by_head": [share] * 4, **facts}


@pytest.fixture(scope="module")
def model() -> dict:
    """What quality.lm writes, with shares that were made up."""
    settings = lm.Settings(budgets=BUDGETS)
    runs = {}
    for name in lm.engine_settings(settings):
        ratio = float(name.split(" at ")[1]) if " at " in name else 0.1
        rows = int(name.split(", ")[1].split()[0]) if name.endswith(" rows") else 100
        share = (0.99 if name.startswith("default") else 0.8) - 0.002 / ratio
        runs[name] = outcome(share, top_k=rows, candidate_share=ratio, bits_per_byte=0.8)
    methods = {
        name: {str(rows): outcome(0.2 + 0.05 * i, bits_per_byte=0.9) for rows in BUDGETS}
        for i, name in enumerate([*lm.REFERENCES, *lm.PEERS])
    }
    methods["full attention"] = {"100": {"bits_per_byte": 0.8}}
    costs = {"full attention": {"more": 0.004, "error": 0.001}}
    costs["oracle"] = {"more": 0.001, "error": 0.0002}
    names = [f"{name}, {rows}" for name, by in methods.items() for rows in by]
    curve = {"tokens": [1024, 2048], "share": [0.9, 0.8], "recall": [0.5, 0.4]}
    curve |= {"share_first": 0.9, "share_last": 0.8, "lost": 0.1}
    whole = {"prompts": 8, "prompt": 32_768, "steps": 1024, "writers": 4, "written": 4096}
    return {
        "settings": {**whole, "seconds": 100.0, "budgets": BUDGETS},
        "machine": "a GPU",
        "errors": {},
        "methods": methods,
        "engine": runs,
        "over": dict.fromkeys([*names, *(f"engine, {run}" for run in runs)], costs),
        "drift": dict.fromkeys(["pariskv_core", *lm.DRIFTING], curve),
    }


@pytest.fixture(scope="module")
def everything(model, measured, tmp_path_factory) -> Sources:
    """Of files like those that `python -m quality cpu` and `gpu` write."""
    folder = tmp_path_factory.mktemp("results")
    synthetic = kept.of_synthetic(measured.everything())
    runs = {"cpu": synthetic, "gpu": {"model": kept.of_model(model)}, "models-cpu": PRETRAINED}
    runs |= {"inside-cpu": INSIDE, "keys-cpu": KEYS}
    for name, results in runs.items():
        text = harness.as_text({"environment": HERE, "results": results})
        (folder / f"quality-{name}.json").write_text(text, encoding="utf-8")
    return sources.load(results=folder)


def test_files_are_read_as_they_were_written(everything, model, tmp_path):
    assert set(everything.synthetic) == set(kept.SYNTHETIC)
    parts = ("synthetic", "model", "pretrained", "inside", "keys")
    assert everything.where == dict.fromkeys(parts, "a processor, 0123456789ab")
    own = tmp_path / "lm.json"
    own.write_text(json.dumps(model))
    found = sources.load(lm=own, results=tmp_path)
    assert json.loads(harness.as_text(found.model)) == everything.model
    assert found.where == {"model": "a GPU"}


def test_a_run_that_was_cut_short_is_not_shown(everything, tmp_path):
    part = {name: everything.synthetic[name] for name in ("size", "budgets")}
    record = {"environment": HERE, "results": part}
    (tmp_path / "quality-cpu.json").write_text(harness.as_text(record))
    assert sources.load(results=tmp_path) == Sources()


def test_a_failed_section_leaves_the_rest_running(model):
    failed = {name: part for name, part in model.items() if name not in ("over", "drift")}
    found = kept.of_model({**failed, "errors": {"drift": "Traceback"}})
    assert found["failed"] == ["drift"]
    assert found["methods"]["oracle"]["100"]["share"] == model["methods"]["oracle"]["100"]["share"]


def test_the_page_has_a_place_for_every_table():
    page = tables.PAGE.read_text()
    for name in tables.TABLES:
        assert page.count(f"<!-- table: {name} -->") == 1
    assert page.count("<!-- table: ") == page.count("<!-- end -->") == len(tables.TABLES)


def test_filling_a_page_changes_its_tables_alone(everything):
    page = "before\n<!-- table: written -->\nold\n<!-- end -->\nafter\n"
    filled = tables.filled(page, everything)
    assert filled == page.replace("old\n", tables.made("written", everything))
    assert tables.filled(filled, everything) == filled


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_tables(everything, name):
    made = tables.made(name, everything)
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert made.endswith("\n")
    assert rows or name in ("peers_win", "figures", "measured_on")
    assert len({line.count(" | ") for line in rows if "---" not in line}) <= 1


def test_targets_report_met_or_missed(everything):
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


def test_goals_on_pretrained_models_are_met_or_missed(everything):
    lines = tables.made("goals", everything).splitlines()
    assert "| Gemma-3-270M, 4,096 tokens, 5 % reranked: share | ≥ .980 | .985 | yes |" in lines
    assert "| Gemma-3-270M, 4,096 tokens, 2 % reranked: share | ≥ .950 | .9497 | **no** |" in lines
    told = {line.split(": ")[-1] for line in lines if "KL with" in line}
    assert told == {
        "at most that of the best 400 rows | ≤ .0020 | .0015 | yes |",
        "at most .3 of that of the best 100 | ≤ .0012 | .0015 | **no** |",
    }


def test_goals_of_the_defaults_are_met_or_missed(everything):
    lines = tables.made("goals", everything).splitlines()
    what = "Gemma-3-270M, KL of the default after 4,096 tokens: at most"
    assert f"| {what} that of the best 400 rows | ≤ .0020 | .0040 | **no** |" in lines
    what = "Gemma-3-270M, share lost while 1,024 tokens are written"
    assert f"| {what} | ≤ .010 | .030 | **no** |" in lines
    what = "Gemma-3-270M, share of code lost by a balance from documentation"
    assert f"| {what} | ≤ .010 | .005 | yes |" in lines
    what = "Gemma-3-270M, keys of 8,192 tokens, default schedule: share"
    assert f"| {what} | ≥ .950 | .800 | **no** |" in lines


def test_budgets_by_mass_show_rows_and_shares(everything):
    lines = tables.made("mass", everything).splitlines()
    assert lines[0].count("rows") == 2 and "8,192" not in lines[0]
    assert lines[2] == "| no mass: 100 | 100.0 | .930 | .400 | .0040 | .900 |"
    assert lines[4] == "| .98 | 61.7 | .920 | .300 | .0040 | .900 |"
    assert len(lines) == 7


def test_longer_texts_have_a_table_of_their_own(everything):
    short, longer = (tables.made(name, everything) for name in ("inside", "inside_longer"))
    assert short.splitlines()[0].count("KL") == 1 == longer.splitlines()[0].count("KL")
    assert "8,192 tokens: KL" in longer and "the best 400 rows" in longer
    assert "own tail" in short and "own tail" not in longer


def test_counts_and_shares_of_policies_are_shown(everything):
    (row,) = tables.made("counts", everything).splitlines()[2:]
    assert row == "| Gemma-3-270M | 3 to 1,400 | 5 to 2,100 |"
    lines = tables.made("policies", everything).splitlines()
    assert "| PRKV, S = .500, holes | .800 (.800) | .700 (.800) |" in lines


def test_methods_that_were_not_measured_are_a_dash(everything):
    lines = tables.made("facts", everything).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    words, pairs = (
        next(line for line in cells if line[0] == f"Gemma-3-270M, 4,096: {kind} of 34")
        for kind in ("words", "pairs")
    )
    ours = cells[0].index("100 rows, **block 64**")
    assert len(lines) == 4 and words[ours] == "30 (-1.50)"
    assert pairs[ours] == "–" and pairs[1] == "30 (-1.50)"


def test_every_case_in_which_a_peer_wins_is_named(everything):
    lines = tables.made("peers_win", everything).splitlines()
    shares = everything.synthetic["ingredients"]
    for name, line in shares.items():
        peers = [s for n, s in line.items() if not n.startswith(("oracle", "pariskv_core"))]
        won = max(peers) > line["pariskv_core 5%"]
        assert any(at.startswith(f"- synthetic keys, {name}: ") for at in lines) == won


def test_unmeasured_rows_are_left_out(tmp_path):
    assert "Not measured" in tables.made("targets", Sources())
    said = plots.all_of(Sources(), tmp_path)
    assert all(what.startswith("left out") for what in said.values())
    assert not list(tmp_path.iterdir())


def test_numbers_are_short():
    assert [markdown.share(x) for x in (0.9781, -0.012, 1.0, 10.5)] == [
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
