"""The tokens that a forward pass brings, packed for the engine: padding is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import pariskv_core as pk


@dataclass
class Turn:
    """(batch, heads, columns, dim) as models have it, and (tokens, heads, dim) as the engine has.

    kept    which columns are tokens, (batch, columns) on the host; None: all are
    places  of the tokens among (batch * columns), on the model's device; None: all of them
    """

    begin: int  # columns seen before
    columns: int
    lengths: list[int]  # tokens of each row
    kept: torch.Tensor | None
    places: torch.Tensor | None

    @staticmethod
    def of(
        begin: int, columns: int, batch: int, kept: torch.Tensor | None, device: torch.device
    ) -> Turn:
        if kept is None:
            return Turn(begin, columns, [columns] * batch, None, None)
        lengths = [int(tokens) for tokens in kept.sum(dim=1)]
        places = kept.flatten().nonzero()[:, 0].to(device)
        return Turn(begin, columns, lengths, kept, places)

    def of_rows(self, rows: Sequence[int], device: torch.device) -> Turn:
        kept = None if self.kept is None else self.kept[list(rows)]
        return Turn.of(self.begin, self.columns, len(rows), kept, device)

    def last(self, columns: int, device: torch.device) -> Turn:
        """The last of its columns alone."""
        batch = len(self.lengths)
        kept = None if self.kept is None else self.kept[:, -columns:]
        return Turn.of(self.begin + self.columns - columns, columns, batch, kept, device)

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)

    def unpacked(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, columns, heads, dim), as attention gives it; zeros where there is no token."""
        batch = len(self.lengths)
        if self.places is None:
            return tokens.view(batch, self.columns, *tokens.shape[1:])
        flat = tokens.new_zeros((batch * self.columns, *tokens.shape[1:]))
        flat[self.places] = tokens
        return flat.view(batch, self.columns, *tokens.shape[1:])


def attended(
    engine: pk.Cache,
    layer: int,
    sequences: Sequence[int],
    lengths: Sequence[int],
    packed: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """The attention of a turn: of sequences that lack rows, as if it had been generated.

    packed: q, and k and v unless they are stored already
    """
    lacks = [engine.regions(sequence, layer).dropped > 0 for sequence in sequences]
    if "k" not in packed or not any(lacks):
        exact: torch.Tensor = engine.attend(layer, sequences, lengths=lengths, **packed, **options)
        return exact
    first = [sum(lengths[:row]) for row in range(len(lengths))]
    steps = [
        [(row, token) for row in range(len(lengths)) if lacks[row] and token < lengths[row]]
        for token in range(max(lengths))
    ]
    whole = [
        (row, token)
        for row in range(len(lengths))
        if not lacks[row]
        for token in range(lengths[row])
    ]
    parts, places = [], []
    for tokens in [whole, *steps]:
        if not tokens:
            continue
        at = torch.tensor([first[row] + token for row, token in tokens], device=packed["q"].device)
        rows = list(dict.fromkeys(row for row, _ in tokens))
        batch = [sequences[row] for row in rows]
        part = {name: tensor.index_select(0, at) for name, tensor in packed.items()}
        if tokens is whole:
            counts = [lengths[row] for row in rows]
            parts.append(engine.attend(layer, batch, lengths=counts, **part, **options))
        else:
            parts.append(engine.decode(layer, batch, **part, **options))
        places.append(at)
    out = torch.cat(parts)
    return torch.empty_like(out).index_copy_(0, torch.cat(places), out)


def equal_rows(keys: torch.Tensor, kept: torch.Tensor | None) -> dict[int, int]:
    """Rows of a batch that repeat the one before, and the first row of its kind: row -> first.

    Beams and return sequences start as copies of their prompt.
    """
    first: dict[int, int] = {}
    for row in range(1, keys.shape[0]):
        before = row - 1
        if kept is not None and not torch.equal(kept[row], kept[before]):
            continue
        if torch.equal(keys[row], keys[before]):
            first[row] = first.get(before, before)
    return first
