"""A rank's engine: what a layer of the model does with the queries, keys and values of a step.

A host that has an attention of its own over pages gives it to `attend` and `decode_lanes` as a
function. It is called once all rows of the layer are stored, attends in full to what the page table
has, and writes the output of the whole batch. What pages do not serve comes after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import pariskv_core as pk

from .lanes import Lanes
from .orders import Orders, Row
from .pages import Pages
from .prompts import causal_rows
from .sequences import Sequences
from .step_errors import StepErrors

Places = slice | torch.Tensor  # of tokens, among those of a step
Rows = torch.Tensor | None  # None: this step's rows of the layer are stored already
Full = Callable[[], None]  # a host's own attention over pages


@dataclass(frozen=True)
class Logits:
    """How a layer makes attention of q.k. scale: None is 1 / sqrt(head_dim)."""

    scale: float | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # (query heads)

    @property
    def plain(self) -> bool:
        return self.softcap == 0.0 and self.sinks is None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of the engine."""
        return {"scale": self.scale, "softcap": self.softcap, "sink_bias": self.sinks}


PLAIN = Logits()


def _at(rows: Rows, places: Places) -> Rows:
    return None if rows is None else rows[places]


@dataclass
class Prompts:
    """Rows of a step that bring tokens of prompts; all layers use the same ones."""

    batch: pk.Batch
    sequences: list[int]
    places: Places
    lengths: list[int]
    begins: list[int]  # of their tokens, among those of a step
    numbers: list[int]  # of the requests, in the order of the batch
    unserved: dict[int, list[int]] = field(default_factory=dict)  # by pages, of each layer


@dataclass
class Plan:
    """One step: which tokens are decoded, and which are a prompt's."""

    tokens: int = 0
    decoding: pk.Batch | None = None
    decoded: Places = field(default_factory=lambda: slice(0, 0))
    decoded_numbers: list[int] = field(default_factory=list)  # of the requests
    rows: list[Row] = field(default_factory=list)  # of prompts
    make: Callable[[list[Row]], Prompts | None] = lambda rows: None  # what a layer needs of some

    @cached_property
    def prompts(self) -> Prompts | None:
        """All of them."""
        return self.make(self.rows)

    @cached_property
    def fresh(self) -> Prompts | None:
        """Whole prompts, or their first chunks."""
        return self.make([row for row in self.rows if row.stored == 0])

    @cached_property
    def later(self) -> Prompts | None:
        """Tokens that follow stored ones."""
        return self.make([row for row in self.rows if row.stored > 0])

    @cached_property
    def decoded_rows(self) -> torch.Tensor:
        """`decoded_numbers`, where the tokens lie."""
        assert isinstance(self.decoded, torch.Tensor)
        return torch.tensor(self.decoded_numbers, device=self.decoded.device)


class Engine:
    """The cache of one rank, its sequences, and the plan of the present step."""

    def __init__(self, config: pk.Config) -> None:
        self.cache = pk.Cache(config)
        self.sequences = Sequences(self.cache)
        self.lanes = Lanes(self.cache)
        self.pages: Pages | None = None
        self.errors: StepErrors | None = None
        self._device = torch.device(config.device)
        self._plan = Plan()

    def open_pages(self, sequences: int, tokens: int) -> Pages:
        """On a GPU: what a host's own attention reads, of steps of so many sequences of up to so
        many tokens. Row i of the page table is the i-th request of a step."""
        self.pages = Pages(self.cache, sequences, tokens)
        return self.pages

    def tell_errors(self, widest: int) -> StepErrors:
        """From now on steps of up to so many tokens that are decoded say how far they are off."""
        self.errors = StepErrors(self.cache.config, widest)
        return self.errors

    def begin(
        self, orders: Orders, requests: Sequence[str], *, replayed: int | None = None
    ) -> None:
        """Before a forward pass over these requests, in this order.

        replayed  rows of the graph that is replayed in place of a pass; None: none is
        """
        self.sequences.apply(orders.commands)
        rows = {row.request: row for row in orders.rows}
        ordered = [rows[request] for request in requests]
        if replayed is not None:
            self._plan = Plan()
            self.lanes.advance(self.sequences.of(row.sequence for row in ordered), replayed)
        else:
            self._plan = self._planned(ordered)
        if self.errors is not None:
            self.errors.begin(
                [row.request for row in ordered if replayed is not None or row.decodes]
            )

    def end(self) -> None:
        """After the pass: one that no `begin` announces stores nothing."""
        self._plan = Plan()
        if self.errors is not None:
            self.errors.end()

    def _planned(self, rows: list[Row]) -> Plan:
        ends = list(itertools.accumulate(row.tokens for row in rows))
        begins = {row.request: end - row.tokens for row, end in zip(rows, ends, strict=True)}
        plan = Plan(tokens=ends[-1] if ends else 0)
        numbers = {row.request: number for number, row in enumerate(rows)}
        decodes = [row for row in rows if row.decodes]
        if decodes:
            plan.decoding = self.cache.batch(self.sequences.of(row.sequence for row in decodes))
            plan.decoded = self._places([(begins[row.request], 1) for row in decodes])
            plan.decoded_numbers = [numbers[row.request] for row in decodes]
        plan.rows = [row for row in rows if not row.decodes]
        plan.make = lambda some: self._prompts(some, begins, numbers)
        return plan

    def _prompts(
        self, rows: list[Row], begins: dict[str, int], numbers: dict[str, int]
    ) -> Prompts | None:
        if not rows:
            return None
        sequences = self.sequences.of(row.sequence for row in rows)
        return Prompts(
            self.cache.batch(sequences),
            sequences,
            self._places([(begins[row.request], row.tokens) for row in rows]),
            [row.tokens for row in rows],
            [begins[row.request] for row in rows],
            [numbers[row.request] for row in rows],
        )

    def _places(self, spans: list[tuple[int, int]]) -> Places:
        """Of (begin, count): a slice where they follow each other."""
        begin, end = spans[0][0], spans[0][0]
        for first, count in spans:
            if first != end:
                places = [torch.arange(at, at + n) for at, n in spans]
                return torch.cat(places).to(self._device)
            end += count
        return slice(begin, end)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: Rows,
        v: Rows,
        out: torch.Tensor,
        logits: Logits = PLAIN,
        full: Full | None = None,
    ) -> None:
        """(tokens, heads, dim) of one layer; `out` may have more rows, for padding.

        Layers that share keys and values are one layer here. After the first one of a step the
        others bring queries alone.
        """
        plan = self._plan
        if plan.tokens == 0:  # a dummy run
            out.zero_()
            return
        if full is not None:
            self._attend_beside(layer, q, k, v, out, logits, full)
            return
        if plan.decoding is not None:
            self._decode_planned(layer, plan, q, k, v, out, logits)
        if plan.fresh is not None:
            self._prompt(layer, plan.fresh, q, k, v, out, logits, whole=True)
        if plan.later is not None:
            self._prompt(layer, plan.later, q, k, v, out, logits, whole=False)

    def _attend_beside(
        self,
        layer: int,
        q: torch.Tensor,
        k: Rows,
        v: Rows,
        out: torch.Tensor,
        logits: Logits,
        full: Full,
    ) -> None:
        """The host attends to what pages serve: all of the step in one launch."""
        plan, missing = self._plan, list[int]()
        prompts = plan.prompts
        if prompts is not None:
            if k is not None and v is not None:
                at = prompts.places
                unserved = self.cache.prefill(
                    layer,
                    prompts.batch,
                    k[at],
                    v[at],
                    prompts.lengths,
                    q=q[at],
                    scale=logits.scale,
                    softcap=logits.softcap,
                    page_rows=prompts.numbers,
                )
                prompts.unserved[layer] = unserved or []
            missing = prompts.unserved[layer]
        if plan.decoding is None:
            full()
        else:
            self._decode_planned(layer, plan, q, k, v, out, logits, full)
        for place in missing:  # rows in host memory, or in 8 bits
            assert prompts is not None
            begin, count = prompts.begins[place], prompts.lengths[place]
            own = slice(begin, begin + count)
            out[own] = self.cache.attend(
                layer,
                [prompts.sequences[place]],
                q[own],
                [count],
                precision="fast",
                **logits.options(),
            )

    def _options(self, layer: int, rows: int, logits: Logits) -> dict[str, Any]:
        """Of a decode of so many rows."""
        error = None if self.errors is None else self.errors.of(layer, rows)
        return {**logits.options(), "error": error}

    def _decode_planned(
        self,
        layer: int,
        plan: Plan,
        q: torch.Tensor,
        k: Rows,
        v: Rows,
        out: torch.Tensor,
        logits: Logits,
        full: Full | None = None,
    ) -> None:
        """The step's tokens that are decoded, wherever they lie."""
        assert plan.decoding is not None
        at, options = plan.decoded, self._options(layer, len(plan.decoding), logits)
        if full is not None:
            options |= {"dense": full, "page_rows": plan.decoded_numbers}
        rows = (q[at], _at(k, at), _at(v, at))
        if isinstance(at, slice):
            self.cache.decode(layer, plan.decoding, *rows, out=out[at], **options)
            return
        found = self.cache.decode(layer, plan.decoding, *rows, **options)
        if full is not None:  # which has written the others
            assert self.pages is not None
            served = self.pages.lengths[plan.decoded_rows] > 0
            found = torch.where(served[:, None, None], out[at], found)
        out[at] = found

    def _prompt(
        self,
        layer: int,
        prompts: Prompts,
        q: torch.Tensor,
        k: Rows,
        v: Rows,
        out: torch.Tensor,
        logits: Logits,
        *,
        whole: bool,
    ) -> None:
        """`whole`: nothing was stored before, so torch has all there is to attend to."""
        at = prompts.places
        queries = q[at].contiguous()
        if k is not None and v is not None:
            keys, values = k[at].contiguous(), v[at].contiguous()
            self.cache.prefill(
                layer,
                prompts.batch,
                keys,
                values,
                prompts.lengths,
                q=queries,
                scale=logits.scale,
                softcap=logits.softcap,
            )
            if whole and logits.plain:
                out[at] = causal_rows(queries, keys, values, prompts.lengths, logits.scale)
                return
        # Weights are rounded as in a host's own attention; in float32 this is the exact form.
        out[at] = self.cache.attend(
            layer, prompts.batch, queries, prompts.lengths, precision="fast", **logits.options()
        )

    def decode_lanes(
        self,
        layer: int,
        lanes: pk.Batch,
        q: torch.Tensor,
        k: Rows,
        v: Rows,
        out: torch.Tensor,
        logits: Logits = PLAIN,
        full: Full | None = None,
    ) -> None:
        """A step of a graph: each row is a token of one lane. Replays name other sequences."""
        at, options = slice(0, len(lanes)), self._options(layer, len(lanes), logits)
        if full is not None:
            options["dense"] = full
        rows = (q[at], _at(k, at), _at(v, at))
        self.cache.decode(layer, lanes, *rows, out=out[at], **options)

    def close(self) -> None:
        self.cache.close()
