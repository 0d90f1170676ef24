"""From results files to the page: the tables that are made of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import harness
import pytest
from quality import __main__ as program
from quality import markdown, predicted, sources, tables
from quality.experiments import BLOCKS, BUDGETS, CONTENDERS, EXPERIMENTS, WHILE_DRIFTING
from quality.pretrained import forced, lengths, needles, shares
from quality.sources import Sources

HERE = {"cpu": "a processor", "commit": "0123456789abcdef", "uncommitted_changes": False}
MODEL = {"model": "Gemma-3-270M Q4", "tokens": 4096}
SHARES = dict.fromkeys(("share", "worst_kv_head", "median", "worst_head", "by_mass"), 0.8)
SYNTHETIC = {
    "workloads": {"all of it": {**dict.fromkeys(CONTENDERS, 0.5), BLOCKS: 0.9}},
    "budgets": {name: dict.fromkeys(map(str, BUDGETS), 0.6) for name in CONTENDERS},
    **{
        kind: {
            "positions": [1024 * (i + 1) for i in range(9)],
            "share": {name: [i / 16 for i in range(9)] for name in WHILE_DRIFTING},
        }
        for kind in ("slow_drift", "switch")
    },
}
STRUCTURED = {"lines": {"no tail": 0.5, "1,024 rows": 0.15, "2,048 rows": 0.1}}
_ERRORS = {"predicted": 0.012, "true": 0.01, "ratio": 1.2}
_OF_LAYERS = {**_ERRORS, "least": 0.7, "largest": 1.44}
PREDICTED = {
    "structured": {"lines": dict.fromkeys(predicted.WAYS, _ERRORS)},
    "tiny": {
        "model": "Gemma-3-270M Q4",
        "tokens": 4096,
        "steps": 128,
        "ways": dict.fromkeys(predicted.WAYS, _OF_LAYERS),
    },
}
PRETRAINED = {
    "tiny, code, 4096": {**MODEL, "methods": dict.fromkeys(shares.METHODS, SHARES)},
    "tiny, code, 8192": {**MODEL, "methods": {"block 64": SHARES}},
}
KL = {"kl": 0.004, "same_top": 0.9, "bits_per_byte": 0.88}
ERROR = {**KL, "rows": 61.7, "error": 0.0092, "worst_error": 0.3}
KEPT = {**KL, "rows": 90.0, "rows_first": 200.0, "rows_last": 30.0}
FOUND = {"asked": 34.0, "found": 30.0, "log_probability": -1.5}
INSIDE = {
    "tiny, documentation, 4096": {
        **MODEL,
        "text": {
            **dict.fromkeys(forced.SEARCHES, KL),
            **dict.fromkeys(forced.ERRORS, ERROR),
            forced.FIXED: {**KL, "rows": 100.0},
            forced.WHOLE_ROWS: KL,
            forced.NARROW_ROWS: {**KL, "kl": 0.00425, "same_top": 0.89},
            **dict.fromkeys(forced.POLICIES, KL),
            "full attention": {**KL, "kl": 0.0, "bits_per_byte": 0.8},
            "HARD-KV 256, p = 0.9, snapkv": KEPT,
        },
        "facts": {
            name: dict.fromkeys(("words", "all"), FOUND) for name in (*needles.ASKED, *forced.INT8)
        },
        "dictionary": {"full attention": {"pairs": FOUND, "all": FOUND}},
        "written": {"best 512": {"stretch": 64, "more_bits": [[1, 0.1]], "kl": [[1, 0.1]]}},
    },
    "tiny, documentation, 8192": {
        **MODEL,
        "tokens": 8192,
        "text": {"full attention": KL, "best 400": KL},
        "several": {"full attention": {"several": FOUND, "all": FOUND}},
    },
    "tiny, another text, 2222": {**MODEL, "tokens": 2222, "text": {"full attention": KL}},
}
BY_ROWS = {"128": SHARES, "256": {**SHARES, "share": 0.7}}
NAMES = ("block 64", "PRKV, S = 0.5", "PRKV, S = 1", "HARD-KV, attention, counts by Top-p")
STATIC = {
    f"{what}, {rows}": 0.5 if what == "window" else 0.9
    for rows in (256, 1024)
    for what in ("best", "window", *(f"S = {s}" for s in ("0", "0.25", "0.5", "0.75", "1")))
}


def every(form: str, value: float, *choices: tuple) -> dict[str, float]:
    """One value for each way to fill a form."""
    return {form.format(*chosen): value for chosen in product(*choices)}


_DISTANCES = ("best", "old best", "old best and window"), (8, 32, 128, 512)
_FIRST = ("attention", "queries of a group", "all queries"), (256, 1024)
_HOW = ("one count", "by Top-p", "by Top-p, at most twice"), (256, 512, 1024, 2048)
_METRICS, _WHEN = ("SnapKV", "R-KV"), ("now", "later")
_HEAT = ("none", "each head", "the first"), _WHEN, ("count over true", "attention held")
CLAIMS = {
    **MODEL,
    "prkv": {
        **dict.fromkeys(("static", "static, code", "static, questions"), STATIC),
        "interval": every("T = {}, S = {}, late", 0.9, (32, 128, 512, None), ("0.25", "1")),
        "distance": every("{}, {}", 0.9, *_DISTANCES),
        "order": every("{}, {}", 0.9, *_FIRST),
        "automatic": {"256": [0.5, 0.25], "1024": [0.5, 0.5]},
    },
    "hardkv": {
        "counts": every("{}, {}: {}", 0.1, *_HOW, ("output error", "recall")),
        "calibration": {
            **every("{}, {}, {}: {}", 1.0, _METRICS, *_HEAT),
            **every("{}, temperature changed by a factor, 512", 1.1, _METRICS),
        },
        "pruning": every(
            "{}, {}: {}",
            0.1,
            ("dropped", "merged", "merged, raised"),
            (0, 128),
            ("lse lost", "output error"),
        ),
        "lengths": every("{}: lse lost", 0.1, (1024, 2048, 4096, 7168)),
    },
}
KEYS = {
    "claims": {"tiny": CLAIMS},
    "written": {
        "tiny": {
            **MODEL,
            "written": 1024,
            "methods": {"block 64": {"first": SHARES, "last": {**SHARES, "share": 0.79}}},
        }
    },
    "lengths": {"tiny": {**MODEL, "lengths": {"8192": dict.fromkeys(lengths.METHODS, SHARES)}}},
    "policies": {
        "tiny": {
            **MODEL,
            **dict.fromkeys(("soon", "all"), dict.fromkeys(NAMES, BY_ROWS)),
            "counts": {"counts by Top-p": {"128": [3, 1400, 128.0], "256": [5, 2100, 256.0]}},
        }
    },
}


@pytest.fixture
def everything(tmp_path: Path) -> Sources:
    """Of files like those that the commands write."""
    runs = {"cpu": SYNTHETIC, "models-cpu": PRETRAINED, "inside-cpu": INSIDE, "keys-cpu": KEYS}
    runs |= {"structured-cpu": STRUCTURED, "predicted-cpu": PREDICTED}
    for name, results in runs.items():
        text = harness.as_text({"environment": HERE, "results": results})
        (tmp_path / f"quality-{name}.json").write_text(text, encoding="utf-8")
    return sources.load(tmp_path)


def lines_of(name: str, given: Sources) -> list[str]:
    return tables.ALL[name](given).splitlines()


def test_files_are_read_as_they_were_written(everything):
    parts = (everything.synthetic, everything.pretrained, everything.inside)
    assert parts == (SYNTHETIC, PRETRAINED, INSIDE)
    assert (everything.keys, everything.structured) == (KEYS, STRUCTURED)
    assert everything.predicted == PREDICTED
    assert list(everything.where.values()) == ["a processor, 0123456789ab"] * 6


def test_the_page_has_a_place_for_every_table():
    page = tables.PAGE.read_text()
    for name in tables.TABLES:
        assert page.count(f"<!-- table: {name} -->") == 1
    assert page.count("<!-- table: ") == page.count("<!-- end -->") == len(tables.TABLES)
    assert not tables.TABLES.keys() & tables.MORE.keys()


def test_the_page_can_be_read_in_one_sitting():
    assert len(tables.PAGE.read_text().splitlines()) <= 400


def test_all_tables_are_written_on_demand(everything, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sources, "load", lambda: everything)
    path = tmp_path / "all.md"
    program.main(["tables", "--all", str(path)])
    text = path.read_text(encoding="utf-8")
    for name, made in tables.ALL.items():
        title, said = f"## {name.replace('_', ' ')}\n", made.__doc__.splitlines()[0]
        assert f"{title}\n{said}" in text and made(everything) in text
    program.main(["tables", "--all"])
    assert capsys.readouterr().out == text
    program.main(["tables"])
    shown = capsys.readouterr().out
    assert "drift\n\n" not in shown and "workloads\n\n" in shown


def test_filling_a_page_changes_its_tables_alone(everything):
    page = "before\n<!-- table: int8 -->\nold\n<!-- end -->\nafter\n"
    filled = tables.filled(page, everything)
    assert filled == page.replace("old\n", tables.TABLES["int8"](everything))
    assert tables.filled(filled, everything) == filled


@pytest.mark.parametrize("name", tables.ALL)
def test_tables_are_tables(everything, name):
    made = tables.ALL[name](everything)
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert made.endswith("\n")
    assert len(rows) > 2 or name in ("peers_win", "measured_on")
    assert len({line.count(" | ") for line in rows if "---" not in line}) <= 1


@pytest.mark.parametrize("name", tables.ALL)
def test_tables_of_nothing_say_so(name):
    made = tables.ALL[name](Sources())
    assert made == "*Not measured yet.*\n" or name in ("peers_win", "measured_on")


@pytest.mark.parametrize("names", [*([name] for name in EXPERIMENTS), [*EXPERIMENTS]])
def test_experiments_show_their_tables(names, monkeypatch, capsys):
    for name in names:
        monkeypatch.setitem(EXPERIMENTS, name, lambda size, track, of=name: SYNTHETIC[of])
    program.main(["synthetic", "--threads", "1", "--only", *names])
    shown = capsys.readouterr().out
    assert shown.count("| share") == len({name in tables.DRIFTS or name for name in names})
    for name in names:
        assert (f"{name.replace('_', ' ')}: 1K" in shown) == (name in tables.DRIFTS)


def test_methods_that_were_not_measured_are_a_dash(everything):
    lines = lines_of("facts_by_kind", everything)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    words, pairs = (
        next(line for line in cells if line[0] == f"Gemma-3-270M, 4,096: {kind} of 34")
        for kind in ("words", "pairs")
    )
    ours = cells[0].index("block 64")
    assert len(lines) == 4 and words[ours] == "30 (-1.50)"
    assert pairs[ours] == "–" and pairs[1] == "30 (-1.50)"


def test_longer_texts_have_a_table_of_their_own(everything):
    short, longer = (lines_of(name, everything) for name in ("inside", "inside_longer"))
    assert short[0].count("KL") == 1 == longer[0].count("KL")
    assert "8,192: KL" in longer[0] and len(longer) == 3
    assert f"| **{forced.DEFAULT}** | .0040 | .900 | +10.00 % |" in short


def test_another_text_is_not_among_runs_on_documentation(everything):
    assert not any("2,222" in line for name in tables.ALL for line in lines_of(name, everything))
    (run,) = everything.reading("another text")
    assert run["tokens"] == 2222


def test_budgets_by_error_show_rows_and_errors(everything):
    lines = lines_of("every_error", everything)
    assert "8,192" not in lines[0] and len(lines) == 2 + len(forced.ERRORS)
    assert set(lines_of("error", everything)) < set(lines)
    assert "| error 0.01, at most 400 rows | 62 | .0092 | .300 | .0040 | .900 |" in lines
    assert f"| {forced.FIXED} | 100 |  |  | .0040 | .900 |" in lines


def test_rows_in_8_bits_stand_beside_rows_as_they_come(everything):
    cells = ".00400 | .00425 | +.00025 | .900 | .890 | 30 (-1.50) | 30 (-1.50)"
    assert lines_of("int8", everything)[2:] == [f"| Gemma-3-270M, 4,096 | {cells} |"]
    lines = [*lines_of("facts", everything), *lines_of("facts_by_kind", everything)]
    assert not any(name in line for name in forced.INT8 for line in lines)


def test_predicted_errors_stand_over_true_ones(everything):
    (short,) = lines_of("predicted", everything)[2:]
    cell = "1.20 (0.70 to 1.44)"
    assert short == f"| Gemma-3-270M, 4,096 | {' | '.join([cell] * len(predicted.WAYS))} |"
    model, kind = lines_of("predicted_errors", everything)[2:]
    cell = "**1.20** (.0120 / .0100; 0.70 to 1.44)"
    assert model == f"| Gemma-3-270M, 4,096 | {' | '.join([cell] * len(predicted.WAYS))} |"
    assert kind.startswith("| lines | **1.20** (.0120 / .0100) |")
    (line,) = lines_of("structured", everything)[2:]
    assert line == "| lines (1) | 0.5 | 0.15 | 0.1 | 1.20 | 1.20 | 1.20 |"


def test_policies_have_their_rows_beside_them(everything):
    lines = lines_of("every_policy", everything)
    assert set(lines_of("policies_inside", everything)) < set(lines)
    name = "HARD-KV 256, p = 0.9, snapkv"
    assert f"| {name} | 90 (200 → 30) | .0040 | .900 | +10.00 % |" in lines
    assert "| best 1,024 |  | .0040 | .900 | +10.00 % |" in lines


def test_counts_and_shares_of_policies_are_shown(everything):
    assert lines_of("counts", everything)[2:] == ["| Gemma-3-270M | 3 to 1,400 | 5 to 2,100 |"]
    line = "| PRKV, S = 0.5 | .800 (.800, .800) | .700 (.800, .800) |"
    assert line in lines_of("policies", everything) and line in lines_of("kept_rows", everything)


def test_what_is_lost_while_writing_is_shown(everything):
    (row,) = lines_of("while_writing", everything)[2:]
    what = "Gemma-3-270M, 3,072 to 4,096 tokens, block 64"
    assert row == f"| {what} | .800 (.800, .800) | .790 (.800, .800) | .010 |"


def test_what_the_default_reranks_stands_out(everything):
    (row,) = lines_of("long_zones_by_share", everything)[2:]
    columns = ["", *lengths.METHODS]
    cells = dict(zip(columns, row.strip("| ").split(" | "), strict=True))
    assert [name for name, cell in cells.items() if "**" in cell] == [lengths.like_default(8192)]


def test_every_case_in_which_a_peer_wins_is_named(everything):
    assert lines_of("peers_win", everything) == ["- nowhere in these runs"]
    everything.synthetic["workloads"]["all of it"]["Quest"] = 0.95
    assert lines_of("peers_win", everything) == ["- all of it: Quest .950, ParisKV .900"]


def test_a_method_is_shown_on_the_kind_of_keys_that_is_worst_for_it(everything):
    kinds = everything.synthetic["workloads"]
    kinds["no sinks"] = {**kinds["all of it"], BLOCKS: 0.7}
    _, _, first, worst = lines_of("workloads", everything)
    assert first.startswith("| all of it | .900 | .500 |")
    assert worst.startswith("| worst kind | .700: no sinks | .500: all of it |")


def test_the_worst_kind_of_answers_is_that_which_loses_most(everything):
    (run, *_) = everything.reading()
    sure = {"all": FOUND, "words": FOUND, "keys": {**FOUND, "log_probability": -1.0}}
    unsure = {**sure, "keys": {**FOUND, "log_probability": -1.25}}
    run["facts"] |= {"full attention": sure, forced.DEFAULT: unsure}
    (line,) = lines_of("facts", everything)[2:]
    assert line.startswith("| Gemma-3-270M, 4,096: 34 facts |") and "| keys (-0.25) |" in line
    run["records"] = {
        name: {"all": at["keys"], "records": at["keys"]}
        for name, at in run["facts"].items()
        if name in ("full attention", forced.DEFAULT)
    }
    cells = lines_of("tasks", everything)[2]
    assert "-1.00 / – / -1.25 | records (-0.25) |" in cells


def test_worst_steps_and_answers_stand_beside_means_once_they_are_recorded(everything):
    (run, *_) = everything.reading()
    run["text"][forced.DEFAULT] = {**KL, "kl_worst": 0.123}
    assert any("| .0040 (0.12) |" in line for line in lines_of("inside", everything))
    run["facts"]["full attention"] = {"all": {**FOUND, "worst": -9.0}}
    assert "| 30 (-1.50; -9.00) |" in lines_of("facts", everything)[2]
    run["written"]["best 512"]["worst_kl"] = [0.7]
    assert "± 0.1000 (0.7) |" in lines_of("after_short_prompts", everything)[2]
    of = everything.structured["lines"]
    of |= {name + sources.WORST: 3 * at for name, at in of.items()}
    for name in ("structured", "every_structure"):
        assert "| 0.5 (1.5) | 0.15 (0.45) | 0.1 (0.3) |" in lines_of(name, everything)[2]
    line = everything.synthetic["workloads"]["all of it"]
    line |= {name + sources.WORST: 0.25 for name in CONTENDERS}
    assert "| **.900** (.250) | .500 (.250) |" in lines_of("every_workload", everything)[2]
    assert lines_of("workloads", everything)[4].startswith("| worst step of any kind | .250 |")
    assert lines_of("peers_win", everything) == ["- nowhere in these runs"]


def test_verdicts_stand_without_their_numbers(everything):
    lines = lines_of("claims", everything)
    assert "| PRKV | S by overlap is a good S (App. G) | reproduced |" in lines
    assert lines[-1] == "| HARD-KV | merging helps (Fig. 21) | **refuted** |"


def test_numbers_are_short():
    numbers = [markdown.share(x) for x in (0.9781, -0.012, 1.0, 10.5)]
    assert numbers == [".978", "-.012", "1.000", "10.500"]
