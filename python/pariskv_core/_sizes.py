"""Bytes that a cache of some shape takes, as the engine itself counts them.

A small cache of the shape's one layer is filled and asked for its statistics, so nothing of the
engine's formats is repeated here. What a GPU holds beside that follows docs/memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import pariskv_core as pk

from ._shapes import ModelShape

MOST_TOKENS = 1 << 23  # of a sequence: kMostTokens in pariskv/sizes.h
_SEGMENTS = 4  # of the small cache; the last two give the bytes of one more
# The first segment has the sinks, and the window lies in the last two: these stay on a GPU.
_SEGMENTS_ON_GPU = 3


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer, one sequence."""

    segment_tokens: int
    block_tokens: int  # of a block of rows on a CPU; a GPU has them in segments
    rows: int  # K and V of a segment
    summaries: int  # of a segment
    state: int  # once: statistics, the balance
    tail: int  # once: copies of the tail's rows
    row_cache: int  # once, where rows are in host memory
    kept: int = 0  # once, with HardKV: kept rows and the queries that are remembered
    drops: bool = False  # of the segments of a zone none stays
    plain: int = 0  # K and V of a segment as they came: `rows`, unless zones have rows in 8 bits
    window: int = 0  # tokens behind a zone, at most


def of_layer(shape: ModelShape, **settings: object) -> LayerBytes:
    """settings: of pk.Config, for the CPU or a GPU alike."""
    config = shape.config(**settings)
    # Rows in 8 bits, and copies of a tail, are those of a zone that is searched.
    policy = config.policy
    if isinstance(policy, pk.ParisKV):
        policy = policy.replace(top_k=1)
    small = config.replace(
        layers=1,
        device="cpu",
        threads=1,
        memory_budget=0,
        host_budget=0,
        dense_below=0,
        policy=policy,
    )
    half = _SEGMENTS // 2 * small.segment_tokens
    k = np.zeros((half, shape.kv_heads, shape.head_dim), np.float16)
    v = np.zeros((half, shape.kv_heads, shape.value_dim), np.float16)
    with pk.Cache(small) as cache:
        sequence = cache.add()
        cache.prefill(0, [sequence], k[:1], v[:1])
        first = cache.stats()
        cache.prefill(0, [sequence], k[1:], v[1:])
        before = cache.stats()
        cache.prefill(0, [sequence], k, v)
        after = cache.stats()
    rows = (after.row_bytes - before.row_bytes) * 2 // _SEGMENTS
    summaries = (after.summary_bytes - before.summary_bytes) * 2 // _SEGMENTS
    plain = rows
    if config.kv_dtype != "auto":
        plain = of_layer(shape, **{**settings, "kv_dtype": "auto"}).rows
    return LayerBytes(
        small.segment_tokens,
        first.row_bytes * small.segment_tokens // plain,
        rows,
        summaries,
        after.summary_bytes - _SEGMENTS * summaries,
        after.kept_bytes if isinstance(config.policy, pk.ParisKV) else 0,
        _row_cache(config, rows),
        _kept(small),
        isinstance(config.policy, pk.HardKV) and config.policy.placement == "dropped",
        plain,
        config.local + config.update + getattr(config.policy, "block", 0),
    )


def _kept(small: pk.Config) -> int:
    """Of a zone that is longer than what is kept of it."""
    policy = small.policy
    if not isinstance(policy, pk.HardKV):
        return 0
    with pk.Cache(small) as cache:
        config = cache.config
        tokens = policy.most * (1 + policy.patience) + config.sink + config.local + 1
        q = np.zeros((tokens, config.query_heads, config.head_dim), np.float16)
        k = np.zeros((tokens, config.kv_heads, config.head_dim), np.float16)
        v = np.zeros((tokens, config.kv_heads, config.value_dim), np.float16)
        cache.prefill(0, [cache.add()], k, v, q=q)
        return cache.stats().kept_bytes


def _row_cache(config: pk.Config, segment_rows: int) -> int:
    """Tags, stamps and rows of as many slots as there are rows, a power of two from 16 up."""
    if not isinstance(config.policy, pk.ParisKV):
        return 0
    rows = 2 * config.policy.top_k if config.row_cache < 0 else config.row_cache
    if rows == 0:
        return 0
    slots = max(16, 1 << (rows - 1).bit_length())
    books = -(-config.kv_heads * slots * 12 // 256) * 256
    row = segment_rows // config.segment_tokens // config.kv_heads
    vectors = -(-row // 16) * 16  # of a row in 8 bits: with all of its first and last one
    return books + slots * config.kv_heads * vectors


@dataclass(frozen=True)
class Need:
    """Bytes of a batch of caches."""

    device: int
    host: int  # beside a GPU; 0 on the CPU, where all of it is the device's


def parts_of_batch(
    shape: ModelShape, layer: LayerBytes, tokens: int, batch: int, *, gpu: bool
) -> dict[str, Need]:
    """By the names under which `plan` shows them."""
    segments = -(-tokens // layer.segment_tokens)
    stay = min(segments, _SEGMENTS_ON_GPU) if layer.drops else segments
    here = min(stay, _SEGMENTS_ON_GPU) if gpu else stay
    rows = here * layer.rows + _resident(layer, layer.segment_tokens)
    if not gpu:
        rows = _rows_on_cpu(layer, tokens) + _resident(layer, layer.block_tokens)
    layers = batch * shape.layers
    sliding = shape.sliding_layers * min(shape.window, tokens) * layer.plain // layer.segment_tokens
    return {
        "key summaries": Need(layers * (layer.state + segments * layer.summaries), 0),
        "keys and values": Need(layers * rows, layers * (stay - here) * layer.rows),
        "kept rows": Need(layers * layer.kept, 0),
        "row cache, tail": Need(layers * (layer.tail + (layer.row_cache if gpu else 0)), 0),
        "sliding layers": Need(batch * sliding, 0),
    }


def _rows_on_cpu(layer: LayerBytes, tokens: int) -> int:
    most = tokens
    if layer.drops:  # the first segment; of another one a zone may have all but the last token
        left = layer.segment_tokens - 1 + layer.window
        most = min(tokens, layer.segment_tokens + _whole(left, layer.block_tokens))
    return _whole(most, layer.block_tokens) * layer.rows // layer.segment_tokens


def _whole(tokens: int, block: int) -> int:
    """In whole blocks."""
    return -(-tokens // block) * block


def _resident(layer: LayerBytes, block_tokens: int) -> int:
    """Where zones have rows in 8 bits: others, of the sink and of a window, in blocks."""
    if layer.plain == layer.rows:
        return 0
    # A window may begin with the last token of a block.
    tokens = 2 * block_tokens + _whole(layer.window - 1, block_tokens)
    return tokens * layer.plain // layer.segment_tokens


def of_batch(shape: ModelShape, layer: LayerBytes, tokens: int, batch: int, *, gpu: bool) -> Need:
    parts = parts_of_batch(shape, layer, tokens, batch, gpu=gpu).values()
    return Need(sum(part.device for part in parts), sum(part.host for part in parts))


def longest(
    shape: ModelShape, layer: LayerBytes, batch: int, memory: int, host: int, *, gpu: bool
) -> int:
    """Tokens in whole segments that fit; 0: not even one segment does."""

    def fits(segments: int) -> bool:
        need = of_batch(shape, layer, segments * layer.segment_tokens, batch, gpu=gpu)
        return need.device <= memory and need.host <= host

    most = 1
    while fits(most) and most * layer.segment_tokens < MOST_TOKENS:
        most *= 2
    low, high = 0, min(most, MOST_TOKENS // layer.segment_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * layer.segment_tokens
