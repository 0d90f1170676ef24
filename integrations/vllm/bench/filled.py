"""Lets the connector of this process fill sequences instead of computing them.

It says of each prompt that all of it but the last token is there, as vLLM's DecodeBenchConnector
does, and the engine gets random rows for it. For `steps.py`: decoding alone is timed.
"""

from __future__ import annotations

from typing import Any

import torch
from pariskv_core.serving import books, engine, sequences
from pariskv_core.serving.orders import Command
from pariskv_core.vllm import connector

_FILL = "fill"
_CHUNK = 8192  # tokens of a call


class FilledBooks(books.Books):
    """Prefixes that no sequence has are to be filled."""

    def _arrive(self, arrival: Any, source: Any, commands: list[Command]) -> Any:
        holder = super()._arrive(arrival, source, commands)
        if holder.right < arrival.computed:
            commands.append(Command(_FILL, holder.name, arrival.computed))
            holder.length = holder.right = arrival.computed
        return holder


class FillingSequences(sequences.Sequences):
    def apply(self, commands: Any) -> None:
        # As prompts do, rows come when what is to go has gone.
        super().apply([command for command in commands if command.kind != _FILL])
        for command in commands:
            if command.kind == _FILL:
                self._fill(self._of[command.name], command.tokens)

    def _fill(self, sequence: int, tokens: int) -> None:
        config = self._cache.config
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        random = torch.Generator(device).manual_seed(sequence)
        shape = (min(tokens, _CHUNK), config.kv_heads, config.head_dim)
        for begin in range(0, tokens, _CHUNK):
            count = min(_CHUNK, tokens - begin)
            k, v = (torch.randn(shape, dtype=dtype, device=device, generator=random) for _ in "kv")
            for layer in range(config.layers):
                self._cache.prefill(layer, [sequence], k[:count], v[:count])


def _found(self: Any, request: Any, computed: int) -> tuple[int | None, bool]:
    found, later = _asked(self, request, computed)
    if found is None:
        return None, False
    return max(request.num_prompt_tokens - 1 - computed, 0), later


_asked = connector.PariskvConnector.get_num_new_matched_tokens


def patch() -> None:
    connector.Books = FilledBooks  # type: ignore[misc]
    engine.Sequences = FillingSequences  # type: ignore[misc]
    connector.PariskvConnector.get_num_new_matched_tokens = _found  # type: ignore[method-assign]
