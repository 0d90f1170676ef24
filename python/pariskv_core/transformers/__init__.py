"""The engine under Hugging Face's transformers, version 4.57 or newer. No model is edited.

>>> import pariskv_core.transformers as pkt
>>> pkt.attach(model, top_k=100)  # from here on model.generate(...) uses the engine

or by hand, with a cache that is kept:

>>> model.set_attn_implementation("pariskv")
>>> cache = pkt.PariskvCache(model.config, top_k=100)
>>> model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24

Importing registers an attention function and a mask function under the name "pariskv" and changes
nothing else: models that do not ask for that name run as before.
"""

from __future__ import annotations

from . import versions
from .attached import attach, detach
from .attention import pariskv_attention
from .cache import PariskvCache
from .masks import pariskv_mask

__all__ = ["PariskvCache", "attach", "detach"]

versions.register(versions.NAME, pariskv_attention, pariskv_mask)
