"""Which models are served. The others are refused by name."""

from __future__ import annotations

from typing import Any

# Fields of a config that name a kind of attention, and what it is.
_UNSERVED = {
    "kv_lora_rank": "multi-head latent attention, whose cache is small as it is",
    "is_encoder_decoder": "an encoder and a decoder",
}
_SERVED_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def decoder_config(config: Any) -> Any:
    """The part of a model's config that is about its text decoder, if it can be served."""
    text = config.get_text_config(decoder=True)
    for field, kind in _UNSERVED.items():
        if getattr(text, field, None):
            raise NotImplementedError(
                f"[transformers] config: {text.model_type} is not supported: "
                f"it has {kind} ({field})"
            )
    for kind in getattr(text, "layer_types", None) or []:
        if kind not in _SERVED_TYPES:
            raise NotImplementedError(
                f"[transformers] config: {text.model_type} is not supported: it has layers of "
                f'type "{kind}", expected {", ".join(sorted(_SERVED_TYPES))}'
            )
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
