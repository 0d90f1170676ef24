"""Keys, values and queries that are as hard to search as a language model's, and as quick to make.

Keys have a few strong directions, outlier channels, topics that come back, and RoPE on top; the
first tokens are attention sinks; the query heads of a group agree more or less. A fact is a key
with a content of its own, among decoys that share a good part of it; a query asks for it later.
Everything follows from the seed, chunk by chunk: nobody needs to hold the context twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]

CHUNK_TOKENS = 1024

# Those without an underscore are the bench's too, which makes such keys on a GPU.
ROPE_BASE = 5e5
SEGMENT_TOKENS = 256  # of one topic
TOPICS = 64
TOPIC_SHARE = 0.6  # the rest, .8 of it, is each token's own: .6² + .8² = 1
_SINK_TOKENS = 4
HEAD_AGREEMENT = (0.9, 0.3)  # with what the group asks, from its first head to its last

# RoPE pairs that hardly turn within the context carry what models keep independent of the position.
OUTLIER_PAIRS = 4
# Larger ones hide more of what a key says from its signs. With these the default settings catch
# about as much attention as on the keys of a real model.
OUTLIER_SIZE = 4.0
_SINK_PAIRS = 4
_SINK_SIZE = 8.0

KEY_SPECTRUM = (3.0, -0.5)  # size of direction i: 3 · i^-.5
QUERY_SPECTRUM = (12.5, -0.25)
QUERY_OUTLIER = 0.05  # of the keys' mean: queries are not distributed like keys
_QUERY_SINK = 8

_FACT_SIZE = 7.0  # the norm of what ordinary keys say besides their mean
_FACT_QUESTION = (48.0, 68.0)  # length of what is added to a query to ask, from … to
_DECOYS = 32
_DECOY_LIKENESS = (0.5, 0.8)


@dataclass(frozen=True)
class Shape:
    tokens: int
    steps: int
    layers: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class Fact:
    position: int
    asked_at: int  # decode step
    strength: float


@dataclass(frozen=True)
class _Layer:
    """What is fixed for a layer: one row per kv head."""

    key_mean: Floats  # (kv_heads, head_dim)
    query_mean: Floats
    key_mixer: Floats  # (kv_heads, head_dim, head_dim), from independent numbers to key content
    query_mixer: Floats
    topics: Floats  # (kv_heads, topics, head_dim), independent numbers
    topic_values: Floats
    fact_contents: Floats  # (facts, kv_heads, head_dim), unit vectors, as stored (after RoPE)


def plan_facts(
    shape: Shape, facts: int, update: int, local: int, rng: np.random.Generator
) -> list[Fact]:
    """Most facts lie in the prompt, at even depths; where a flush happens, a few are told later."""
    told_last = min(update // 2, shape.steps - 1)
    told = facts // 10 if shape.steps > update + facts else 0
    in_prompt = facts - told
    depths = (np.arange(in_prompt) + rng.uniform(0.1, 0.9, in_prompt)) / in_prompt
    room = shape.tokens - local - SEGMENT_TOKENS
    positions = [_SINK_TOKENS + int(depth * room) for depth in depths]
    steps = list(np.linspace(5, min(shape.steps, update) - 5, in_prompt).astype(int))
    rng.shuffle(steps)
    positions += [shape.tokens + int(step) for step in np.linspace(20, told_last - 20, told)]
    steps += list(np.linspace(update + 10, shape.steps - 10, told).astype(int))
    strengths = rng.uniform(*_FACT_QUESTION, facts)
    return [Fact(p, int(s), float(x)) for p, s, x in zip(positions, steps, strengths, strict=True)]


class Workload:
    def __init__(self, shape: Shape, *, facts: int, update: int, local: int, seed: int) -> None:
        self.shape = shape
        self._seed = seed
        self.facts = plan_facts(shape, facts, update, local, self._rng(0))
        self._agreement = np.linspace(*HEAD_AGREEMENT, shape.group, dtype=np.float32)

        rng = self._rng(1)
        decoys = min(_DECOYS, shape.tokens // (16 * max(facts, 1)))
        taken = {fact.position for fact in self.facts}
        free = [p for p in range(_SINK_TOKENS, shape.tokens) if p not in taken]
        places = rng.choice(free, (facts, decoys), replace=False)
        likeness = rng.uniform(*_DECOY_LIKENESS, (facts, decoys))
        # Every key that speaks of a fact: where, of which fact, how like it.
        self._told = sorted(
            [(fact.position, i, 1.0) for i, fact in enumerate(self.facts)]
            + [
                (int(places[i, j]), i, float(likeness[i, j]))
                for i in range(facts)
                for j in range(decoys)
            ]
        )
        self._layers = [self._make_layer(layer) for layer in range(shape.layers)]

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self._seed, *stream]))

    @cached_property
    def _frequencies(self) -> NDArray[np.float64]:
        half = self.shape.head_dim // 2
        return ROPE_BASE ** (-np.arange(half) / half)

    def _pair_dims(self, first: int, count: int) -> NDArray[np.int64]:
        """Dimensions of RoPE pairs, counted from the slowest one."""
        half = self.shape.head_dim // 2
        pairs = half - 1 - np.arange(first, first + count)
        return np.concatenate([pairs, pairs + half])

    def _make_layer(self, layer: int) -> _Layer:
        rng, heads, dim = self._rng(2, layer), self.shape.kv_heads, self.shape.head_dim
        sink_dims = self._pair_dims(0, _SINK_PAIRS)
        outlier_dims = self._pair_dims(_SINK_PAIRS, OUTLIER_PAIRS)

        key_mean = rng.normal(0, 0.25, (heads, dim))
        key_mean[:, outlier_dims] = OUTLIER_SIZE * rng.choice([-1, 1], (heads, len(outlier_dims)))
        key_mean[:, sink_dims] = 0
        query_mean = QUERY_OUTLIER * key_mean
        query_mean[:, sink_dims[:_SINK_PAIRS]] = _QUERY_SINK

        basis = np.linalg.qr(rng.standard_normal((heads, dim, dim)))[0]
        order = np.arange(1, dim + 1)[:, None]
        mixers = [size * order**power * basis for size, power in (KEY_SPECTRUM, QUERY_SPECTRUM)]
        mixers[1][..., np.concatenate([sink_dims, outlier_dims])] = 0

        contents = rng.standard_normal((len(self.facts), heads, dim))
        contents[..., np.concatenate([sink_dims, outlier_dims])] = 0
        contents /= np.linalg.norm(contents, axis=-1, keepdims=True)
        return _Layer(
            key_mean.astype(np.float32),
            query_mean.astype(np.float32),
            mixers[0].astype(np.float32),
            mixers[1].astype(np.float32),
            rng.standard_normal((heads, TOPICS, dim), np.float32),
            rng.standard_normal((heads, TOPICS, dim), np.float32),
            contents.astype(np.float32),
        )

    def _topic(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """A topic lasts for a segment and comes back many times."""
        segments = tokens // SEGMENT_TOKENS
        first, last = int(segments[0]), int(segments[-1])
        of_segment = [int(self._rng(3, s).integers(TOPICS)) for s in range(first, last + 1)]
        return np.array(of_segment)[segments - first]

    def _rotate(self, rows: Floats, tokens: NDArray[np.int64], out: Halves | Floats) -> None:
        """RoPE; rows and out are (tokens, heads, head_dim)."""
        half = self.shape.head_dim // 2
        angles = tokens[:, None] * self._frequencies
        cos = np.cos(angles).astype(np.float32)[:, None]
        sin = np.sin(angles).astype(np.float32)[:, None]
        first, second = rows[..., :half], rows[..., half:]
        out[..., :half] = first * cos - second * sin
        out[..., half:] = second * cos + first * sin

    def _place_facts(self, layer: _Layer, index: int, tokens: NDArray[np.int64], k: Halves) -> None:
        rng = self._rng(4, index)
        mean = np.broadcast_to(layer.key_mean, (1, *layer.key_mean.shape))
        for position, fact, likeness in self._told:
            if not tokens[0] <= position <= tokens[-1]:
                continue
            own = rng.standard_normal(layer.key_mean.shape, np.float32)
            own /= np.linalg.norm(own, axis=-1, keepdims=True)
            row = np.empty_like(mean)
            self._rotate(mean, np.array([position]), row)
            content = likeness * layer.fact_contents[fact] + (1 - likeness**2) ** 0.5 * own
            k[position - tokens[0]] = row[0] + _FACT_SIZE * content

    def chunk(self, layer: int, begin: int) -> tuple[Halves, Halves]:
        """Keys and values from token `begin` on, a multiple of CHUNK_TOKENS; the last are fewer.

        (tokens, kv_heads, head_dim) each.
        """
        fixed, shape = self._layers[layer], self.shape
        end = min(begin + CHUNK_TOKENS, shape.tokens + shape.steps)
        tokens = np.arange(begin, end)
        topic = self._topic(tokens)
        own_share = np.float32((1 - TOPIC_SHARE**2) ** 0.5)

        rng = self._rng(5, layer, begin)
        noise = np.empty((shape.kv_heads, end - begin, shape.head_dim), np.float32)
        k, v = (np.empty((end - begin, shape.kv_heads, shape.head_dim), np.float16) for _ in "kv")

        rng.standard_normal(out=noise, dtype=np.float32)
        noise *= own_share
        noise += TOPIC_SHARE * fixed.topics[:, topic]
        rows = noise @ fixed.key_mixer
        rows += fixed.key_mean[:, None]
        if begin == 0:
            sink_dims = self._pair_dims(0, _SINK_PAIRS)
            rows[:, :_SINK_TOKENS] -= fixed.key_mean[:, None]
            rows[:, :_SINK_TOKENS, sink_dims[:_SINK_PAIRS]] += _SINK_SIZE
        self._rotate(rows.swapaxes(0, 1), tokens, k)
        self._place_facts(fixed, layer, tokens, k)

        rng.standard_normal(out=noise, dtype=np.float32)
        noise *= own_share
        noise += TOPIC_SHARE * fixed.topic_values[:, topic]
        if begin == 0:
            noise[:, :_SINK_TOKENS] *= 0.1  # sinks have little to say
        v[:] = noise.swapaxes(0, 1)
        return k, v

    def decode_rows(self, layer: int) -> tuple[Halves, Halves]:
        """Keys and values of the decoded tokens, (steps, kv_heads, head_dim) each."""
        shape = self.shape
        first = shape.tokens // CHUNK_TOKENS * CHUNK_TOKENS
        chunks = [
            self.chunk(layer, b) for b in range(first, shape.tokens + shape.steps, CHUNK_TOKENS)
        ]
        k, v = (np.concatenate(rows)[shape.tokens - first :] for rows in zip(*chunks, strict=True))
        return k, v

    def queries(self, layer: int) -> Halves:
        """(steps, query_heads, head_dim)."""
        fixed, shape = self._layers[layer], self.shape
        tokens = np.arange(shape.tokens, shape.tokens + shape.steps)
        topic = self._topic(tokens)
        rng = self._rng(6, layer)
        shared = rng.standard_normal((shape.steps, shape.kv_heads, 1, shape.head_dim), np.float32)
        shared = (1 - TOPIC_SHARE**2) ** 0.5 * shared
        shared += TOPIC_SHARE * fixed.topics[:, topic].swapaxes(0, 1)[:, :, None]
        own = rng.standard_normal((*shared.shape[:2], shape.group, shape.head_dim), np.float32)
        agreement = self._agreement[:, None]
        mixed = agreement * shared + np.sqrt(1 - agreement**2) * own
        rows = mixed @ fixed.query_mixer + fixed.query_mean[:, None]

        out = np.empty((shape.steps, shape.query_heads, shape.head_dim), np.float32)
        self._rotate(rows.reshape(out.shape), tokens, out)
        grouped = out.reshape(shape.steps, shape.kv_heads, shape.group, shape.head_dim)
        for i, fact in enumerate(self.facts):
            asked = fact.strength * agreement * fixed.fact_contents[i][:, None]
            grouped[fact.asked_at] += asked
        return out.astype(np.float16)
