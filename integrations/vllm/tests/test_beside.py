"""Models with layers of several kinds: the engine serves those of full attention, vLLM the others,
and greedy tokens are stock vLLM's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import EXACT, WORK, Job, asked_for, run, small_engine
from tiny_models import make_mixed


@dataclass(frozen=True)
class Kind:
    """few: a budget in which eight requests of 340 tokens have no room at once."""

    name: str
    full: int = 2  # layers of full attention
    others: str = "AnyImpl"  # the class that has the rest
    work: tuple[str, ...] = tuple(WORK)
    dtype: str = "float32"
    few: str = "18MB"

    @property
    def compared(self) -> list[str]:
        return [name for name in self.work if name != "reset"]


# vLLM's linear layers are bfloat16 alone on a CPU, and Triton's interpreter runs them.
HYBRID = ("shared", "stopped", "aborted", "preempted", "reset")
KINDS = [
    Kind("gemma3"),
    Kind("gptoss"),
    Kind("gemma4", 3, few="12MB"),  # one of these has no rows of its own
    Kind("qwen3next", 1, "QwenGatedDeltaNetAttention", HYBRID, "bfloat16", "5MB"),
]


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="session")
def engine(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Job:
    model = make_mixed(tmp_path_factory.mktemp("model"), kind.name)

    @functools.cache
    def made(
        *, plugin: bool, ranks: int = 1, few: bool = False, search: bool = False
    ) -> dict[str, Any]:
        arguments = {**small_engine(model), "tensor_parallel_size": ranks, "dtype": kind.dtype}
        del arguments["num_gpu_blocks_override"]  # in stock vLLM that is all of a request's groups
        if plugin:
            settings: dict[str, Any] = {"dense_below": 512} if search else {**EXACT}
            if few:
                settings["memory_budget"] = kind.few
            arguments.update(asked_for(settings))
        long = search and "ragged" not in kind.work
        job = {"engine": arguments, "work": ("ragged",) if long else kind.work}
        return run(job, tmp_path_factory.mktemp("engine"), ranks=ranks)

    return made


@pytest.mark.parametrize("few", [False, True], ids=["room", "few blocks"])
def test_tokens_are_those_of_stock_vllm(engine: Job, kind: Kind, few: bool) -> None:
    stock, ours = engine(plugin=False), engine(plugin=True, few=few)
    for work in kind.compared:
        differ = sum(one != other for one, other in zip(ours[work], stock[work], strict=True))
        # What was put off is computed anew in chunks, which 16 bits round elsewhere.
        again = kind.dtype == "bfloat16" and few and work == "preempted"
        assert differ <= (ours["preemptions"] if again else 0), work


def test_two_ranks_have_the_same_tokens(engine: Job, kind: Kind) -> None:
    if kind.dtype != "float32":
        pytest.skip("stock vLLM with two ranks adds up in 16 bits what one rank adds up in 32")
    stock, ours = engine(plugin=False), engine(plugin=True, ranks=2)
    for work in kind.compared:
        assert ours[work] == stock[work], work
    assert ours["end"][0] == ours["end"][1]


def test_the_engine_has_decoded_layers_of_full_attention_alone(engine: Job, kind: Kind) -> None:
    ours = engine(plugin=True)
    [begin], [end] = ours["begin"], ours["end"]
    assert len(begin["layers"]) == kind.full
    others = {one for name, one in begin["attention"].items() if name not in begin["layers"]}
    assert others == {kind.others}, "a class of vLLM's own"
    counted = {"ragged", "ragged_again", "shared"}.intersection(kind.work)
    made = sum(len(one) - 1 for work in counted for n in ours[work] for one in n)
    assert end["decode_tokens"] > kind.full * made
    assert end["searched_tokens"] == 0
    assert end["forks"] > 0
    assert ours["shared_cached"] > 0


def test_long_requests_are_searched(engine: Job, kind: Kind) -> None:
    ours, stock = engine(plugin=True, search=True), engine(plugin=False)
    [end] = ours["end"]
    assert 0 < end["searched_tokens"] < end["decode_tokens"]
    if "many" in kind.work:
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
