"""The mask of a forward pass: which tokens are padding. Causality is the engine's."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch

from . import versions


class PaddingMask(torch.Tensor):
    """(batch, 1, 1, tokens) of booleans: causal attention, without the tokens that are false.

    Models may slice it as they slice the library's masks, or move it: it stays of this class.
    """

    @staticmethod
    def of(mask: torch.Tensor) -> PaddingMask:
        return mask[:, None, None, :].as_subclass(PaddingMask)

    def tokens(self) -> torch.Tensor:
        """(batch, tokens), of torch's own class."""
        return self.as_subclass(torch.Tensor)[:, 0, 0]


_steps: contextvars.ContextVar[bool] = contextvars.ContextVar("steps", default=False)


@contextlib.contextmanager
def unmasked_steps() -> Iterator[None]:
    """Passes without a mask are of one token a row, each of them there."""
    token = _steps.set(True)
    try:
        yield
    finally:
        _steps.reset(token)


def pariskv_mask(**kwargs: Any) -> torch.Tensor | None:
    """A PaddingMask for plain causal attention, the library's own mask for any other.

    A model asks once per forward pass and kind of layer, so the layers of a pass share the result.
    """
    if kwargs["mask_function"] is not versions.causal_mask_function:
        return versions.sdpa_mask(**kwargs)  # sliding layers, which are the library's
    if kwargs.get("attention_mask") is None and (_steps.get() or _capturing()):
        return None  # what follows would ask the device, or differ from one model step to the next
    if not versions.keys_end_with_queries(kwargs):
        raise NotImplementedError(
            "[transformers] cache: expected a PariskvCache, got a static cache, or a mask that "
            "leaves out earlier tokens; leave out cache_implementation"
        )
    mask = kwargs.get("attention_mask")
    return None if mask is None else PaddingMask.of(mask.bool())


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def new_tokens(mask: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """Which of the last `columns` are tokens: (batch, columns) on the host; None: all are."""
    if mask is None:
        return None
    kept = mask[:, -columns:].to(device="cpu")
    return None if bool(kept.all()) else kept
