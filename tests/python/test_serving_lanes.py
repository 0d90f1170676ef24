"""Rows of a captured step: real sequences first, idle ones behind them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pariskv_core as pk
import pytest
from pariskv_core.serving import Engine, Orders
from pariskv_core.serving.lanes import Lanes
from pariskv_core.serving.orders import ADD, Command, Row

pytestmark = pytest.mark.cpu("what an engine on a GPU would be told")


class Noted:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.named: list[list[int]] = []

    def batch(self, sequences: Sequence[int]) -> Any:
        return SimpleNamespace(ids=list(sequences))

    def advance(self, sequences: Sequence[int]) -> None:
        self.named.append(list(sequences))


def test_a_capture_is_over_idle_lanes_and_takes_no_memory() -> None:
    engine: Any = Noted()
    made = Lanes(engine)
    for width in (8, 8, 4, 1):  # vLLM's order; each once more for the pass before
        assert made.capture(width).ids == [pk.IDLE] * width
    assert engine.named == [], "a capture records; it is no replay"


def test_a_dummy_run_replays_idle_lanes_alone() -> None:
    engine: Any = Noted()
    made = Lanes(engine)
    made.capture(2)
    made.captured()
    made.capture(2)  # what vLLM asks for before a dummy run, once graphs are there
    assert engine.named == [[]]


def test_a_replay_names_the_sequences_in_the_order_of_the_batch() -> None:
    """And idle ones for rows of padding: how wide a graph is says which of its rows search."""
    config = pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64, threads=1)
    engine, noted = Engine(config), Noted()
    engine.lanes = Lanes(noted)  # type: ignore[arg-type]
    commands = [Command(ADD, name) for name in (7, 8, 9)]
    rows = [Row(f"r{name}", name, 5, 5, 1, 5) for name in (7, 8, 9)]
    engine.begin(Orders(commands, rows), ["r9", "r7", "r8"], replayed=4)
    assert noted.named == [[*engine.sequences.of([9, 7, 8]), pk.IDLE]]
