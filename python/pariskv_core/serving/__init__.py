"""The engine inside a server: what a host calls, and in which order. It knows no host's types.

A host has requests, numbers of blocks and a model; the engine has the rows of all blocks. Its two
sides may be processes of their own: the scheduler's needs no torch, and sends plain values.

Beside the scheduler, before it starts:

    need = sizes.need(config, block, longest)    # sizes.engine_config makes a config
    planned = sizes.plan(need, budgets, load, block=block, gpu=gpu)
    books = Books(block, planned.make_room())    # for planned.blocks - 1 blocks to hand out

and in each pass of it:

    books.admits(request, prompt, most)     Before a request comes in. False: there is no room for
                                            the tokens that it may grow to, so it waits.
    books.stores(block, position, content)  Of the last block of a prefix that the host has found.
                                            True: the prefix may be used. False: its rows are being
                                            computed, so the request waits. None: as of the
                                            last step no sequence has them. The host forgets
                                            the block, unless this pass has handed it out.
    books.others(block, position, found)    If True: blocks to forget, after which the host looks
                                            again. None of them: all rows are of one sequence.
    books.withdraw(request)                 Of a request that was admitted and waits all the same.
    orders, forgotten = books.step(step)    Once all is decided. Of `forgotten` no block may be
                                            found again. The orders go to every rank; `orders.lost`
                                            are blocks whose requests have to fail.

Preempted requests end, and arrive again later. `books.reset()` drops all prefixes between two
steps, `books.restart()` all rows after an error; `books.pending` asks for a step without requests.

In each rank, whose layers give the engine (tokens, heads, head_dim):

    engine = Engine(config)
    engine.begin(orders, requests)            # before a pass, names in the order of the batch
    engine.attend(layer, q, k, v, out)        # in place of the model's attention; a Logits behind
    engine.end()                              # `out` has softcap, sinks or another scale

On a GPU a host may attend in full with a kernel of its own that reads pages. It makes them with
`engine.open_pages(sequences, tokens)`, and gives `attend` and `decode_lanes` a function behind the
Logits; row i of the page table is request i of the step.

A CUDA graph is captured over `engine.lanes.capture(width)` with `engine.decode_lanes(layer, lanes,
q, k, v, out)`; after the last one comes `engine.lanes.captured()`. Before a replay it is
`engine.begin(orders, requests, replayed=width)`.

With `engine.tell_errors(rows)` searches tell their error: `engine.errors.take()` has it by request,
of all steps since the last call but the last one or two; a RequestErrors adds that up until a
request is answered.

`sizes` counts blocks, `memory` bytes where no budget is set, and a `HostShare` tells servers
on one machine of each other. docs/add-a-host.md is a host that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .books import Arrival, Books, Growth, Step
from .errors import ErrorSum, RequestErrors, add_up
from .host_shares import HostShare
from .orders import Orders
from .room import Costs, Room

if TYPE_CHECKING:
    from .engine import Engine, Logits
    from .pages import Pages
else:

    def __getattr__(name: str) -> Any:
        """The rank's side, which needs torch, once it is asked for."""
        if name not in ("Engine", "Logits", "Pages"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import engine, pages

        return getattr(pages if name == "Pages" else engine, name)


__all__ = [
    "Arrival",
    "Books",
    "Costs",
    "Engine",
    "ErrorSum",
    "Growth",
    "HostShare",
    "Logits",
    "Orders",
    "Pages",
    "RequestErrors",
    "Room",
    "Step",
    "add_up",
]
