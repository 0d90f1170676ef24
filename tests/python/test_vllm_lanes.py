"""Rows of a captured step under vLLM: real sequences first, idle ones behind them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pariskv_core as pk
import pytest
from pariskv_core.vllm.lanes import _LONGEST, Lanes
from pariskv_core.vllm.orders import ADD, Command, Orders, Piece, Row
from pariskv_core.vllm.rank import Rank

pytestmark = pytest.mark.cpu("what an engine on a GPU would be told")


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.named: list[list[int]] = []
        self.cut: list[tuple[list[int], int]] = []
        self.count = 100

    def add(self) -> int:
        self.count += 1
        return self.count

    def batch(self, sequences: Sequence[int]) -> Any:
        return SimpleNamespace(ids=list(sequences))

    def advance(self, sequences: Sequence[int]) -> None:
        self.named.append(list(sequences))

    def truncate(self, sequences: Sequence[int], *, keep: int) -> None:
        self.cut.append((list(sequences), keep))


def lanes() -> tuple[Lanes, Engine]:
    engine: Any = Engine()
    return Lanes(engine), engine


def test_a_capture_is_over_idle_lanes_that_are_empty_afterwards() -> None:
    made, engine = lanes()
    for width in (8, 8, 4, 1):  # vLLM's order; each once more for the pass before
        assert len(made.capture(width).ids) == width
    assert made.idle == 8
    made.captured()
    assert engine.cut == [([101, 102, 103, 104, 105, 106, 107, 108], 0)]
    assert engine.named == [], "a capture records; it is no replay"


def test_idle_lanes_fill_a_step_up_to_the_width_of_its_graph() -> None:
    made, engine = lanes()
    made.widen(4)
    made.advance([1, 2, 3])
    made.widen(2)
    made.advance([3, 1])
    assert engine.named == [[1, 2, 3, 101], [3, 1]]


def test_idle_lanes_are_cut_before_they_grow_long() -> None:
    made, engine = lanes()
    for _ in range(3 * _LONGEST):
        made.rest()
        made.widen(2)
        made.advance([1])
    assert engine.cut == [([101], 0), ([101], 0)]
    made.widen(1)
    made.advance([1])
    made.rest()
    assert len(engine.cut) == 3, "it had grown by as much once more"


def test_a_dummy_run_replays_idle_lanes_alone() -> None:
    made, engine = lanes()
    made.capture(2)
    made.captured()
    made.capture(2)  # what vLLM asks for before a dummy run, once graphs are there
    assert engine.named == [[101, 102]]


def test_a_replay_names_the_sequences_in_the_order_of_the_batch() -> None:
    config = pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64, threads=1)
    rank, named = Rank(config), []
    rank.lanes.advance = lambda sequences: named.append(list(sequences))  # type: ignore[method-assign]
    commands = [Command(ADD, name) for name in (7, 8, 9)]
    rows = [Row(f"r{name}", name, 5, 5, 1, 5) for name in (7, 8, 9)]
    rank.begin(Orders(commands, rows), ["r9", "r7", "r8"], replay=True)
    assert named == [rank.sequences.of([9, 7, 8])]
    torn = Row("r7", 7, 4, 5, 1, 6, (Piece("r8", 0, 1),))
    with pytest.raises(RuntimeError, match="expected rows whose prefix is stored"):
        rank.begin(Orders([], [torn, *rows[1:]]), ["r7", "r8", "r9"], replay=True)
