"""How many of a host's blocks two budgets pay for, so that no step can run out of memory.

Bytes are those of `Config.footprint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pariskv_core as pk

from .room import Costs, Room

BLOCK = 128  # tokens of a block where nobody asks for others
_SLACK = 20  # one part in so many of a budget is left to slabs that are not full
_WORKSPACE = 512 << 20  # of a GPU: scratch, and windows of rows that pass by


@dataclass(frozen=True)
class Budgets:
    """Bytes of one rank. device: of a GPU's memory, or on a CPU all there is."""

    device: int
    host: int = 0


@dataclass(frozen=True)
class Need:
    """Bytes, of all layers of a rank.

    device, host  of a token in a block
    stays         what host memory has no room for may stay on the GPU
    call          a call that changes all layers of one sequence, beyond what `costs` count
    """

    device: int
    host: int
    costs: Costs
    stays: bool = False
    call: int = 0

    def most_tokens(self, device: int, host: int) -> int:
        """That these have room for."""
        tokens = device // self.device
        if self.host == 0:
            return tokens
        if self.stays:
            return min(tokens, (device + host) // (self.device + self.host))
        return min(tokens, host // self.host)

    def on_device(self, tokens: int, host: int) -> int:
        """Bytes on the GPU of so many tokens beside so much host memory."""
        return tokens * self.device + max(tokens * self.host - host, 0)


@dataclass(frozen=True)
class Planned:
    blocks: int  # one of them is the host's null block
    room: int  # bytes on the device for what `costs` counts
    costs: Costs
    beside: int | None = None  # of these, bytes for what no block pays for; None: as many

    def make_room(self) -> Room:
        return Room(self.room, self.costs, self.beside)


def need(config: pk.Config, block: int, longest: int | None = None) -> Need:
    """What tokens and sequences take, of requests of up to `longest` tokens; None: of any."""
    most = {} if longest is None else {"longest": longest}
    grows = config.footprint(sequences=0, tokens=block, **most)
    each = config.footprint(sequences=1, tokens=0, multiple=block, **most)
    plain = config.footprint(longest=1, sequences=0, tokens=block).device
    # Rows of zones lie in host memory beside a GPU, as far as its own memory has no room.
    elsewhere = grows.host + grows.either
    beside = each.device - each["resident rows"] - each["opening rows"]
    call = 0
    if config.device == "cpu":  # most calls change one layer, on a GPU a step all of them
        call = each["changes"] - each["changes"] // config.layers
        beside -= call
    if grows.either and longest is not None and longest < config.searched_from:
        # None is ever searched, so all rows stay.
        costs = Costs(opening=1, searched=beside, beside=beside)
        return Need(_each(grows.device + elsewhere, block), 0, costs)
    # Until a zone has opened rows are as they came, and cannot leave.
    near = each["resident rows"] + each["opening rows"]
    costs = Costs(
        token=(plain if elsewhere else plain - grows["rows"]) // block,
        opening=max(config.searched_from, _each(near * block, plain), 1),
        searched=beside + each["resident rows"],
        beside=beside,
    )
    device = max(_each(grows.device, block), 1)  # some policies keep nothing for a token
    return Need(device, _each(elsewhere, block), costs, grows.either > 0, call)


def _each(size: int, count: int) -> int:
    return -(-size // count)


@dataclass(frozen=True)
class Load:
    """What may come at once.

    longest    tokens of a request
    sequences  requests
    chunk      new tokens of a step
    prompts    that come in chunks side by side
    """

    longest: int
    sequences: int
    chunk: int
    prompts: int = 1


def plan(one: Need, budgets: Budgets, load: Load, *, block: int, gpu: bool) -> Planned:
    """Blocks for budgets; refused where a request of the longest length has no room."""
    longest, sequences = load.longest, load.sequences
    device, host = _usable(budgets, gpu=gpu)
    device -= (load.prompts * one.costs.opening + load.chunk) * one.costs.token + one.call
    largest = one.costs.of(longest)
    # Half of a budget at most goes to what is no block, and no more than one request leaves.
    each = one.costs.most(longest).beside if one.stays else largest
    left = device - one.on_device(-(-longest // block) * block, host)
    room = beside = max(min(sequences * each, device // 2, left), each)
    blocks = max(one.most_tokens(device - room, host), 0) // block
    if one.stays:  # rows that stay on the GPU are rows of blocks
        # More blocks than the longest requests have, of as many as fit, leave no room for these.
        most = _longest_at_once(one, largest, device, host, load, block)
        blocks = min(blocks, max(device - most * largest, 0) // (block * one.device))
        room = device - blocks * block * one.device
    elif one.host:
        room = beside = device - one.on_device(blocks * block, host)
    if blocks * block < longest or room < largest:
        wanted = longest * one.device + largest
        rest = f" and {_size(longest * one.host)} of host memory" if one.host else ""
        has = _size(max(device, 0)) + (f" and {_size(host)}" if one.host else "")
        raise ValueError(
            f"[plan] memory: a request of {longest:,} tokens takes {_size(wanted)}{rest}, and "
            f"there is room for {has} in each rank"
        )
    return Planned(blocks + 1, room, one.costs, beside)


def _longest_at_once(
    one: Need, largest: int, device: int, host: int, load: Load, block: int
) -> int:
    """How many requests of the longest length fit side by side; one at least."""
    tokens = -(-load.longest // block) * block
    fit = 1
    while fit < load.sequences:
        if one.on_device((fit + 1) * tokens, host) + (fit + 1) * largest > device:
            break
        fit += 1
    return fit


def _usable(budgets: Budgets, *, gpu: bool) -> tuple[int, int]:
    device = budgets.device - budgets.device // _SLACK - (_WORKSPACE if gpu else 0)
    return device, budgets.host - budgets.host // _SLACK


def at_once(planned: Planned, load: Load, *, block: int) -> int:
    """How many requests of the longest length are admitted beside each other, prompts of it."""
    room = planned.make_room()
    most = min(load.sequences, (planned.blocks - 1) // -(-load.longest // block))
    names = map(str, range(most))
    return sum(
        1 for _ in takewhile(lambda name: room.admit(name, load.longest, load.longest), names)
    )


def _size(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def engine_config(block: int, **fields: Any) -> pk.Config:
    """One of the host's blocks is one of the engine's segments: forks at a block share all rows."""
    return pk.Config(segment_tokens=block, **fields)
