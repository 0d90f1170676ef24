"""Models with layers of several kinds: the engine serves those of full attention, vLLM the others,
and greedy tokens are stock vLLM's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from conftest import EXACT, WORK, Job, asked_for, make_mixed, run, small_engine

COMPARED = [name for name in WORK if name != "reset"]
FULL_LAYERS = 2
# Of requests of 340 tokens eight at once have no room.
FEW = {"memory_budget": "18MB"}


@pytest.fixture(scope="session", params=["gemma3", "gptoss"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    model = make_mixed(tmp_path_factory.mktemp("model"), request.param)

    @functools.cache
    def made(
        *, plugin: bool, ranks: int = 1, few: bool = False, search: bool = False
    ) -> dict[str, Any]:
        arguments = {**small_engine(model), "tensor_parallel_size": ranks}
        del arguments["num_gpu_blocks_override"]  # in stock vLLM that is all of a request's groups
        if plugin:
            settings = {"dense_below": 512} if search else EXACT
            arguments.update(asked_for({**settings, **(FEW if few else {})}))
        job = {"engine": arguments, "work": WORK}
        return run(job, tmp_path_factory.mktemp("engine"), ranks=ranks)

    return made


@pytest.mark.parametrize("few", [False, True], ids=["room", "few blocks"])
@pytest.mark.parametrize("work", COMPARED)
def test_tokens_are_those_of_stock_vllm(engine: Job, work: str, few: bool) -> None:
    assert engine(plugin=True, few=few)[work] == engine(plugin=False)[work]


def test_two_ranks_have_the_same_tokens(engine: Job) -> None:
    stock, ours = engine(plugin=False), engine(plugin=True, ranks=2)
    for work in COMPARED:
        assert ours[work] == stock[work], work
    assert ours["end"][0] == ours["end"][1]


def test_the_engine_has_decoded_layers_of_full_attention_alone(engine: Job) -> None:
    ours = engine(plugin=True)
    [begin], [end] = ours["begin"], ours["end"]
    assert len(begin["layers"]) == FULL_LAYERS
    others = {kind for name, kind in begin["attention"].items() if name not in begin["layers"]}
    assert others == {"AnyImpl"}, "a class of vLLM's own"
    made = sum(len(one) - 1 for work in ("ragged", "ragged_again") for n in ours[work] for one in n)
    assert end["decode_tokens"] > FULL_LAYERS * made
    assert end["searched_tokens"] == 0
    assert end["forks"] > 0
    assert ours["shared_cached"] > 0


def test_long_requests_are_searched(engine: Job) -> None:
    ours, stock = engine(plugin=True, search=True), engine(plugin=False)
    [end] = ours["end"]
    assert 0 < end["searched_tokens"] < end["decode_tokens"]
    assert ours["many"] == stock["many"], "none of these is long"


def test_requests_are_preempted_where_the_engine_lacks_blocks(engine: Job) -> None:
    assert engine(plugin=True, few=True)["preemptions"] > 0
    assert engine(plugin=True)["preemptions"] == 0


@pytest.mark.parametrize("few", [False, True], ids=["room", "few blocks"])
def test_nothing_is_left_after_a_reset(engine: Job, few: bool) -> None:
    ours = engine(plugin=True, few=few)
    [begin], [after] = ours["begin"], ours["after_reset"]
    assert begin["sequences"] == 0 == after["sequences"]
    assert after["row_bytes"] == 0
    assert after["live_bytes"] == begin["live_bytes"]
