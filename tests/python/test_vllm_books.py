"""The plugin's books beside a scheduler that works as vLLM's does: no request loses a row."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pariskv_core.vllm.books import Arrival, Books, Growth, Step
from pariskv_core.vllm.orders import ADD, CUT, FORK, Orders
from pariskv_core.vllm.reading import step_of
from pariskv_core.vllm.room import Costs, Room
from vllm_scheduler import Scheduler

pytestmark = pytest.mark.cpu("no backend is asked")

SIZE = 4  # tokens of a block
AMPLE = Room(1 << 40, Costs())
RECORDED = sorted(Path(__file__).parent.glob("vllm_steps_*.json"))


class Engine:
    """What each sequence holds, as orders say."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def run(self, orders: Orders, tokens_of: dict[str, list[int]]) -> None:
        for command in orders.commands:
            if command.kind == ADD:
                self.rows[command.name] = []
            elif command.kind == FORK:
                assert command.tokens <= len(self.rows[command.source])
                self.rows[command.name] = self.rows[command.source][: command.tokens]
            elif command.kind == CUT:
                assert command.tokens < len(self.rows[command.name])
                del self.rows[command.name][command.tokens :]
            else:
                del self.rows[command.name]
        new = {
            row.request: tokens_of[row.request][row.computed : row.computed + row.tokens]
            for row in orders.rows
        }
        for row in orders.rows:
            mine = self.rows[row.sequence]
            assert len(mine) == row.stored
            for piece in row.missing:
                mine += new[piece.request][piece.begin : piece.begin + piece.tokens]
            assert len(mine) == row.computed
            mine += new[row.request]


def walk(
    seed: int, steps: int = 120, room: Room = AMPLE, most_sequences: int = 1 << 20
) -> tuple[Books, Scheduler]:
    chance = random.Random(seed)
    scheduler = Scheduler(
        chance.randrange(14, 40),
        SIZE,
        at_once=chance.randrange(2, 7),
        budget=chance.randrange(5, 30),
        seed=seed,
        late=chance.random() < 0.5,
    )
    books, engine = Books(SIZE, room), Engine()
    names = 0
    for _ in range(steps):
        if chance.random() < 0.5:
            names += 1
            # Two tokens make many prompts begin alike.
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 40))]
            if chance.random() < 0.6:
                tokens = [0] * chance.randrange(1, 30) + tokens[:5]
            scheduler.add(f"r{names}", tokens, chance.randrange(12))
        if chance.random() < 0.06 and scheduler.running:
            scheduler.abort(chance.choice(scheduler.running).name)
        if chance.random() < 0.1:
            scheduler.reset()
        one(scheduler, books, engine)
        assert len(engine.rows) <= most_sequences
    while scheduler.busy:
        one(scheduler, books, engine)
    assert scheduler.reset()
    one(scheduler, books, engine)
    assert engine.rows == {}, "something is left"
    assert books.running == books.parked == 0
    return books, scheduler


def one(scheduler: Scheduler, books: Books, engine: Engine) -> None:
    step = scheduler.schedule()
    tokens_of = {request.name: request.tokens for request in scheduler.running}
    orders, forgotten = books.step(step)
    scheduler.forget(forgotten)
    assert books.parked <= scheduler.blocks, "each has a block that may be found"
    engine.run(orders, tokens_of)
    for row in orders.rows:
        wanted = tokens_of[row.request][: row.computed + row.tokens]
        assert engine.rows[row.sequence] == wanted, f"{row.request} has rows of others"
    scheduler.done(step)


@pytest.mark.parametrize("begin", range(0, 400, 50))
def test_every_request_has_its_own_rows_after_every_step(begin: int) -> None:
    counts = [walk(seed) for seed in range(begin, begin + 50)]
    assert sum(books.counts.hits for books, _ in counts) > 500
    assert sum(books.counts.same_step for books, _ in counts) > 10
    assert sum(scheduler.preempted for _, scheduler in counts) > 20


def test_parked_sequences_make_room_and_requests_stay_right() -> None:
    """Room for few sequences: parked ones are given up, and vLLM forgets their blocks."""
    costs = Costs(token=1, opening=1, searched=1)
    dropped = 0
    for seed in range(60):
        books, _ = walk(seed, room=Room(7, costs), most_sequences=7)
        dropped += books.counts.dropped
    assert dropped > 60


def test_a_request_waits_for_room_beside_its_blocks() -> None:
    books = Books(SIZE, Room(100, Costs(token=1, opening=50, searched=80)))
    assert books.admits("long", 4, 60)
    assert books.admits("short", 4, 20)
    assert books.admits("short", 4, 20), "asked for twice, it counts once"
    assert not books.admits("other", 4, 1), "the long one may take 80"
    assert not books.admits("short", 4, 20), "none overtakes one that waits"
    books.step(Step([], [], [Arrival("long", 4, 0, [0], 60)], {"long": 4}))
    assert books.admits("short", 4, 20), "what was noted is forgotten after a step"
    books.step(Step(["long"], [], [], {}))
    assert books.admits("other", 4, 60)


def test_a_token_that_was_computed_in_vain_is_cut() -> None:
    books = Books(SIZE, AMPLE)
    books.step(Step([], [], [Arrival("a", 6, 0, [0, 1], 20)], {"a": 6}))
    books.step(Step([], [Growth("a", 6, [])], [], {"a": 1}))
    orders, _ = books.step(Step([], [Growth("a", 6, [])], [], {"a": 1}))
    assert [(command.kind, command.tokens) for command in orders.commands] == [(CUT, 6)]


def test_without_prefix_caching_nothing_is_parked() -> None:
    books = Books(SIZE, AMPLE, prefixes=False)
    books.step(Step([], [], [Arrival("a", 9, 0, [0, 1, 2], 20)], {"a": 9}))
    orders, _ = books.step(Step(["a"], [], [], {}))
    assert [command.kind for command in orders.commands] == ["remove"]
    assert books.parked == 0


def test_a_prefix_that_no_sequence_has_is_an_error() -> None:
    books = Books(SIZE, AMPLE)
    with pytest.raises(RuntimeError, match="no sequence has the 4 tokens"):
        books.step(Step([], [], [Arrival("a", 9, 4, [7, 8, 9], 20)], {"a": 5}))


def test_a_request_with_fewer_rows_than_vllm_says_is_an_error() -> None:
    books = Books(SIZE, AMPLE)
    books.step(Step([], [], [Arrival("a", 6, 0, [0, 1], 20)], {"a": 6}))
    with pytest.raises(RuntimeError, match="expected 9 tokens to be stored"):
        books.step(Step([], [Growth("a", 9, [])], [], {"a": 1}))


def output_of(recorded: dict[str, Any]) -> SimpleNamespace:
    """As much of a SchedulerOutput as was recorded."""
    new = [
        SimpleNamespace(**{**one, "prefill_token_ids": [0] * one["prefill_token_ids"]})
        for one in recorded["scheduled_new_reqs"]
    ]
    cached = SimpleNamespace(**recorded["scheduled_cached_reqs"])
    rest = {name: recorded[name] for name in recorded if not name.startswith("scheduled_")}
    return SimpleNamespace(**rest, scheduled_new_reqs=new, scheduled_cached_reqs=cached)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_steps_of_vllm(path: Path) -> None:
    """Decisions of vLLM's own scheduler: each row continues what its sequence holds."""
    recorded = json.loads(path.read_text())
    books, lengths = Books(recorded["block_size"], AMPLE), dict[int, int]()
    preempted = 0
    for output in recorded["steps"]:
        preempted += len(output["preempted_req_ids"])
        orders, _ = books.step(step_of(output_of(output), lambda name: 1 << 20))
        for command in orders.commands:
            if command.kind in (ADD, FORK):
                assert command.tokens <= lengths.get(command.source, 0)
                lengths[command.name] = command.tokens
            elif command.kind == CUT:
                lengths[command.name] = command.tokens
            else:
                del lengths[command.name]
        assert sorted(row.request for row in orders.rows) == sorted(output["num_scheduled_tokens"])
        for row in orders.rows:
            assert lengths[row.sequence] == row.stored
            assert row.stored + sum(piece.tokens for piece in row.missing) == row.computed
            lengths[row.sequence] = row.computed + row.tokens
    assert books.running == 0
    assert books.counts.hits == recorded["hits"] > 0
    assert books.counts.same_step > 0
    assert preempted == recorded["preempted"] > 0
