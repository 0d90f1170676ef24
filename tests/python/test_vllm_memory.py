"""What vLLM's blocks promise beside what the engine holds, with the engine itself."""

from __future__ import annotations

import random

import pariskv_core as pk
import pytest
import torch
from pariskv_core.vllm.books import Books
from pariskv_core.vllm.names import Pool
from pariskv_core.vllm.rank import Logits, Rank
from pariskv_core.vllm.room import Costs, Room
from pariskv_core.vllm.scheduling import Scheduling
from pariskv_core.vllm.sizes import Budgets, Load, Planned, Shape, engine_config, need, plan
from vllm_scheduler import Scheduler

pytestmark = pytest.mark.cpu("blocks of a cache on the CPU")

BLOCK = 64
SHAPE = Shape(layers=1, query_heads=2, kv_heads=1, head_dim=64, item=4)
LOGITS = Logits(scale=0.125)


def settings(**others: object) -> dict[str, object]:
    return {"policy": pk.ParisKV(top_k=16, tail_rows=64), "threads": 1, **others}


class Served:
    """A scheduler, the books and a rank, step by step."""

    def __init__(self, planned: Planned, config: pk.Config, *, at_once: int, budget: int) -> None:
        self.scheduler = Scheduler(
            planned.blocks - 1, BLOCK, at_once=at_once, budget=budget, seed=1, late=True
        )
        self.books = Books(BLOCK, planned.make_room())
        self.scheduling = Scheduling(self.books, BLOCK, 1 << 20)
        self.scheduling.bind(Pool(self.scheduler))
        self.rank = Rank(config)
        self.steps = 0

    def step(self) -> int:
        """Bytes that the engine has in use while the step runs."""
        output = self.scheduler.schedule(self.scheduling)
        orders = self.scheduling.decide(output)
        assert not orders.lost
        self.rank.begin(orders, list(output.num_scheduled_tokens))
        tokens = sum(output.num_scheduled_tokens.values())
        if tokens:
            q = torch.randn(tokens, SHAPE.query_heads, SHAPE.head_dim)
            k, v = torch.randn(2, tokens, SHAPE.kv_heads, SHAPE.head_dim)
            out = torch.empty(tokens, SHAPE.query_heads, SHAPE.head_dim)
            self.rank.attend(0, q, k, v, out, LOGITS)
            assert bool(out.isfinite().all())
        self.rank.end()
        self.scheduler.done(output.num_scheduled_tokens)
        self.steps += 1
        stats = self.rank.cache.stats()
        return stats.memory.live - stats.workspace_bytes


def served(requests: int, longest: int, *, budget: int, at_once: int, **others: object) -> Served:
    """Random requests, half of which begin as another one; never more bytes than promised."""
    config = engine_config(SHAPE, "float32", "cpu", BLOCK, settings(**others))
    budgets = Budgets(budget)
    one = need(SHAPE, config, BLOCK)
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
    config = engine_config(SHAPE, "float32", "cpu", BLOCK, settings())
    one = need(SHAPE, config, BLOCK)
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
            assert found.rank.cache.stats().row_bytes <= rows, f"step {found.steps}"
    assert found.books.counts.hits > 50


def short_requests(count: int) -> None:
    """`make test-vllm` makes ten thousand of them."""
    found = served(count, 260, budget=7 << 17, at_once=16)
    assert found.books.counts.hits > count // 10
    assert found.scheduler.waited > 0
    assert found.scheduler.preempted > 0
    assert found.scheduler.reset()
    found.step()
    assert found.rank.cache.stats().row_bytes == 0
    assert found.rank.cache.sequences() == []


def test_short_requests_stay_within_what_blocks_promise() -> None:
    short_requests(800)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_searched_sequences_stay_within_what_blocks_promise(kv_dtype: str) -> None:
    found = served(
        40, 1600, budget=8 << 20, at_once=4, dense_below=400, local=64, update=64, kv_dtype=kv_dtype
    )
    assert found.rank.cache.stats().searched_tokens > 0
    assert found.books.counts.hits > 5


@pytest.mark.parametrize(
    "policy", [pk.HardKV(most=64), pk.PRKV(budget=128, page=16)], ids=lambda policy: type(policy)
)
def test_kept_rows_stay_within_what_blocks_promise(policy: pk.HardKV | pk.PRKV) -> None:
    found = served(40, 1600, budget=8 << 20, at_once=4, policy=policy, dense_below=400)
    assert found.rank.cache.stats().keeps > 0
    assert found.books.counts.hits > 5


def test_a_budget_that_a_request_does_not_fit_is_refused() -> None:
    config = engine_config(SHAPE, "float32", "cpu", BLOCK, settings())
    one = need(SHAPE, config, BLOCK)
    with pytest.raises(ValueError, match=r"a request of 100,000 tokens takes .* raise memory_b"):
        plan(one, Budgets(1 << 20), Load(100_000, 8, 512), block=BLOCK, gpu=False)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_budget_that_one_request_fits_serves_one(place: str) -> None:
    """However many are allowed: half of a budget is not kept from its blocks."""
    longest, gpu = 100_000, place == "cuda"
    config = engine_config(SHAPE, "float32", place, BLOCK, settings())
    one = need(SHAPE, config, BLOCK, longest)
    load = Load(longest, 1024, 512)
    whole = -(-longest // BLOCK) * BLOCK
    taken = whole * one.device + one.costs.of(longest)
    taken += (one.costs.opening + load.chunk) * one.costs.token
    host = 21 * whole * one.host // 20 + 1000
    budget = 20 * (taken + (512 << 20 if gpu else 0)) // 19 + 1000
    made = plan(one, Budgets(budget, host), load, block=BLOCK, gpu=gpu)
    assert (made.blocks - 1) * BLOCK >= longest
    assert made.make_room().admit("one", longest, longest)
    with pytest.raises(ValueError, match="raise memory_budget"):
        plan(one, Budgets(budget - taken // 10, host), load, block=BLOCK, gpu=gpu)


def test_many_allowed_requests_stay_within_what_few_blocks_promise() -> None:
    found = served(20, 1600, budget=2 << 20, at_once=64, dense_below=400, local=64, update=64)
    assert found.rank.cache.stats().searched_tokens > 0


@pytest.mark.parametrize("placement", ["auto", "host"])
def test_on_a_gpu_both_budgets_count(placement: str) -> None:
    fields = {"policy": pk.ParisKV(), "placement": placement}
    config = engine_config(SHAPE, "float16", "cuda", BLOCK, fields)
    one = need(SHAPE, config, BLOCK)
    assert one.host > 3 * one.device, "rows are in host memory, summaries on the GPU"

    def blocks(device: int, host: int) -> int:
        budgets = Budgets(device, host)
        made = plan(one, budgets, Load(16_384, 8, 2048), block=BLOCK, gpu=True)
        tokens = (made.blocks - 1) * BLOCK
        assert tokens * one.device + made.room <= device
        if placement == "host":
            assert tokens * one.host <= host
        else:  # what host memory has no room for stays on the GPU
            assert tokens * (one.device + one.host) + made.beside <= device + host
            assert tokens * one.host > host or host > device
        return made.blocks

    there = need(SHAPE, config.replace(placement="device"), BLOCK)
    assert there.host == 0
    assert there.device >= one.device + one.host - 1
    small, large = 2 << 30, 8 << 30
    assert blocks(large, 1 << 26) < blocks(large, 1 << 27)
    assert blocks(small, 1 << 40) < blocks(large, 1 << 40)


def admitted(longest: int, tokens: int, requests: int) -> int:
    """How many requests of so many tokens one H100 beside 96 GB lets in at once."""
    shape = Shape(layers=32, query_heads=32, kv_heads=8, head_dim=128, item=2)
    fields = {"policy": pk.ParisKV(), "placement": "auto"}
    config = engine_config(shape, "float16", "cuda", 128, fields)
    one = need(shape, config, 128, longest)
    made = plan(
        one, Budgets(50 << 30, 96 << 30), Load(longest, requests, 8192), block=128, gpu=True
    )
    room, blocks = made.make_room(), made.blocks - 1
    count = 0
    while count < requests and blocks >= -(-tokens // 128):
        if not room.admit(f"r{count}", tokens, tokens):
            break
        blocks -= -(-tokens // 128)
        count += 1
    return count


def test_rows_of_short_requests_are_counted_once() -> None:
    # 4,096 tokens take 537 MB: 50 GB have room for more than 64, and for 40 beside summaries.
    assert admitted(4128, 4096, 64) == 64
    assert 40 <= admitted(131_072, 4096, 64) < 64
    assert admitted(131_072, 130_000, 64) == 6  # 20 GB each, of 135


def test_what_no_block_pays_for_has_a_sum_of_its_own() -> None:
    room = Room(100, Costs(token=1, opening=50, searched=30, beside=20), beside=45)
    assert room.admit("long", 80, 80)
    assert room.admit("another", 80, 80)
    assert not room.admit("third", 80, 80)  # 60 of 45 bytes
    room.settle()
    room.enter("long", 80, 80)
    assert room.admit("short", 10, 40)  # of blocks, all of it
    assert not room.admit("too much", 10, 45)
