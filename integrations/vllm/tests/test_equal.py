"""In full attention, greedy tokens are stock vLLM's: whatever the scheduler does with requests."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import ON_GPU, WORK, Job, check_nothing_is_left, check_same, need_gpus

LAYERS = 3
COMPARED = [name for name in WORK if name != "reset"]


@pytest.fixture(scope="session", params=[1, 2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> int:
    wanted = int(request.param)
    need_gpus(wanted)
    return wanted


@pytest.fixture(scope="session")
def ours(engine: Job, ranks: int) -> dict[str, Any]:
    return engine(plugin=True, ranks=ranks)


@pytest.fixture(scope="session")
def stock(engine: Job) -> dict[str, Any]:
    return engine(plugin=False)


@pytest.mark.parametrize("work", COMPARED)
def test_tokens_are_those_of_stock_vllm(
    ours: dict[str, Any], stock: dict[str, Any], work: str
) -> None:
    check_same(ours, stock, work)


@pytest.mark.skipif(ON_GPU, reason="vLLM schedules so there unless told otherwise")
def test_tokens_are_the_same_with_asynchronous_scheduling(
    engine: Job, stock: dict[str, Any]
) -> None:
    """A step is decided before the one before it is done: one token too many is thrown away."""
    ours = engine(plugin=True, asynchronous=True)
    assert ours["asynchronous"]
    assert not stock["asynchronous"]
    for work in COMPARED:
        assert ours[work] == stock[work], work
    assert ours["end"][0]["forks"] > 0
    assert ours["after_reset"][0]["sequences"] == 0


def test_every_rank_has_decoded_every_token(ours: dict[str, Any], ranks: int) -> None:
    """Equal tokens also come of a plugin that was never loaded."""
    done = ours["end"]
    assert len(done) == ranks
    # Of a request the first token comes of its prompt.
    made = sum(len(one) - 1 for work in ("ragged", "ragged_again") for n in ours[work] for one in n)
    for rank in done:
        assert rank["decode_tokens"] > LAYERS * made
        assert rank["searched_tokens"] == 0
    assert all(rank == done[0] for rank in done), "ranks differ in their books"


def test_prefixes_are_forks(ours: dict[str, Any]) -> None:
    assert ours["shared_cached"] > 0
    for rank in ours["end"]:
        assert rank["forks"] > 0


def test_requests_were_preempted(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    assert ours["preemptions"] > 0
    assert ours["preemptions"] == stock["preemptions"], "the scheduler decided otherwise"


def test_memory_is_back_where_it_began_after_a_reset(ours: dict[str, Any]) -> None:
    for begin, after in zip(ours["begin"], ours["after_reset"], strict=True):
        check_nothing_is_left(begin, after)


def test_stock_vllm_is_unchanged_while_the_plugin_is_off(
    engine: Job, stock: dict[str, Any]
) -> None:
    without = engine(plugin=False, plugins="")  # not even loaded
    for work in COMPARED:
        check_same(without, stock, work)
    assert stock["begin"] == without["begin"]
    if not ON_GPU:
        assert stock == without
        assert stock["begin"] == [{"attention": ["CPUAttentionBackendImpl"]}]
