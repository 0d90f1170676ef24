"""The error of its searches in each answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import asked_for, need_gpus, run, small_engine
from pariskv_core.serving import ErrorSum, RequestErrors
from pariskv_core.vllm.connector import Errors
from pariskv_core.vllm.settings import parse

# With a longer tail it has all rows of such short zones, and nothing is estimated.
SEARCH = {"dense_below": 512, "policy": {"name": "pariskv", "tail_rows": 64, "seed": 42}}


def engine(tiny: Path, folder: Path, *, ranks: int = 1, **more: Any) -> dict[str, Any]:
    arguments = {**small_engine(tiny), "tensor_parallel_size": ranks}
    settings = {**SEARCH, **more}
    job = {
        "engine": {**arguments, **asked_for({}), "additional_config": {"pariskv": settings}},
        "work": ["told_errors"],
        "asynchronous": True,
    }
    return run(job, folder, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_that_were_searched_for_tell_their_error(
    tiny: Path, tmp_path: Path, ranks: int
) -> None:
    need_gpus(ranks)
    silent = engine(tiny, tmp_path, ranks=ranks)
    told = engine(tiny, tmp_path, ranks=ranks, report_error=True)
    assert told["told_errors"] == silent["told_errors"], "to ask for it changes nothing"
    assert silent["told"] == [None] * 4
    short, middle, long, least = told["told"]
    assert short is None and least is None, "attended to in full"
    for answer in (middle, long):
        error = answer["pariskv"]
        assert 0 < error["mean_error"] < error["worst_error"] < 1
        # The first token comes of the prompt, and the last steps are told too late.
        assert ranks * 20 <= error["searched_tokens"] <= ranks * 23
    assert middle["pariskv"]["worst_error"] != long["pariskv"]["worst_error"]


def test_ranks_have_other_heads_of_the_same_steps() -> None:
    one = Errors({"a": ErrorSum(0.2, 0.15, 2), "b": ErrorSum(0.1, 0.1, 1)})
    both = one.aggregate(Errors({"a": ErrorSum(0.4, 0.3, 2), "c": ErrorSum(0.1, 0.1, 1)}))
    assert both.of_requests["a"] == ErrorSum(0.2 + 0.4, 0.3, 4)
    assert set(both.of_requests) == {"a", "b", "c"}


def test_what_comes_behind_an_answer_is_forgotten() -> None:
    errors = RequestErrors()
    errors.add({"a": ErrorSum(0.2, 0.15, 2)})
    errors.add({"a": ErrorSum(0.1, 0.1, 1)})
    found = errors.answer("a")
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert (found.worst, found.steps) == (0.15, 3)
    errors.add({"a": ErrorSum(0.1, 0.1, 1)})
    assert errors.answer("a") is None
    assert errors.answer("never searched") is None


def test_a_policy_without_an_error_is_refused() -> None:
    assert parse({"report_error": True}).report_error
    for policy in (
        "prkv",
        {"name": "pariskv", "tail": "none"},
        {"name": "pariskv", "scorer": "votes"},
    ):
        with pytest.raises(ValueError, match="report_error: expected a policy that estimates"):
            parse({"report_error": True, "policy": policy})
    with pytest.raises(ValueError, match="report_error: expected true or false, got maybe"):
        parse({"report_error": "maybe"})
