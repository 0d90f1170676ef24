"""Answers of a model that runs here: with full attention, or with the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pariskv_core._estimates import tells_errors
from pariskv_core.cli.evaluate_settings import Setting
from pariskv_core.cli.models import Loaded
from pariskv_core.cli.sparse_run import Run, forward, stop_tokens


@dataclass(frozen=True)
class Said:
    text: str
    tokens: int
    seconds: float
    searched: bool
    mean_error: float | None = None
    worst_error: float | None = None


def answer(
    loaded: Loaded, setting: Setting, ids: Sequence[int], most: int, threads: int, own: str
) -> Said:
    """Likeliest tokens until the model ends its answer. own: the model's own attention."""
    begin = time.perf_counter()
    prompt = torch.tensor([list(ids)], device=loaded.device)
    if setting.cache is None:
        tokens = likeliest(loaded, prompt, most, own)
        return Said(text_of(loaded, tokens), len(tokens), time.perf_counter() - begin, False)
    run = Run.start(loaded, threads=threads, **setting.cache)
    if tells_errors(setting.cache["policy"]):
        run.cache.report_errors()
    loaded.model.set_attn_implementation("pariskv")
    logits = run.forward(prompt)
    tokens = [token for token, _ in run.greedy(logits, most)]
    stats = run.engine.stats()
    return Said(
        text_of(loaded, tokens),
        len(tokens),
        time.perf_counter() - begin,
        stats.searched_tokens > 0,
        _finite(stats.mean_error),
        _finite(stats.worst_error),
    )


def likeliest(loaded: Loaded, prompt: torch.Tensor, most: int, attention: str) -> list[int]:
    """Tokens, by an attention of transformers that sees all rows of a plain cache."""
    from transformers import DynamicCache

    loaded.model.set_attn_implementation(attention)
    cache = DynamicCache(config=loaded.model.config)
    stops, tokens = stop_tokens(loaded), [int(forward(loaded.model, prompt, cache).argmax())]
    while tokens[-1] not in stops and len(tokens) < most:
        last = prompt.new_tensor([tokens[-1:]])
        tokens.append(int(forward(loaded.model, last, cache).argmax()))
    return tokens


def text_of(loaded: Loaded, tokens: list[int]) -> str:
    return str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
