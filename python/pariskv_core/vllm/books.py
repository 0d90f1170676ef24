"""Who has which rows: vLLM's requests and blocks on one side, the engine's sequences on the other.

vLLM owns block numbers, and the engine owns bytes. A request has a sequence of its own. Where vLLM
finds a prefix among its blocks, the sequence that has the rows of the last such block is forked. A
request that ended leaves its sequence parked, for as long as vLLM may find one of its blocks.

The books are kept on the scheduler's side alone. They know nothing of vLLM's types nor of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .orders import ADD, CUT, FORK, REMOVE, Command, Orders, Piece, Row
from .room import Room


@dataclass(frozen=True)
class Arrival:
    """A request that is scheduled for the first time, or again after it was preempted."""

    request: str
    prompt: int  # tokens to compute before it generates
    computed: int  # tokens that vLLM found among its blocks
    blocks: list[int]  # all of its blocks so far
    most: int  # tokens that it may grow to


@dataclass(frozen=True)
class Growth:
    """A request that was scheduled before."""

    request: str
    computed: int
    blocks: list[int]  # new ones


@dataclass(frozen=True)
class Step:
    """One decision of vLLM's scheduler, running requests first."""

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
    prompt: int = 0
    most: int = 0
    blocks: list[int] = field(default_factory=list)
    torn: bool = False  # forked inside a block, whose rows are now there twice
    parked: bool = False


@dataclass
class Counts:
    """What has happened since the start."""

    hits: int = 0  # prefixes that were found, each of them a fork
    same_step: int = 0  # of these, prefixes whose last rows came in the same step
    parked: int = 0
    dropped: int = 0  # parked sequences that were given up to make room


class Books:
    """Turns each decision of the scheduler into orders.

    block     tokens of one of vLLM's blocks
    room      bounds what sequences take beside their blocks
    prefixes  whether vLLM looks for prefixes
    """

    def __init__(self, block: int, room: Room, *, prefixes: bool = True) -> None:
        self._block = block
        self._room = room
        self._prefixes = prefixes
        self._holders: dict[str, Holder] = {}
        self._parked: dict[int, Holder] = {}  # oldest first
        self._owners: dict[int, tuple[Holder, int]] = {}  # of a block: and its position there
        self._shrunk: dict[int, Holder] = {}  # parked, and no longer the owner of some block
        self._next = 0
        self.counts = Counts()

    @property
    def running(self) -> int:
        return len(self._holders)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def admits(self, request: str, prompt: int, most: int) -> bool:
        """Whether there is room for a request of at most so many tokens; noted until it runs."""
        return request in self._holders or self._room.admit(request, prompt, most)

    def stores(self, block: int) -> bool:
        """Whether all rows of a block are stored before the step that is being scheduled."""
        owner = self._owners.get(block)
        return owner is not None and owner[0].length >= (owner[1] + 1) * self._block

    def step(self, step: Step) -> tuple[Orders, set[int]]:
        """The orders, and the blocks that vLLM has to forget."""
        commands: list[Command] = []
        for request in step.ended:
            self._end(request)
        if step.reset:
            for holder in list(self._parked.values()):
                self._give_up(holder, commands)
        rows: dict[int, Row] = {}
        for growth in step.grown:
            holder = self._holders[growth.request]
            if holder.length > growth.computed:  # a token was computed in vain
                commands.append(Command(CUT, holder.name, growth.computed))
                holder.length = growth.computed
            self._hand_out(holder, growth.blocks)
            rows[holder.name] = self._row(growth.request, holder, growth.computed, step)
        for arrival in step.arrived:
            self._end(arrival.request)  # one of the same name: it goes on with other tokens
            holder, missing = self._arrive(arrival, rows, commands)
            row = self._row(arrival.request, holder, arrival.computed, step, missing)
            rows[holder.name] = row
        for row in rows.values():
            self._holders[row.request].length = row.computed + row.tokens
        self._room.settle()
        self._shorten(commands)
        return Orders(commands, list(rows.values())), self._make_room(commands)

    def _row(
        self,
        request: str,
        holder: Holder,
        computed: int,
        step: Step,
        missing: tuple[Piece, ...] = (),
    ) -> Row:
        if holder.length + sum(piece.tokens for piece in missing) != computed:
            raise RuntimeError(
                f"[vllm] request {request}: expected {computed} tokens to be stored, as vLLM's "
                f"scheduler says, got {holder.length}; please report this"
            )
        tokens = step.tokens[request]
        return Row(request, holder.name, holder.length, computed, tokens, holder.prompt, missing)

    def _arrive(
        self, arrival: Arrival, rows: dict[int, Row], commands: list[Command]
    ) -> tuple[Holder, tuple[Piece, ...]]:
        holder = Holder(self._next, prompt=arrival.prompt, most=arrival.most)
        self._next += 1
        self._holders[arrival.request] = holder
        self._room.enter(arrival.request, arrival.prompt, arrival.most)
        missing: tuple[Piece, ...] = ()
        if arrival.computed == 0:
            commands.append(Command(ADD, holder.name))
        else:
            missing = self._share(arrival, holder, rows, commands)
        self._hand_out(holder, arrival.blocks)
        return holder, missing

    def _share(
        self,
        arrival: Arrival,
        holder: Holder,
        rows: dict[int, Row],
        commands: list[Command],
    ) -> tuple[Piece, ...]:
        """The prefix that vLLM found: a fork of all that is stored of it, and rows that come in
        this very step."""
        last, rest = divmod(arrival.computed, self._block)
        owner = None if rest else self._owners.get(arrival.blocks[last - 1])
        if owner is None or owner[1] != last - 1:
            raise RuntimeError(
                f"[vllm] request {arrival.request}: no sequence has the {arrival.computed} tokens "
                "that vLLM found in its prefix cache; please report this"
            )
        source = owner[0]
        self.counts.hits += 1
        holder.length = min(source.length, arrival.computed)
        holder.torn = holder.length % self._block != 0
        if holder.length:
            commands.append(Command(FORK, holder.name, holder.length, source.name))
        else:
            commands.append(Command(ADD, holder.name))
        if holder.length == arrival.computed:
            return ()
        self.counts.same_step += 1
        row = rows.get(source.name)
        return () if row is None else _pieces(row, arrival.computed)

    def _hand_out(self, holder: Holder, blocks: Iterable[int]) -> None:
        """Blocks that are a request's from now on, be they new or found."""
        for block in blocks:
            before = self._owners.get(block)
            self._owners[block] = (holder, len(holder.blocks))
            holder.blocks.append(block)
            if before is not None and before[0].parked:
                self._shrunk[before[0].name] = before[0]

    def _end(self, request: str) -> None:
        holder = self._holders.pop(request, None)
        if holder is None:
            return
        self._room.leave(request)
        holder.parked = True
        whole = holder.length // self._block if self._prefixes else 0
        for position in range(whole, len(holder.blocks)):  # vLLM finds whole blocks alone
            self._disown(holder, position)
        del holder.blocks[whole:]
        self._parked[holder.name] = holder
        self._room.park(holder.name, holder.length, torn=holder.torn)
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
                holder.length = len(blocks) * self._block
                self._room.park(holder.name, holder.length, torn=holder.torn)
                commands.append(Command(CUT, holder.name, holder.length))
        self._shrunk.clear()


def _pieces(row: Row, end: int) -> tuple[Piece, ...]:
    """Tokens up to `end` that a request lacks in this step before it brings its own, and these."""
    found: list[Piece] = []
    left = end - row.stored
    for piece in (*row.missing, Piece(row.request, 0, row.tokens)):
        if left > 0:
            found.append(piece._replace(tokens=min(piece.tokens, left)))
        left -= piece.tokens
    return tuple(found)
