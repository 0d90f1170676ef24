"""What bench_cuda.py shows and what a results file holds: measured beside what was asked."""

from __future__ import annotations

import json
from typing import Any

import gpu_table
import harness
import pytest

RATES = {"copy": 4e12, "to_host": 5e10, "from_host": 5e10}


def decode(batch: int, tokens: int, microseconds: float, **dense: Any) -> dict[str, Any]:
    return {"batch": batch, "tokens": tokens, "microseconds": microseconds, **dense}


def rows(queries: str, row_cache: int, microseconds: float) -> dict[str, Any]:
    step = {**decode(1, 131_072, microseconds), "top_k": 2048, "found_share": 0.84}
    return {**step, "queries": queries, "row_cache": row_cache, "overlap": 0.8}


def walked(median: float) -> dict[str, Any]:
    times = {"median": median, "p99": 2 * median, "p99.9": 3 * median, "slowest": 4 * median}
    clock = {"all": times, "far": times, "flushing": times}
    return {"flushes": 8, "wall": clock, "device": clock}


@pytest.fixture
def results() -> dict[str, Any]:
    verb = {"batch": 1, "microseconds": 20.0, "bytes": 40_000_000}
    prefill = {"call_seconds": 0.001, "own_work_seconds": 0.002, "whole_seconds": 0.01}
    return {
        "settings": {},
        "bandwidths": RATES,
        "empty_graph_microseconds": 2.5,
        "decode": [
            decode(1, 32_768, 40.0, dense=50.0, dense_by="flash, folded"),
            decode(8, 524_288, 300.0),
        ],
        "auto": [
            {**decode(64, 2048, 217.0), "live_share": 1.04, "reserved_share": 1.24}
            | {"dense": 180.0, "dense_by": "cuDNN"},
            {**decode(16, 32_768, 200.0), "live_share": 1.2, "reserved_share": 1.3},
        ],
        "mixtures": [
            {"parts": [(1, 131_072), (63, 2048)], "alone": [61.0, 218.0], "together": 280.0}
        ],
        "rows": [rows(q, c, 70.0 + c) for q in ("new", "steady") for c in (0, -1)],
        "prefill": [
            {"tokens": 131_072, "placement": "host", "offloaded_bytes": 450_000_000, **prefill},
            {"tokens": 131_072, "placement": "device", "offloaded_bytes": 0, **prefill},
        ],
        "attend": [
            {"tokens": 32_768, "queries": 2048, "exact": 2700.0, "fast": 1800.0}
            | {"dense": 1600.0, "dense_by": "cuDNN, copied"},
            {"tokens": 131_072, "queries": 2048, "exact": 11200.0, "fast": 7200.0},
        ],
        "flushes": {"tokens": 32_768, "eager": walked(1e-4), "graph": walked(8e-5)},
        "verbs": [
            {**verb, "verb": "encode", "scorer": "votes", "tokens": 131_072},
            {**verb, "verb": "offload", "tokens": 131_072},
        ],
    }


@pytest.fixture
def shown(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[list[str]]:
    """The cells of every line, on paper wide enough for each to be one."""
    monkeypatch.setattr(harness, "PIPED_WIDTH", 200)
    gpu_table.show(results)
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def cells_of(shown: list[list[str]], first: str) -> list[str]:
    [line] = [cells for cells in shown if cells[:1] == [first]]
    return line


def test_a_step_is_shown_beside_target_floor_and_dense_attention(shown):
    line = cells_of(shown, "1 × 32K")
    assert line[:4] == ["1 × 32K", "40.0", "30", "25"]
    assert line[-4:] == ["50", "1.25 ×", "1.35 ×", "flash, folded"]


def test_a_batch_without_room_for_dense_attention_is_marked(shown):
    assert cells_of(shown, "8 × 512K")[-1] == "does not fit"


def test_short_sequences_are_shown_beside_dense_attention_and_its_memory(shown):
    line = cells_of(shown, "64 × 2K")
    assert line[1:] == ["217.0", "180", "1.21 ×", "≤ 1.05 × torch", "1.04", "1.24"]
    line = cells_of(shown, "16 × 32K")
    assert line[1:] == ["200.0", "does not fit", "≤ 210", "1.20", "1.30"]


def test_a_mixture_is_shown_beside_the_sum_of_its_parts(shown):
    line = cells_of(shown, "1 × 128K and 63 × 2K")
    assert line[1:] == ["61 + 218", "280", "1.00 ×", "≤ 1 ×"]


def test_rows_that_come_again_are_shown_without_and_with_a_row_cache(shown):
    line = cells_of(shown, "1 × 128K, 2,048")
    assert line[1:] == ["70.0", "69.0", "70.0", "69.0", "230 / 110", "80 %", "84 %"]


def test_an_offload_is_compared_with_the_bus(shown):
    assert cells_of(shown, "host")[1:] == ["1.00", "2.00", "10.00", "45.0", "90 %"]
    assert cells_of(shown, "device")[1:] == ["1.00", "2.00", "10.00"]


def test_several_tokens_at_once_are_shown_beside_dense_attention(shown):
    line = cells_of(shown, "2,048 × 32,768")
    assert line[1:] == ["2.70", "1.80", "1.60", "cuDNN, copied", "1.12"]
    assert cells_of(shown, "2,048 × 131,072")[1:] == ["11.20", "7.20"]


def test_steps_across_flushes_are_shown_by_both_clocks(shown):
    for how, median in (("eager, host", "100.0"), ("graph, GPU", "80.0")):
        assert cells_of(shown, how)[1:3] == [median, f"{3 * float(median):.1f}"]


def test_verbs_are_shown_with_their_rate_and_target(shown):
    assert cells_of(shown, "encode votes")[-3:] == ["2,000", "50 % copy", "175 µs"]
    assert cells_of(shown, "offload")[-1] == "90 %"


def test_sections_that_were_not_measured_are_left_out(results, capsys):
    gpu_table.show({name: results[name] for name in ("bandwidths", "empty_graph_microseconds")})
    assert capsys.readouterr().out == ""


# --- The file ------------------------------------------------------------------------------------


def test_a_results_file_is_a_line_for_each_measurement(results, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.save("cuda", results, on="NVIDIA H200", facts={"gpu": "NVIDIA H200"})
    [path] = tmp_path.iterdir()
    assert path.name == "cuda-nvidia-h200.json"
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    assert record["results"] == json.loads(harness.as_text(results))
    assert {"cpu", "gpu", "commit", "command", "time"} <= set(record["environment"])
    whole = [
        json.loads(line.strip().rstrip(",")) for line in text.splitlines() if '"batch"' in line
    ]
    sections = ("decode", "auto", "rows", "verbs")
    assert whole == [line for section in sections for line in results[section]]


def test_numbers_in_a_results_file_have_a_few_digits():
    text = harness.as_text(
        {"rate": 4254667036561.9497, "time": [40.06399959, (1, 0.1)], "of": 2**40}
    )
    assert json.loads(text) == {"rate": 4254667e6, "time": [40.064, [1, 0.1]], "of": 2**40}
