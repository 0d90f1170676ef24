"""The mask of a forward pass: which tokens are padding. Causality is the engine's."""

from __future__ import annotations

from typing import Any

import torch

from . import versions


def pariskv_mask(**kwargs: Any) -> torch.Tensor | None:
    """The 2-D mask as it came for plain causal attention, the library's 4-D mask for any other.

    A model asks once per forward pass and kind of layer, so the layers of a pass share the result.
    """
    if kwargs["mask_function"] is not versions.causal_mask_function:
        return versions.sdpa_mask(**kwargs)  # sliding layers, which are the library's
    if not versions.fits_mask(kwargs):
        raise NotImplementedError(
            "[transformers] cache: expected a PariskvCache, got a static cache; leave out "
            'cache_implementation, or use another attention than "pariskv"'
        )
    mask: torch.Tensor | None = kwargs.get("attention_mask")
    return mask


def new_tokens(mask: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """Which of the last `columns` are tokens: (batch, columns) on the host; None: all are."""
    if mask is None:
        return None
    kept = mask[:, -columns:].to(device="cpu", dtype=torch.bool)
    return None if bool(kept.all()) else kept
