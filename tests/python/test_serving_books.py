"""The books of a server, by themselves: what they order for a step of a scheduler."""

from __future__ import annotations

import pytest
from pariskv_core.serving import Arrival, Books, Costs, Growth, Room, Step
from pariskv_core.serving.orders import CUT, FORK

pytestmark = pytest.mark.cpu("no backend is asked")

SIZE = 4  # tokens of a block
AMPLE = Room(1 << 40, Costs())


def test_a_request_waits_for_room_beside_its_blocks() -> None:
    books = Books(SIZE, Room(100, Costs(token=1, opening=50, searched=80)))
    assert books.admits("long", 4, 60)
    assert books.admits("short", 4, 20)
    assert books.admits("short", 4, 20), "asked for twice, it counts once"
    assert not books.admits("other", 4, 1), "the long one may take 80"
    books.step(Step([], [], [Arrival("long", 4, 0, [0], 60)], {"long": 4}))
    assert books.admits("other", 4, 1), "what was noted is forgotten after a step"
    books.step(Step(["long"], [], [], {}))
    assert books.admits("other", 4, 60)


def test_what_fits_passes_a_request_that_waits_but_does_not_starve_it() -> None:
    books = Books(SIZE, Room(100, Costs(token=1, opening=50, searched=80)))

    def come_in(name: str, ended: str = "") -> None:
        arrival = Arrival(name, 4, 0, [books.running], 20)
        books.step(Step([ended] if ended else [], [], [arrival], {name: 4}))

    for number in range(2):
        assert books.admits(f"running{number}", 4, 20)
        come_in(f"running{number}")
    for number in range(8):  # they take twice what the long one needs, and leave
        assert not books.admits("long", 4, 60)
        assert not books.closed
        assert books.admits(f"short{number}", 4, 20), "there is room, and it is not its turn yet"
        come_in(f"short{number}", f"short{number - 1}" if number else "")
    assert not books.admits("long", 4, 60)
    assert books.closed
    assert not books.admits("short", 4, 20), "now it is"
    books.step(Step(["short7", "running0", "running1"], [], [], {}))
    assert books.admits("long", 4, 60)
    books.step(Step([], [], [Arrival("long", 4, 0, [0], 60)], {"long": 4}))
    assert not books.closed
    assert books.admits("short", 4, 20)


def test_a_request_that_is_gone_keeps_nobody_waiting() -> None:
    room = Room(100, Costs(token=1, opening=1000))
    room.enter("running", 4, 60)
    for number in range(6):
        assert not room.admit("long", 4, 60)
        assert room.admit(f"short{number}", 4, 20)
        room.enter(f"short{number}", 4, 20)
        room.leave(f"short{number}")
        room.settle()
    assert room.closed
    assert not room.admit("short", 4, 20), "the long one may have been asked for before"
    room.settle()
    assert room.admit("short", 4, 20), "but in this pass it was not"
    assert not room.closed


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


def test_rows_that_are_not_there_are_reported_and_their_blocks_forgotten() -> None:
    books = Books(SIZE, AMPLE)
    arrived = Arrival("a", 14, 12, [7, 8, 9, 10], 20)  # of which no sequence has a row
    orders, forgotten = books.step(Step([], [], [arrived], {"a": 2}))
    assert orders.lost == [7, 8, 9]
    assert forgotten == {7, 8, 9, 10}
    assert (orders.rows[0].stored, orders.rows[0].computed) == (0, 12)
    assert books.stores(7, 0) is False, "rows of this step are of no use"
    again, _ = books.step(Step([], [Growth("a", 14, [])], [], {"a": 1}))
    assert again.lost == [7, 8, 9, 10], "as long as it is scheduled"
    orders, _ = books.step(Step(["a"], [], [], {}))
    assert [command.kind for command in orders.commands] == ["remove"]
    assert books.counts.lost == 2


def test_lost_rows_are_taken_from_a_sequence_that_has_them() -> None:
    books = Books(SIZE, AMPLE)
    first = Arrival("first", 12, 0, [1, 2, 3], 20)
    books.step(Step([], [], [first], {"first": 12}))
    lost = Arrival("lost", 20, 16, [1, 2, 3, 9, 10], 30)  # vLLM finds a block that nobody has
    orders, _ = books.step(Step([], [Growth("first", 12, [4])], [lost], {"first": 1, "lost": 4}))
    assert orders.lost == [9], "blocks that the first request has stay as they are"
    assert orders.rows[1].stored == 12
    assert orders.commands[-1].kind == FORK


def test_a_session_goes_on_within_a_block() -> None:
    """With more input, after an answer whose last token was dropped."""
    books = Books(SIZE, AMPLE)
    books.step(Step([], [], [Arrival("s", 5, 0, [3, 4], 100)], {"s": 5}))
    books.step(Step([], [Growth("s", 5, [])], [], {"s": 1}))
    more = Arrival("s", 13, 6, [3, 4, 5, 6], 100)
    orders, _ = books.step(Step([], [], [more], {"s": 7}))
    assert orders.commands == [], "the sequence is the same, as long as it was"
    [row] = orders.rows
    assert (row.stored, row.computed, row.decodes) == (6, 6, False)
    again = Arrival("s", 16, 11, [3, 4, 5, 6], 100)  # two tokens were computed in vain
    orders, _ = books.step(Step([], [], [again], {"s": 5}))
    assert [(command.kind, command.tokens) for command in orders.commands] == [(CUT, 11)]
    assert (orders.lost, books.running) == ([], 1)
