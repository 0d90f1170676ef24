"""The plugin's books beside a scheduler that works as vLLM's does: no request loses a row."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pariskv_core.serving import Books, Costs, Orders, Room
from pariskv_core.serving.orders import ADD, CLEAR, CUT, FORK, REMOVE
from pariskv_core.vllm.names import step_of
from pariskv_core.vllm.pool import Pool
from pariskv_core.vllm.scheduling import Scheduling
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
            elif command.kind == REMOVE:
                del self.rows[command.name]
            else:
                self.rows.clear()
        for row in orders.rows:
            mine = self.rows[row.sequence]
            assert len(mine) == row.stored
            mine += tokens_of[row.request][row.computed : row.computed + row.tokens]


class World:
    """A scheduler, the plugin's side of it, and what an engine would hold."""

    def __init__(self, seed: int, room: Room, **others: Any) -> None:
        chance = random.Random(seed)
        drawn: dict[str, Any] = {
            "blocks": chance.randrange(14, 40),
            "at_once": chance.randrange(2, 7),
            "budget": chance.randrange(5, 30),
            "late": chance.random() < 0.5,
        }
        self.scheduler = Scheduler(size=SIZE, seed=seed, **{**drawn, **others})
        self.books = Books(SIZE, room)
        self.scheduling = Scheduling(self.books, SIZE, 1 << 20)
        self.scheduling.bind(Pool(self.scheduler))
        self.engine = Engine()
        self.orders = Orders()

    def step(self) -> None:
        output = self.scheduler.schedule(self.scheduling)
        tokens_of = {request.request_id: request.tokens for request in self.scheduler.running}
        self.orders = orders = self.scheduling.decide(output)
        assert self.books.parked <= len(self.scheduler.blocks), "each has a block to be found"
        self.engine.run(orders, tokens_of)
        for row in orders.rows:
            wanted = tokens_of[row.request][: row.computed + row.tokens]
            assert self.engine.rows[row.sequence] == wanted, f"{row.request} has rows of others"
        assert not orders.lost
        self.scheduler.done(output.num_scheduled_tokens)


def walk(
    seed: int, steps: int = 120, room: Room = AMPLE, most_sequences: int = 1 << 20, **others: Any
) -> World:
    chance, world, names = random.Random(seed), World(seed, room, **others), 0
    scheduler = world.scheduler
    for _ in range(steps):
        if chance.random() < 0.5:
            names += 1
            # Two tokens make many prompts begin alike.
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 40))]
            if chance.random() < 0.6:
                tokens = [0] * chance.randrange(1, 30) + tokens[:5]
            skips = chance.random() < 0.1
            answer = chance.randrange(12)
            scheduler.add(f"r{names}", tokens, answer, skip_reading_prefix_cache=skips)
        if chance.random() < 0.06 and scheduler.running:
            scheduler.abort(chance.choice(scheduler.running).request_id)
        if chance.random() < 0.1:
            scheduler.reset()
        if chance.random() < 0.05:
            world.scheduling.reset()  # of the connector alone, while requests run
        world.step()
        assert len(world.engine.rows) <= most_sequences
    while scheduler.busy(world.scheduling):
        world.step()
    assert scheduler.reset()
    world.step()
    assert world.engine.rows == {}, "something is left"
    assert world.books.running == world.books.parked == 0
    assert world.books.counts.lost == world.books.counts.restarts == 0
    return world


@pytest.mark.parametrize("begin", range(0, 400, 50))
def test_every_request_has_its_own_rows_after_every_step(begin: int) -> None:
    worlds = [walk(seed) for seed in range(begin, begin + 50)]
    assert sum(world.books.counts.hits for world in worlds) > 500
    assert sum(world.scheduler.waited for world in worlds) > 10, "for a prefix of the same step"
    assert sum(world.scheduler.preempted for world in worlds) > 20


def test_blocks_that_were_scheduled_in_vain_are_not_found() -> None:
    """vLLM leaves their hashes where a request is preempted in the step that has scheduled it."""
    worlds = [walk(seed, longest_goes=True, chunk=9, budget=60) for seed in range(150)]
    assert sum(world.scheduler.in_vain for world in worlds) > 20
    assert sum(world.scheduling.forgotten for world in worlds) > 20


def test_parked_sequences_make_room_and_requests_stay_right() -> None:
    """Room for few sequences: parked ones are given up, and vLLM forgets their blocks."""
    costs = Costs(token=1, opening=1, searched=1)
    dropped = 0
    for seed in range(60):
        world = walk(seed, room=Room(7, costs), most_sequences=7)
        dropped += world.books.counts.dropped
    assert dropped > 60


def test_an_error_in_the_books_gives_up_what_is_stored_and_no_more() -> None:
    world = World(3, AMPLE)
    for number in range(3):
        world.scheduler.add(f"r{number}", [number % 2] * 21, 30)
    while len(world.scheduler.running) < 2:
        world.step()
    world.books._holders.popitem()
    world.books._owners.clear()
    world.books._parked = {1: None}  # type: ignore[dict-item]
    world.scheduler.abort(world.scheduler.running[0].request_id)
    output = world.scheduler.schedule(world.scheduling)
    orders = world.scheduling.decide(output)
    assert orders.commands[0].kind == CLEAR
    assert orders.lost, "of requests that run"
    assert world.scheduler.cached_block_hash_to_block == {}, "no prefix is found any more"
    assert world.scheduling.errors()["restarts"] == 1
    assert world.scheduling.errors() == {}, "it is counted once"


def test_what_waits_for_room_is_looked_up_once_in_a_step() -> None:
    world = World(1, Room(2, Costs(token=1, opening=1, searched=1)), blocks=80)
    for number in range(40):
        world.scheduler.add(f"r{number}", [0] * 30 + [number] * 3, 50)
    for _ in range(20):
        world.step()
    before = world.scheduler.lookups
    for _ in range(10):
        world.step()
    assert world.books.running == 2
    assert world.scheduler.lookups <= before + 10


def test_what_reads_no_prefix_waits_for_room_too() -> None:
    world = World(1, Room(2, Costs(token=1, opening=1, searched=1)))
    for number in range(8):
        world.scheduler.add(f"r{number}", [number] * 3, 9, skip_reading_prefix_cache=True)
    while world.scheduler.busy(world.scheduling):
        world.step()
        assert world.books.running <= 2
        assert all(request.skip_reading_prefix_cache for request in world.scheduler.waiting)


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
        orders, _ = books.step(step_of(output_of(output), lambda name: None))
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
            assert row.stored == row.computed
            lengths[row.sequence] = row.computed + row.tokens
    assert books.running == 0
    assert books.counts.hits == recorded["hits"] > 0
    assert preempted == recorded["preempted"] > 0
