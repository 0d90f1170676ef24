"""No call ends the engine core for everybody, and answers are those of stock vLLM."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EXACT, asked_for, run, small_engine

Work = Callable[..., dict[str, Any]]
FEW = {"num_gpu_blocks_override": 34, "max_model_len": 2048}
IN_PARTS = {"long_prefill_token_threshold": 256, "scheduling_policy": "priority"}

LITTLE = json.dumps({"dense_below": 64, "memory_budget": "10MB"})


@pytest.fixture(scope="module")
def hazard(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    @functools.cache
    def made(work: str, *, plugin: bool, asynchronous: bool = False, **options: Any) -> Any:
        arguments = {**small_engine(tiny), **FEW, **options}
        settings = arguments.pop("settings", "")
        if plugin:
            arguments.update(asked_for(json.loads(settings) if settings else EXACT))
        job = {"engine": arguments, "work": work, "asynchronous": asynchronous}
        return run(job, tmp_path_factory.mktemp("hazard"), program="hazards.py")

    return made


def test_a_reset_of_prefixes_while_a_request_runs(hazard: Work) -> None:
    ours, stock = hazard("resets", plugin=True), hazard("resets", plugin=False)
    assert ours == stock
    assert ours["resets"] == [True, True, False, False]


def test_requests_that_are_scheduled_and_preempted_in_one_step(hazard: Work) -> None:
    ours = hazard("put_off", plugin=True, **IN_PARTS)
    assert ours["put_off"] == 12, "each answers as it does alone"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_streaming_sessions_answer_as_stock_does(hazard: Work, asynchronous: bool) -> None:
    ours = hazard("session", plugin=True, asynchronous=asynchronous)
    stock = hazard("session", plugin=False)
    assert ours == stock
    assert [len(tokens) for tokens in ours["session"]] == [15, 15, 15, 5]


def test_samples_of_a_prompt_hold_no_more_rows_than_blocks_pay_for(hazard: Work) -> None:
    ours = hazard("samples", plugin=True, max_num_seqs=16, num_gpu_blocks_override=64)
    rows, paid = ours["samples"]
    assert 1000 < rows <= paid


def test_logprobs_of_prompts_wait_for_room_as_others_do(hazard: Work) -> None:
    few = {"max_num_seqs": 16, "num_gpu_blocks_override": None, "max_model_len": 1024}
    ours = hazard("bypass", plugin=True, settings=LITTLE, **few)
    assert 0 < ours["bypass"]["plain"] < 8
    assert ours["bypass"]["logprobs"] == ours["bypass"]["plain"]


def test_requests_that_wait_for_room_are_not_looked_up_in_every_step(hazard: Work) -> None:
    few = {"max_num_seqs": 64, "num_gpu_blocks_override": None, "max_model_len": 1024}
    ours = hazard("waiting", plugin=True, settings=LITTLE, **few)["waiting"]
    assert 0 < ours["running"] < 16
    assert ours["waiting"] > 50
    # One of each step, as in stock vLLM where blocks are short; and those behind it once.
    assert ours["lookups"] <= 10 + 8
    assert ours["done"] == 4, "each had its turn"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_in_the_books_ends_no_server(hazard: Work, asynchronous: bool) -> None:
    """Requests whose rows are lost fail, all others answer as stock does."""
    ours = hazard("lose", plugin=True, asynchronous=asynchronous)
    stock = hazard("lose", plugin=False)
    assert ours["lose"]["lost"] >= 1
    assert ours["lose"]["restarts"] == 1
    assert set(ours["done"]) == set(stock["done"])
    assert ours["done"]["b"] == "error"
    for name, tokens in ours["done"].items():
        assert tokens in ("error", stock["done"][name])
    assert ours["done"]["e"] == stock["done"]["e"], "it came after the error"
