"""One model, one text, one PariskvCache: steps of a token, and where the last one looked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import pariskv_core as pk
from pariskv_core import transformers as pkt
from pariskv_core.cli.models import Loaded
from pariskv_core.transformers import versions
from pariskv_core.transformers.attention import pariskv_attention
from pariskv_core.transformers.dense import Logits
from pariskv_core.transformers.masks import pariskv_mask
from pariskv_core.transformers.store import fresh_rows

_WATCHED = "pariskv_watched"  # the same attention; single tokens' queries and outputs are noted


@dataclass
class Query:
    layer: int  # the model's
    engine_layer: int
    rows: torch.Tensor  # (query_heads, head_dim)
    logits: Logits
    out: torch.Tensor  # (query_heads, value_dim): what the step made of it


@dataclass
class Run:
    """`queries`: of the last step, one for each engine layer; noted from `watch` on."""

    loaded: Loaded
    cache: pkt.PariskvCache
    queries: dict[int, Query] = field(default_factory=dict)

    @staticmethod
    def start(loaded: Loaded, **settings: Any) -> Run:
        return Run(loaded, pkt.PariskvCache(loaded.model.config, **settings))

    @property
    def engine(self) -> pk.Cache:
        engine = self.cache.engine
        assert engine is not None
        return engine

    @property
    def sequence(self) -> int:
        return self.cache.sequences[0]

    def watch(self) -> None:
        run = self

        def attention(
            module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *rest: Any, **how: Any
        ) -> Any:
            found = pariskv_attention(module, query, key, *rest, **how)
            fresh = fresh_rows(key)
            if fresh is not None and query.shape[-2] == 1:
                logits = Logits(how.get("scaling"), how.get("softcap"), how.get("s_aux"))
                layer = int(getattr(module, "layer_idx", fresh.layer))
                rows, out = query[0, :, 0].detach(), found[0][0, 0].detach()
                run.queries[layer] = Query(layer, fresh.layer, rows, logits, out)
            return found

        versions.register(_WATCHED, attention, pariskv_mask)
        self.loaded.model.set_attn_implementation(_WATCHED)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The last token's logits, (vocabulary) float32."""
        return forward(self.loaded.model, ids, self.cache)

    def greedy(self, logits: torch.Tensor, most: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Likeliest tokens, each with the logits that chose it, until the model ends the text."""
        stops = stop_tokens(self.loaded)
        for left in range(most, 0, -1):
            token = int(logits.argmax())
            yield token, logits
            if token in stops or left == 1:
                return
            logits = self.forward(torch.tensor([[token]], device=self.loaded.device))


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The last token's logits, (vocabulary) float32."""
    found: torch.Tensor = model(ids, **{versions.CACHE: cache}, logits_to_keep=1).logits
    return found[0, -1].float()


def stop_tokens(loaded: Loaded) -> set[int]:
    stops = loaded.model.generation_config.eos_token_id
    found = {stops} if isinstance(stops, int) else set(stops or ())
    own = loaded.tokenizer.eos_token_id
    return found if own is None else found | {own}
