"""The table of bench_cuda.py: what was asked stands beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_table
import pytest

pytestmark = pytest.mark.cpu("a table of results that are there")

RESULTS = Path(__file__).resolve().parents[2] / "bench/results/cuda-nvidia-h200.json"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["results"]


def test_every_verb_that_has_a_target_shows_it(results):
    rows = [gpu_table._verb_row(line, results["bandwidths"]) for line in results["verbs"]]
    asked = {(row[0], row[1]): row[-1] for row in rows if row[-1]}
    assert asked == {
        ("scan sign_norm", "1 × 1M"): "70 %",
        ("scan votes", "1 × 1M"): "55 %",
        ("encode sign_norm", "1 × 128K"): "175 µs",
        ("encode votes", "1 × 128K"): "175 µs",
        ("offload", "1 × 128K"): "90 %",
    }


def test_every_length_that_has_a_target_is_measured(results):
    measured = {(line["batch"], line["tokens"]) for line in results["decode"]}
    assert measured == set(gpu_table._ASKED)
    rows = [(line["batch"], line["top_k"]) for line in results["rows"]]
    assert set(gpu_table._ROWS_ASKED) <= set(rows)


def test_every_part_is_shown(results, capsys):
    gpu_table.show(results)
    shown = capsys.readouterr().out
    for title in ("A decode step", "Rows that are selected", "Prefill", "Steps across", "Verbs"):
        assert title in shown
