"""Which of the engine's sequences has the rows of a host's requests and blocks.

The host owns block numbers, and the engine owns bytes. A request has a sequence of its own. Where
the host finds a prefix among its blocks, the sequence that has the rows of the last one is forked.
A request that ended leaves its sequence parked, for as long as one of its blocks may be found.

Rows that the host counts on and no sequence has are an error of these books or of the host. It does
not end the server: the host is told of the blocks, and forgets them. The requests that have them
fail, for the host may not be able to compute rows again, and the error is counted.

The books are kept on the scheduler's side alone. They know no host's types, and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .orders import ADD, CLEAR, CUT, FORK, REMOVE, Command, Orders, Row
from .room import Room


@dataclass(frozen=True)
class Arrival:
    """A request that is scheduled for the first time, or again after it was preempted; or a
    streaming session that goes on with more input."""

    request: str
    prompt: int  # tokens to compute before it generates
    computed: int  # tokens that were found among the blocks, or a session has
    blocks: list[int]  # all of its blocks so far
    most: int  # tokens that it may grow to
    hashes: Sequence[Any] = ()  # of its whole blocks: grows with the request


@dataclass(frozen=True)
class Growth:
    """A request that was scheduled before."""

    request: str
    computed: int
    blocks: list[int]  # new ones


@dataclass(frozen=True)
class Step:
    """One decision of the host's scheduler, running requests first."""

    ended: list[str]  # finished, aborted or preempted
    grown: list[Growth]
    arrived: list[Arrival]
    tokens: dict[str, int]  # new ones of each scheduled request
    reset: bool = False  # no block is found any more but those of running requests


@dataclass(eq=False)
class Holder:
    """A sequence, and the blocks whose rows it has, by position."""

    name: int
    length: int = 0  # tokens stored
    right: int = 0  # of these, tokens before the first one that was lost
    prompt: int = 0
    most: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: Sequence[Any] = ()
    parked: bool = False
    found: int = 0  # of its first blocks, those that the host finds for their tokens


@dataclass
class Counts:
    """What has happened since the start."""

    hits: int = 0  # prefixes that were found, each of them a fork
    parked: int = 0
    dropped: int = 0  # parked sequences that were given up to make room
    lost: int = 0  # requests whose rows were not there
    restarts: int = 0  # of the books: everything was given up


class Books:
    """Turns each decision of the scheduler into orders.

    block     tokens of one of the host's blocks
    room      bounds what sequences take beside their blocks
    prefixes  whether the host looks for prefixes
    """

    def __init__(self, block: int, room: Room, *, prefixes: bool = True) -> None:
        self._block = block
        self._room = room
        self._prefixes = prefixes
        self._holders: dict[str, Holder] = {}
        self._parked: dict[int, Holder] = {}  # oldest first
        self._owners: dict[int, tuple[Holder, int]] = {}  # of a block: and its position there
        self._shrunk: dict[int, Holder] = {}  # parked, and no longer the owner of some block
        self._ahead: list[Command] = []  # of the next step: what was given up between two
        self._lost: set[int] = set()  # blocks of this step whose rows are not there
        self._next = 0
        self.counts = Counts()

    @property
    def running(self) -> int:
        return len(self._holders)

    @property
    def parked(self) -> int:
        return len(self._parked)

    @property
    def pending(self) -> bool:
        """Whether workers have to be told of something before another step is decided."""
        return bool(self._ahead)

    def knows(self, request: str) -> bool:
        return request in self._holders

    def admits(self, request: str, prompt: int, most: int) -> bool:
        """Whether there is room for a request of at most so many tokens; noted until it runs."""
        return request in self._holders or self._room.admit(request, prompt, most)

    @property
    def closed(self) -> bool:
        """Whether a request has waited for so long that none may pass it."""
        return self._room.closed

    def withdraw(self, request: str) -> None:
        """A request that was admitted waits for another reason."""
        self._room.withdraw(request)

    def stores(self, block: int, position: int, content: Any = None) -> bool | None:
        """Whether all rows of a block are stored before the step that is being scheduled.

        position, content  of the block in a prefix that was found: its place and its hash
        Returns None where no sequence has or will have them, as far as the books know.
        """
        owner = self._owner(block, position, content)
        if owner is None:
            return None
        if owner.right >= (position + 1) * self._block:
            return True
        return None if owner.parked else False

    def others(self, block: int, position: int, found: Callable[[int], int | None]) -> set[int]:
        """Blocks that are found before a stored one, and that are not those of its sequence.

        Two requests may have computed the same tokens in blocks of their own. A fork has the rows
        of one sequence alone, so blocks have to be that sequence's, or one would pay for two.

        found  of a position: the block that the host finds for the prefix
        """
        holder = self._owners[block][0]
        if holder.found > position:
            return set()
        pairs = ((found(place), holder.blocks[place]) for place in range(position))
        others = {there for there, own in pairs if there is not None and there != own}
        if not others:
            holder.found = position + 1
        return others

    def _owner(self, block: int, position: int, content: Any) -> Holder | None:
        holder, place = self._owners.get(block, (None, -1))
        if holder is None or place != position:
            return None
        if content is not None and position < len(holder.hashes):
            return holder if holder.hashes[position] == content else None
        return holder

    def step(self, step: Step) -> tuple[Orders, set[int]]:
        """The orders, and the blocks that the host has to forget."""
        commands, self._ahead = self._ahead, []
        self._lost.clear()
        forgotten: set[int] = set()
        for request in step.ended:
            self._end(request)
        if step.reset:
            for holder in list(self._parked.values()):
                self._give_up(holder, commands)
        # Before blocks change hands: one may be handed out in this step to a request that computes
        # just the rows that it had before.
        sources = {arrival.request: self._source(arrival) for arrival in step.arrived}
        rows: list[Row] = []
        for growth in step.grown:
            holder = self._holders[growth.request]
            self._hand_out(holder, growth.blocks)
            rows.append(self._row(growth.request, holder, growth.computed, step, commands))
        for arrival in step.arrived:
            holder = self._arrive(arrival, sources[arrival.request], commands)
            rows.append(self._row(arrival.request, holder, arrival.computed, step, commands))
        for row in rows:
            holder = self._holders[row.request]
            holder.length = row.stored + row.tokens
            if row.stored < row.computed:
                forgotten.update(holder.blocks[row.stored // self._block :])
            else:
                holder.right = holder.length
        self._room.settle()
        self._shorten(commands)
        forgotten |= self._make_room(commands)
        return Orders(commands, rows, sorted(self._lost)), forgotten

    def reset(self) -> set[int]:
        """Gives all parked sequences up, before another step is decided.

        Returns the blocks that the host has to forget at once.
        """
        forgotten: set[int] = set()
        for holder in list(self._parked.values()):
            forgotten |= self._give_up(holder, self._ahead)
        return forgotten

    def restart(self) -> None:
        """After an error that nothing else mends: every row is given up, and the host has to
        forget all of its blocks. Requests of the next step arrive anew."""
        self._room.clear()
        self._holders, self._parked, self._owners, self._shrunk = {}, {}, {}, {}
        self._ahead = [Command(CLEAR, -1)]
        self.counts.restarts += 1

    def _row(
        self, request: str, holder: Holder, computed: int, step: Step, commands: list[Command]
    ) -> Row:
        """The sequence is brought to what the host counts on, as far as rows are there."""
        if holder.right < computed:
            self._find_again(holder, computed, commands)
        kept = min(holder.right, computed)
        if holder.length > kept:  # a token was computed in vain, or rows are computed again
            commands.append(Command(CUT, holder.name, kept))
            holder.length = holder.right = kept
        if kept < computed:
            self.counts.lost += 1
            self._lost.update(holder.blocks[kept // self._block : -(-computed // self._block)])
        return Row(request, holder.name, kept, computed, step.tokens[request], holder.prompt)

    def _find_again(self, holder: Holder, computed: int, commands: list[Command]) -> None:
        """Rows that are lost, from whichever sequence has most of them.

        All requests fail that have a block that is reported as lost, so none may be reported that
        another sequence has.
        """
        best, most = None, holder.right // self._block
        for other in (*self._holders.values(), *self._parked.values()):
            same = 0
            limit = min(other.right, computed) // self._block
            for mine, its in zip(holder.blocks[:limit], other.blocks, strict=False):
                if mine != its:
                    break
                same += 1
            if other is not holder and same > most:
                best, most = other, same
        if best is not None:
            name, self._next = self._next, self._next + 1
            holder.length = holder.right = most * self._block
            commands.append(Command(REMOVE, holder.name))
            commands.append(Command(FORK, name, holder.length, best.name))
            holder.name = name

    def _source(self, arrival: Arrival) -> Holder | None:
        """The sequence that has the prefix that was found: a request waits until there is one."""
        last = arrival.computed // self._block - 1
        if last < 0:
            return None
        content = arrival.hashes[last] if last < len(arrival.hashes) else None
        block = arrival.blocks[last]
        return self._owners[block][0] if self.stores(block, last, content) else None

    def _arrive(self, arrival: Arrival, source: Holder | None, commands: list[Command]) -> Holder:
        holder = self._goes_on(arrival)
        if holder is None:
            self._end(arrival.request)  # one of the same name
            holder = Holder(self._next)
            self._next += 1
            self._holders[arrival.request] = holder
            if source is None:
                commands.append(Command(ADD, holder.name))
            else:
                holder.length = holder.right = arrival.computed // self._block * self._block
                self.counts.hits += 1
                commands.append(Command(FORK, holder.name, holder.length, source.name))
        holder.prompt, holder.most, holder.hashes = arrival.prompt, arrival.most, arrival.hashes
        holder.found = arrival.computed // self._block
        self._room.enter(arrival.request, arrival.prompt, arrival.most)
        self._hand_out(holder, arrival.blocks[len(holder.blocks) :])
        return holder

    def _goes_on(self, arrival: Arrival) -> Holder | None:
        """The holder of a session, which has kept its blocks while it waited for input."""
        holder = self._holders.get(arrival.request)
        if holder is None or not 0 < arrival.computed <= holder.right:
            return None
        return holder if holder.blocks == arrival.blocks[: len(holder.blocks)] else None

    def _hand_out(self, holder: Holder, blocks: Iterable[int]) -> None:
        """Blocks that are a request's from now on, be they new or found."""
        for block in blocks:
            before = self._owners.get(block)
            self._owners[block] = (holder, len(holder.blocks))
            holder.blocks.append(block)
            if before is not None and before[0].parked:
                before[0].found = 0
                self._shrunk[before[0].name] = before[0]

    def _end(self, request: str) -> None:
        holder = self._holders.pop(request, None)
        self._room.leave(request)  # also one that never came in
        if holder is None:
            return
        holder.parked = True
        whole = holder.right // self._block if self._prefixes else 0
        for position in range(whole, len(holder.blocks)):  # whole blocks alone are found
            self._disown(holder, position)
        del holder.blocks[whole:]
        self._parked[holder.name] = holder
        self._room.park(holder.name, holder.length)
        self._shrunk[holder.name] = holder
        self.counts.parked += 1

    def _disown(self, holder: Holder, position: int) -> None:
        block = holder.blocks[position]
        if self._owners.get(block) == (holder, position):
            del self._owners[block]

    def _make_room(self, commands: list[Command]) -> set[int]:
        """Gives parked sequences up, oldest first, until the others have the room they may need."""
        forgotten: set[int] = set()
        while self._parked and not self._room.suffices:
            oldest = next(iter(self._parked.values()))
            forgotten.update(self._give_up(oldest, commands))
            self.counts.dropped += 1
        return forgotten

    def _give_up(self, holder: Holder, commands: list[Command]) -> set[int]:
        """Returns its blocks, of which nothing may be found any more."""
        owned = {
            block
            for position, block in enumerate(holder.blocks)
            if self._owners.get(block) == (holder, position)
        }
        for block in owned:
            del self._owners[block]
        self._shrunk.pop(holder.name, None)
        self._remove(holder, commands)
        return owned

    def _remove(self, holder: Holder, commands: list[Command]) -> None:
        del self._parked[holder.name]
        self._room.unpark(holder.name)
        commands.append(Command(REMOVE, holder.name))

    def _shorten(self, commands: list[Command]) -> None:
        """Parked sequences end with the last block that can still be found."""
        for holder in self._shrunk.values():
            blocks = holder.blocks
            while blocks and self._owners.get(blocks[-1]) != (holder, len(blocks) - 1):
                blocks.pop()
            if not blocks:
                self._remove(holder, commands)
            elif len(blocks) * self._block < holder.length:
                holder.length = holder.right = len(blocks) * self._block
                self._room.park(holder.name, holder.length)
                commands.append(Command(CUT, holder.name, holder.length))
        self._shrunk.clear()
