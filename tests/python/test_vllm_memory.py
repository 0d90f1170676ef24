"""What vLLM's blocks promise beside what the engine holds, with the engine itself."""

from __future__ import annotations

import random

import pariskv_core as pk
import pytest
import torch
from pariskv_core.serving import Books, Engine, Logits
from pariskv_core.serving.sizes import Budgets, Load, Planned, engine_config, need, plan
from pariskv_core.vllm.pool import Pool
from pariskv_core.vllm.scheduling import Scheduling
from vllm_scheduler import Scheduler

pytestmark = pytest.mark.cpu("blocks of a cache on the CPU")

BLOCK = 64
SHAPE = {"layers": 1, "query_heads": 2, "kv_heads": 1, "head_dim": 64}
LOGITS = Logits(scale=0.125)


def settings(**others: object) -> dict[str, object]:
    return {"policy": pk.ParisKV(top_k=16, tail_rows=64), "threads": 1, **others}


class Served:
    """A scheduler, the books and an engine, step by step."""

    def __init__(self, planned: Planned, config: pk.Config, *, at_once: int, budget: int) -> None:
        self.scheduler = Scheduler(
            planned.blocks - 1, BLOCK, at_once=at_once, budget=budget, seed=1, late=True
        )
        self.books = Books(BLOCK, planned.make_room())
        self.scheduling = Scheduling(self.books, BLOCK, 1 << 20)
        self.scheduling.bind(Pool(self.scheduler))
        self.engine = Engine(config)
        self.steps = 0

    def step(self) -> int:
        """Bytes that the engine has in use while the step runs."""
        output = self.scheduler.schedule(self.scheduling)
        orders = self.scheduling.decide(output)
        assert not orders.lost
        self.engine.begin(orders, list(output.num_scheduled_tokens))
        tokens = sum(output.num_scheduled_tokens.values())
        if tokens:
            q = torch.randn(tokens, SHAPE["query_heads"], SHAPE["head_dim"])
            k, v = torch.randn(2, tokens, SHAPE["kv_heads"], SHAPE["head_dim"])
            out = torch.empty(tokens, SHAPE["query_heads"], SHAPE["head_dim"])
            self.engine.attend(0, q, k, v, out, LOGITS)
            assert bool(out.isfinite().all())
        self.engine.end()
        self.scheduler.done(output.num_scheduled_tokens)
        self.steps += 1
        stats = self.engine.cache.stats()
        return stats.memory.live - stats.workspace_bytes


def served(requests: int, longest: int, *, budget: int, at_once: int, **others: object) -> Served:
    """Random requests, half of which begin as another one; never more bytes than promised."""
    config = engine_config(BLOCK, **SHAPE, dtype="float32", device="cpu", **settings(**others))
    budgets = Budgets(budget)
    one = need(config, BLOCK)
    planned = plan(one, budgets, Load(longest, at_once, 512), block=BLOCK, gpu=False)
    promised = (planned.blocks - 1) * BLOCK * one.device + planned.room
    assert promised <= budget
    found = Served(planned, config, at_once=at_once, budget=512)
    chance = random.Random(2)
    documents = [[chance.randrange(9) for _ in range(longest)] for _ in range(5)]
    for number in range(requests):
        tokens = [chance.randrange(9) for _ in range(chance.randrange(1, longest // 2))]
        if number % 2:
            shared = documents[chance.randrange(5)][: chance.randrange(longest)]
            tokens = shared + tokens[: longest // 3]
        found.scheduler.add(f"r{number}", tokens[: longest - 8], chance.randrange(8))
        while len(found.scheduler.waiting) > 4:
            assert found.step() <= promised, f"step {found.steps}"
    while found.scheduler.busy(found.scheduling):
        assert found.step() <= promised
    return found


@pytest.mark.parametrize("seed", [1, 3])
def test_rows_that_several_requests_compute_stay_within_what_blocks_promise(seed: int) -> None:
    """Some read no prefix, so the same tokens are in blocks of several requests."""
    config = engine_config(BLOCK, **SHAPE, dtype="float32", device="cpu", **settings())
    one = need(config, BLOCK)
    planned = plan(one, Budgets(5 << 18), Load(400, 16, 512), block=BLOCK, gpu=False)
    rows = (planned.blocks - 1) * BLOCK * one.device
    found = Served(planned, config, at_once=16, budget=512)
    chance = random.Random(seed)
    documents = [[chance.randrange(9) for _ in range(400)] for _ in range(3)]
    for number in range(250):
        tokens = documents[chance.randrange(3)][: chance.randrange(1, 380)]
        tokens = tokens + [chance.randrange(9) for _ in range(chance.randrange(9))]
        name, answer, alone = f"r{number}", chance.randrange(8), chance.random() < 0.3
        found.scheduler.add(name, tokens, answer, skip_reading_prefix_cache=alone)
        while len(found.scheduler.waiting) > 4:
            found.step()
            assert found.engine.cache.stats().row_bytes <= rows, f"step {found.steps}"
    assert found.books.counts.hits > 50


def short_requests(count: int) -> None:
    """`make test-vllm` makes ten thousand of them."""
    found = served(count, 260, budget=7 << 17, at_once=16)
    assert found.books.counts.hits > count // 10
    assert found.scheduler.waited > 0
    assert found.scheduler.preempted > 0
    assert found.scheduler.reset()
    found.step()
    assert found.engine.cache.stats().row_bytes == 0
    assert found.engine.cache.sequences() == []


def test_short_requests_stay_within_what_blocks_promise() -> None:
    short_requests(800)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_searched_sequences_stay_within_what_blocks_promise(kv_dtype: str) -> None:
    found = served(
        40, 1600, budget=8 << 20, at_once=4, dense_below=400, local=64, update=64, kv_dtype=kv_dtype
    )
    assert found.engine.cache.stats().searched_tokens > 0
    assert found.books.counts.hits > 5


@pytest.mark.parametrize(
    "policy", [pk.HardKV(most=64), pk.PRKV(budget=128, page=16)], ids=lambda policy: type(policy)
)
def test_kept_rows_stay_within_what_blocks_promise(policy: pk.HardKV | pk.PRKV) -> None:
    found = served(40, 1600, budget=8 << 20, at_once=4, policy=policy, dense_below=400)
    assert found.engine.cache.stats().keeps > 0
    assert found.books.counts.hits > 5


def test_many_allowed_requests_stay_within_what_few_blocks_promise() -> None:
    found = served(20, 1600, budget=2 << 20, at_once=64, dense_below=400, local=64, update=64)
    assert found.engine.cache.stats().searched_tokens > 0
