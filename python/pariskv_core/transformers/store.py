"""What a PariskvCache holds: the engine's cache of all full-attention layers, and its batch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pariskv_core as pk

from .dense import Logits, causal_attention, causal_rows
from .masks import new_tokens
from .support import refuse_gradients
from .tokens import Columns
from .turn import Turn, attended, equal_rows

_FRESH = "_pariskv_fresh"  # attribute of the keys that an update hands out
_NONE = -1  # in place of a sequence that will be a fork


@dataclass
class Fresh:
    """Rows that a layer has just been given, on their way from its update to its attention."""

    store: Store
    layer: int
    begin: int  # columns that the layer had before
    stored: bool = False

    def claim(self) -> None:
        """Its attention is "pariskv"."""
        self.store.claim()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        logits: Logits,
    ) -> torch.Tensor:
        out = self.store.attend(self, q, k, v, mask, logits)
        self.stored = True  # a layer that shares these rows attends without appending
        return out


def fresh_rows(key: torch.Tensor) -> Fresh | None:
    fresh: Fresh | None = getattr(key, _FRESH, None)
    return fresh


def _release(engine: pk.Cache, sequences: list[int]) -> None:
    with contextlib.suppress(ValueError):  # closed meanwhile
        for sequence in sequences:
            if sequence != _NONE:
                engine.remove(sequence)
    sequences.clear()


@dataclass
class Graphs:
    """Captured model steps of one engine. They take turns, so they share their memory."""

    pool: Any = None
    of: dict[Any, Any] = field(default_factory=dict)
    # Kinds of model steps that have run once: nothing can be loaded or compiled during a capture.
    warm: set[Any] = field(default_factory=set)
    refused: bool = False  # the model step cannot be captured


class Store:
    """One engine cache, the sequences of a batch, and which columns of the batch are tokens."""

    def __init__(self, layers: int, settings: dict[str, Any], *, alone: bool) -> None:
        """`alone`: the model has no layers with rows elsewhere."""
        self.graphs = Graphs()
        self.recording = False  # a graph: what layers do now is done in its replays
        self.replays = 0
        self.reports_errors = False  # steps tell the engine's statistics what they are off by
        self.settings = settings
        self.alone = alone
        self.engine: pk.Cache | None = None
        self.columns = Columns(0)
        self.seen = [0] * layers  # columns, of each layer
        self._sequences: list[int] = []
        self._copies: dict[int, int] = {}  # rows that will be forks, and the rows that they equal
        self._pending: int | None = None
        self._turn: Turn | None = None
        self._broken = False

    @property
    def sequences(self) -> list[int]:
        """The engine's sequences, one for each row of the batch."""
        self._settle()
        return list(self._sequences)

    # A forward pass: every layer is updated, then attends.

    def refuse_broken(self, broken: bool = False) -> None:
        if broken or self._broken:
            raise RuntimeError(
                "[transformers] cache: expected layers of one length, but a forward pass ended "
                "halfway; call cache.reset()"
            )

    def update(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """The keys as they came, marked as this layer's new rows."""
        if self._pending is not None:
            raise RuntimeError(
                '[transformers] attention: expected "pariskv", but another one ran over a '
                'PariskvCache; call model.set_attn_implementation("pariskv") or attach(model), '
                "and take a new cache"
            )
        if len(self._sequences) not in (0, k.shape[0]):
            raise ValueError(
                f"[transformers] batch: expected the {len(self._sequences)} rows that this cache "
                f"holds, got {k.shape[0]}"
            )
        self.refuse_broken(layer == 0 and len(set(self.seen)) > 1)
        refuse_gradients("key", k)
        keys = k.detach()
        setattr(keys, _FRESH, Fresh(self, layer, self.seen[layer]))
        self._pending = layer
        return keys

    def claim(self) -> None:
        self._pending = None

    def attend(
        self,
        fresh: Fresh,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        logits: Logits,
    ) -> torch.Tensor:
        engine = self._engine_for(q, k, v)
        if self.recording:
            turn = Turn.of(fresh.begin, 1, q.shape[0], None, q.device)
            return self._attended(engine, fresh, turn, q, k, v, logits)
        turn = self._turn_of(engine, fresh, k, mask)
        try:
            out = self._attended(engine, fresh, turn, q, k, v, logits)
        except BaseException:
            self._undo(engine, turn)
            raise
        if not fresh.stored:
            self.seen[fresh.layer] += turn.columns
        return out

    def _undo(self, engine: pk.Cache, turn: Turn) -> None:
        """As before a forward pass that failed, as far as its rows are ours."""
        self._broken = not self.alone
        if turn.begin == 0:
            return self.reset(broken=self._broken)
        self.columns.drop(turn.columns)
        try:
            engine.truncate(self._sequences, keep=self.columns.stored.sum(dim=1).tolist())
        except ValueError:  # rows of a turn that was decoded token by token were dropped meanwhile
            self._broken = True
            return None
        self.seen = [turn.begin] * len(self.seen)
        self._turn = None
        return None

    def _attended(
        self,
        engine: pk.Cache,
        fresh: Fresh,
        turn: Turn,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        logits: Logits,
    ) -> torch.Tensor:
        if q.shape[-2] < turn.columns:
            return self._last_queries(engine, fresh, turn.last(q.shape[-2], q.device), q, logits)
        if turn.begin == 0 and turn.columns > 1:
            return self._prompt(engine, fresh, turn, q, k, v, logits)
        new: dict[str, Any] = {} if fresh.stored else {"k": turn.packed(k), "v": turn.packed(v)}
        rows = [row for row, tokens in enumerate(turn.lengths) if tokens > 0]
        sequences = [self._sequences[row] for row in rows]
        queries, options = turn.packed(q), logits.options()
        if turn.columns == 1 and self.reports_errors:
            options["return_error"] = True
            out, _ = engine.decode(fresh.layer, sequences, queries, **new, **options)
        elif turn.columns == 1:
            out = engine.decode(fresh.layer, sequences, queries, **new, **options)
        else:
            lengths = [turn.lengths[row] for row in rows]
            packed = {"q": queries, **new}
            out = attended(engine, fresh.layer, sequences, lengths, packed, options)
        return turn.unpacked(out)

    def _engine_for(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> pk.Cache:
        if self.engine is not None:
            return self.engine
        config = pk.Config(
            layers=len(self.seen),
            query_heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=k.shape[-1],
            value_dim=v.shape[-1],
            dtype=k.dtype,
            device=k.device,
            **self.settings,
        )
        self._hold(pk.Cache(config))
        assert self.engine is not None
        return self.engine

    def _hold(self, engine: pk.Cache) -> None:
        self.engine = engine
        weakref.finalize(self, _release, engine, self._sequences).atexit = False

    def _turn_of(
        self, engine: pk.Cache, fresh: Fresh, k: torch.Tensor, mask: torch.Tensor | None
    ) -> Turn:
        batch, columns = k.shape[0], k.shape[-2]
        if self._turn is not None and self._turn.begin == fresh.begin:
            return self._turn
        if mask is not None and mask.shape[-1] != fresh.begin + columns:
            raise ValueError(
                f"[transformers] attention_mask: expected {fresh.begin + columns} columns, the "
                f"tokens seen and the new ones, got {mask.shape[-1]}"
            )
        self._settle()
        kept = new_tokens(mask, columns)
        if not self._sequences:
            self.columns = Columns(batch)
            self._copies = equal_rows(k, kept) if columns > 1 else {}
            for row in range(batch):
                self._sequences.append(_NONE if row in self._copies else engine.add())
        elif mask is not None and columns > 1:
            self._forget_masked(engine, mask[:, : fresh.begin])
        self._turn = Turn.of(fresh.begin, columns, batch, kept, k.device)
        self.columns.append(kept, columns)
        return self._turn

    def _prompt(
        self,
        engine: pk.Cache,
        fresh: Fresh,
        turn: Turn,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        logits: Logits,
    ) -> torch.Tensor:
        """The first tokens: torch attends to them; the engine gets their rows, equal ones once."""
        rows = self._unlike_rows(turn)
        if self._copies:
            q, k, v = (tensor[rows] for tensor in (q, k, v))
            turn = turn.of_rows(rows, k.device)
        sequences = [self._sequences[row] for row in rows]
        queries, keys, values = (turn.packed(tensor) for tensor in (q, k, v))
        if not fresh.stored:
            engine.prefill(
                fresh.layer,
                sequences,
                keys,
                values,
                turn.lengths,
                q=queries,
                scale=logits.scale,
                softcap=logits.softcap or 0.0,
            )
        if not logits.plain:
            out = engine.attend(fresh.layer, sequences, queries, turn.lengths, **logits.options())
            out = turn.unpacked(out)
        elif turn.kept is None:
            out = causal_attention(q, k, v, scale=logits.scale)
        else:
            packed = causal_rows(queries, keys, values, turn.lengths, logits.scale)
            out = turn.unpacked(packed)
        return self._for_copies(out, rows)

    def _last_queries(
        self, engine: pk.Cache, fresh: Fresh, turn: Turn, q: torch.Tensor, logits: Logits
    ) -> torch.Tensor:
        """Layers that share rows may attend for the last tokens of a prompt only (Gemma 4)."""
        rows = self._unlike_rows(turn)
        part = turn.of_rows(rows, q.device)
        sequences = [self._sequences[row] for row in rows]
        out = engine.attend(
            fresh.layer, sequences, part.packed(q[rows]), part.lengths, **logits.options()
        )
        return self._for_copies(part.unpacked(out), rows)

    def _unlike_rows(self, turn: Turn) -> list[int]:
        return [row for row in range(len(turn.lengths)) if row not in self._copies]

    def _for_copies(self, out: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Rows of the whole batch, of those that differ."""
        if not self._copies:
            return out
        batch = len(self._sequences)
        return out[[rows.index(self._copies.get(row, row)) for row in range(batch)]]

    def _forget_masked(self, engine: pk.Cache, mask: torch.Tensor) -> None:
        """Drops the end of rows that a later mask takes back: padding behind a finished row."""
        stored = self.columns.stored
        mask = mask.to(device="cpu")
        if torch.equal(stored, mask):
            return
        gone = stored & ~mask
        # A token that stays must not come after one that goes: there are no holes in a sequence.
        later = gone.int().cumsum(dim=1) > 0
        if bool((mask & ~stored).any()) or bool((stored & later & ~gone).any()):
            raise ValueError(
                "[transformers] attention_mask: expected earlier tokens to be masked as they "
                "were, or masked at the end of a row, got another mask for them"
            )
        engine.truncate(self._sequences, drop=gone.sum(dim=1).tolist())
        self.columns.keep_only(mask)

    def _settle(self) -> None:
        """Rows that started as copies become sequences of their own."""
        if not self._copies or self.engine is None:
            return
        for row, first in self._copies.items():
            self._sequences[row] = self.engine.fork(self._sequences[first])
        self._copies = {}

    # A model step of one token as a replay of a captured graph.

    def stands(self, batch: int) -> bool:
        """Every layer of the model is here, and all have tokens of this batch."""
        return (
            self.alone
            and not self._broken
            and self.engine is not None
            and self.engine.config.local != 0
            and len(self._sequences) == batch
            and len(set(self.seen)) == 1
        )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Of layers that run meanwhile the engine's work is captured, and nothing is stored."""
        self._settle()
        self.recording = True
        try:
            yield
        finally:
            self.recording = False
            self._pending = None

    def stepped(self) -> None:
        """A replay has appended one token to every row."""
        self.columns.append(None, 1)
        self.seen = [seen + 1 for seen in self.seen]
        self._turn = None
        self.replays += 1

    def share(self, other: Store) -> None:
        """Uses the engine and the graphs of another one. This one is empty."""
        if other.engine is not None:
            self._hold(other.engine)
            self.graphs = other.graphs

    # Verbs of a batch: for all layers at once.

    def crop(self, count: int) -> None:
        """Takes the last columns of the batch away."""
        if count == 0 or self.engine is None:
            return
        self._settle()
        self.engine.truncate(self._sequences, drop=self.columns.drop(count))
        self.seen = [seen - count for seen in self.seen]
        self._turn = None

    def take(self, rows: Sequence[int]) -> None:
        """Row i becomes what `rows[i]` was; rows may go, stay or be there several times."""
        if self.engine is None:
            return
        self._settle()
        self._turn = None
        if len(rows) == len(self._sequences):
            self.engine.reorder(self._sequences, list(rows))
        else:
            taken: set[int] = set()
            sequences = []
            for row in rows:
                own = self._sequences[row]
                sequences.append(self.engine.fork(own) if row in taken else own)
                taken.add(row)
            for row, sequence in enumerate(self._sequences):
                if row not in taken:
                    self.engine.remove(sequence)
            self._sequences[:] = sequences
        self.columns.take(rows)

    def reset(self, *, broken: bool = False) -> None:
        """Empty, for a batch of any size."""
        self._broken = broken
        if self.engine is not None:
            _release(self.engine, self._sequences)
        self.columns = Columns(0)
        self.seen = [0] * len(self.seen)
        self._copies, self._pending, self._turn = {}, None, None

    def restore(
        self, config: pk.Config, files: Sequence[Path], stored: torch.Tensor, seen: Sequence[int]
    ) -> None:
        """The batch of a saved cache, a file for each row. This one is new."""
        engine = pk.Cache(config)
        for file, columns in zip(files, stored, strict=True):
            sequence = engine.load(file)
            if engine.length(sequence) != int(columns.sum()):
                raise ValueError(
                    f"[transformers] path: expected {int(columns.sum())} tokens, as the cache "
                    f"says, got {engine.length(sequence)} in {file}"
                )
            self._sequences.append(sequence)
        self._hold(engine)
        self.columns = Columns(len(stored))
        self.columns.append(stored, stored.shape[1])
        self.seen = list(seen)

    def copy(self) -> Store:
        """The same batch once more, as forks: stored rows are shared until one of them changes."""
        self._settle()
        twin = Store(len(self.seen), self.settings, alone=self.alone)
        twin._broken = self._broken
        twin.reports_errors = self.reports_errors
        if self.engine is not None:
            twin.share(self)
            twin._sequences.extend(self.engine.fork(sequence) for sequence in self._sequences)
        twin.columns = self.columns.copy()
        twin.seen = list(self.seen)
        return twin
