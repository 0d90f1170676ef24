"""The attention function that models call under the name "pariskv"."""

from __future__ import annotations

from typing import Any

import torch

from .dense import Logits, dense_attention
from .masks import PaddingMask
from .store import fresh_rows
from .support import refuse_gradients


def pariskv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """(batch, tokens, query heads, dim). The engine's where a PariskvCache handed out `key`.

    query (batch, query heads, tokens, dim); key and value are the new tokens' rows alone where they
    are the engine's: the rows of earlier tokens never come back to torch.
    """
    logits = Logits(scaling, softcap, s_aux)
    fresh = fresh_rows(key)
    if fresh is None:
        return dense_attention(
            module, query, key, value, attention_mask, logits, dropout=dropout, **kwargs
        )
    fresh.claim()
    _refuse(query, dropout, kwargs)
    if s_aux is not None and torch.is_grad_enabled():  # a parameter: it always requires one
        refuse_gradients("s_aux", s_aux)
    tokens = _tokens(attention_mask)
    return fresh.attend(query, key, value, tokens, logits), None


def _tokens(mask: torch.Tensor | None) -> torch.Tensor | None:
    """(batch, tokens): which are no padding."""
    if mask is None or isinstance(mask, PaddingMask):
        return None if mask is None else mask.tokens()
    raise NotImplementedError(
        "[transformers] attention_mask: expected causal attention and padding, as (batch, tokens), "
        f"got a mask of shape {tuple(mask.shape)} (image tokens, packed sequences)"
    )


def _refuse(query: torch.Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    refuse_gradients("query", query)
    unsupported = {
        "output_attentions": kwargs.get("output_attentions"),
        "position_bias": kwargs.get("position_bias") is not None,
        "is_causal=False": kwargs.get("is_causal") is False,
        "dropout": dropout > 0,
    }
    for name, asked in unsupported.items():
        if asked:
            raise NotImplementedError(
                f'[transformers] {name}: the attention "pariskv" does not have it'
            )
