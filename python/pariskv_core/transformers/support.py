"""Which models are served. The others are refused by name."""

from __future__ import annotations

from typing import Any

from pariskv_core._served import refusal

from . import versions


def decoder_config(config: Any) -> Any:
    """The part of a model's config that is about its text decoder, if it can be served."""
    text = config.get_text_config(decoder=True)
    refused = refusal(lambda field: getattr(text, field, None), versions.WITHOUT_ROWS)
    if refused is not None:
        raise NotImplementedError(f"[transformers] config: {refused}")
    return text


def refuse_gradients(name: str, tensor: Any) -> None:
    if tensor.requires_grad:
        raise NotImplementedError(
            f"[transformers] {name}: expected no gradients, got a tensor that requires them; "
            "run the model under torch.no_grad()"
        )


def check_model(model: Any) -> None:
    """A model whose attention can be exchanged, and whose config can be served."""
    if not hasattr(model, "generate"):
        raise TypeError(
            f"[transformers] model: expected a model that generates, got {type(model).__name__}"
        )
    text = decoder_config(model.config)
    if not model._can_set_attn_implementation():
        raise NotImplementedError(
            f"[transformers] model: {text.model_type} is not supported: its attention cannot be "
            "exchanged (set_attn_implementation)"
        )
