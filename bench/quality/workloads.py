"""Keys and queries like a language model's, each peculiarity a switch: deterministic, in NumPy.

On iid keys the best rows hold next to no attention, and a broken search scores like a good one.
What real keys have, and each thing may be left out of a `Spec` to see what it costs a method:

spectrum        a few directions carry most of the variance (eigenvalues fall as a power)
topics          neighbouring tokens resemble one another
outliers        some channels, among the slow rotary pairs, have a mean far from zero
rope            rotary positions
sinks           keys that every query attends to, at the front or later
planted         one row per query that is its best by a margin, at all depths
agreement       how much the heads of a group ask for the same thing
query_shift     queries off the distribution of the keys, against their mean
drift           mean and basis of the keys move while the model writes, slowly or at once
norms           as they come, mixed (a factor per key), or all the same as behind QK-norm

One workload is of one kv head and its group of query heads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

ROPE_THETA = 5e5
TOPIC_TOKENS = 256
TOPIC_SHARE = 0.6
FRONT_SINKS = 4
WINDOW = 32  # queries of the prompt's end
_SINK_PULL = 4.0  # what all queries have in common, once there are sinks
_DEPTHS = (0.01, 0.9)  # planted rows lie between these


@dataclass(frozen=True)
class Spec:
    tokens: int = 16_384  # of the prompt
    decoded: int = 0  # that follow
    asked_at: tuple[int, ...] = ()  # positions that queries are at; () is the end of the prompt
    steps: int = 16  # queries at each
    group: int = 4
    head_dim: int = 128
    seed: int = 0
    spectrum: float = 0.5  # eigenvalues' roots fall as i^-spectrum; 0 is white
    topics: bool = True
    mean: float = 0.5  # size of the keys' mean, per channel
    outliers: int = 4  # channels
    outlier_mean: float = 8.0
    rope: bool = True
    sinks: tuple[float, ...] = (0.0,)  # depths; at 0 there are four of them
    sink_mass: float = 0.3  # of the attention, each place
    planted: bool = True
    margin: float = 1.0  # of a planted row's logit over all others'
    agreement: tuple[float, float] = (0.9, 0.3)  # of the first head and the last
    query_shift: float = 0.0  # times the mean of the keys, subtracted
    drift: str = "none"  # "slow": over all decoded tokens; "switch": half way through them
    norms: str = "natural"  # "mixed", "unit"
    sharpness: float = 2.0  # standard deviation of a query's logits over the keys


@dataclass
class Ask:
    """Queries at one position, which see the keys before it."""

    position: int
    queries: np.ndarray  # (steps, group, head_dim) float32, after RoPE
    planted: np.ndarray  # (steps): the row that each is after; empty where none is planted


@dataclass
class Workload:
    spec: Spec
    keys: np.ndarray  # (tokens + decoded, head_dim) float32, after RoPE
    values: np.ndarray  # (tokens + decoded, head_dim) float32
    recent: np.ndarray  # (WINDOW, group, head_dim): queries at the end of the prompt
    asks: list[Ask] = field(default_factory=list)


def rope(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary positions on (tokens, head_dim), halves paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * ROPE_THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class _Source:
    """What keys and queries are drawn from."""

    def __init__(self, spec: Spec, rng: np.random.Generator) -> None:
        self.spec, self.rng, dim = spec, rng, spec.head_dim
        self.bases = [np.linalg.qr(rng.standard_normal((dim, dim)))[0].T for _ in range(2)]
        roots = (1.0 + np.arange(dim)) ** -spec.spectrum
        # The same size of keys whatever the spectrum.
        self.spectrum = roots * 3 * np.sqrt((1 / (1.0 + np.arange(dim))).sum() / (roots**2).sum())
        self.mean = spec.mean * rng.standard_normal(dim)
        # The slowest pairs but the last, which is the sinks'.
        pairs = np.arange(dim // 2 - 1 - spec.outliers // 2, dim // 2 - 1)
        channels = np.concatenate([pairs, pairs + dim // 2])
        self.mean[channels] += spec.outlier_mean * rng.choice([-1.0, 1.0], len(channels))
        self.sink = np.zeros(dim, np.float32)
        self.sink[-1] = 1.0
        # Last, so that longer workloads of a seed are drawn from the same distribution.
        total = spec.tokens + spec.decoded
        self.topics = rng.standard_normal((total // TOPIC_TOKENS + 1, dim)) * spec.topics

    def progress(self, positions: np.ndarray) -> np.ndarray:
        """How far the drift has gone: 0 to 1."""
        spec = self.spec
        if spec.drift == "none":
            return np.zeros(len(positions))
        gone = (positions - spec.tokens) / max(spec.decoded, 1)
        return np.clip(gone, 0, 1) if spec.drift == "slow" else (gone >= 0.5) * 1.0

    def latent(self, topics: np.ndarray) -> np.ndarray:
        """Topic and noise, of variance one."""
        noise = self.rng.standard_normal(topics.shape, dtype=np.float32)
        share = TOPIC_SHARE if self.spec.topics else 0.0
        return share * topics + np.sqrt(1 - share**2) * noise

    def in_basis(self, latent: np.ndarray, progress: np.ndarray) -> np.ndarray:
        """Latents (tokens, dim) as vectors; the basis turns from one into another."""
        scaled = (latent * self.spectrum).astype(np.float32)
        first, second = (scaled @ basis.astype(np.float32) for basis in self.bases)
        angle = progress[:, None].astype(np.float32) * np.float32(np.pi / 2)
        return np.cos(angle) * first + np.sin(angle) * second

    def keys(self) -> np.ndarray:
        """(tokens, head_dim), before RoPE."""
        positions = np.arange(self.spec.tokens + self.spec.decoded)
        progress = self.progress(positions)
        keys = self.in_basis(self.latent(self.topics[positions // TOPIC_TOKENS]), progress)
        keys += ((1 - 2 * progress)[:, None] * self.mean).astype(np.float32)
        if self.spec.norms == "mixed":
            keys *= np.exp(0.35 * self.rng.standard_normal((len(keys), 1))).astype(np.float32)
        elif self.spec.norms == "unit":
            keys *= np.sqrt(keys.shape[1]) / np.linalg.norm(keys, axis=1, keepdims=True)
        return keys

    def queries(self, position: int, targets: np.ndarray) -> np.ndarray:
        """(steps, group, head_dim) at a position, each about its target's topic; before RoPE."""
        spec, steps = self.spec, len(targets)
        agree = np.linspace(*spec.agreement, spec.group)[:, None]
        shared = self.latent(self.topics[targets // TOPIC_TOKENS])[:, None]
        own = self.rng.standard_normal((steps, spec.group, spec.head_dim))
        latent = (agree * shared + np.sqrt(1 - agree**2) * own).reshape(-1, spec.head_dim)
        progress = self.progress(np.full(len(latent), position))
        plain = self.in_basis(latent, progress)
        plain -= spec.query_shift * ((1 - 2 * progress)[:, None] * self.mean).astype(np.float32)
        if spec.sinks:
            plain += _SINK_PULL * self.sink
        return plain.reshape(steps, spec.group, -1)


def _placed(spec: Spec, plain: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return rope(plain, positions) if spec.rope else plain


def _sharpened(queries: np.ndarray, keys: np.ndarray, sharpness: float) -> np.ndarray:
    """Queries (steps, group, dim) whose logits over the keys have this standard deviation.

    From the keys' covariance: no logit needs to be worked out.
    """
    covariance = np.cov(keys, rowvar=False) / keys.shape[1]
    spread = np.sqrt(np.einsum("sgd,de,sge->sg", queries, covariance, queries))
    return (queries * (sharpness / spread)[..., None]).astype(np.float32)


def make(spec: Spec) -> Workload:
    rng = np.random.default_rng(spec.seed)
    source = _Source(spec, rng)
    total = spec.tokens + spec.decoded
    keys = _placed(spec, source.keys(), np.arange(total))
    themes = rng.standard_normal(source.topics.shape)
    values = source.latent(themes[np.arange(total) // TOPIC_TOKENS])

    asks = []
    for position in spec.asked_at or (spec.tokens,):
        targets = np.linspace(*_DEPTHS, spec.steps) * position
        # No two asks are after the same row.
        targets = targets.astype(np.int64) + len(asks)
        queries = _asked(source, keys, position, targets)
        asks.append(Ask(position, queries, targets if spec.planted else targets[:0]))
    ends = rng.integers(0, spec.tokens, WINDOW)
    recent = _asked(source, keys, spec.tokens, ends)

    _place_sinks(source, keys, asks)
    if spec.planted:
        _plant(spec, keys, asks)
    return Workload(spec, keys, values.astype(np.float32), recent, asks)


def _asked(source: _Source, keys: np.ndarray, position: int, targets: np.ndarray) -> np.ndarray:
    plain = source.queries(position, targets)
    flat = plain.reshape(-1, plain.shape[-1])
    placed = _placed(source.spec, flat, np.full(len(flat), position)).reshape(plain.shape)
    return _sharpened(placed, keys[:position], source.spec.sharpness)


def _log_sum_exp(x: np.ndarray) -> np.ndarray:
    top = x.max(axis=-1, keepdims=True)
    return np.log(np.exp(x - top).sum(axis=-1)) + top[..., 0]


def _place_sinks(source: _Source, keys: np.ndarray, asks: list[Ask]) -> None:
    """Makes some keys sinks: along what queries have in common, as long as their share asks for."""
    spec = source.spec
    root = np.sqrt(spec.head_dim)
    for depth in spec.sinks:
        first = int(depth * spec.tokens)
        count = FRONT_SINKS if depth == 0 else 1
        place = np.arange(first, first + count)
        direction = _placed(spec, np.tile(source.sink, (count, 1)), place)
        queries = asks[0].queries
        wanted = _log_sum_exp(queries @ keys[: asks[0].position].T / root).mean()
        wanted += np.log(spec.sink_mass / (1 - spec.sink_mass) / count)
        keys[place] = direction * (wanted * root / (queries @ direction.T).mean())


def _plant(spec: Spec, keys: np.ndarray, asks: list[Ask]) -> None:
    """Moves each target, as little as may be, until it is every head's best row by the margin.

    Not along what all queries have in common, or each planted row would be everybody's.
    """
    root = np.sqrt(spec.head_dim)
    common = np.concatenate([ask.queries.reshape(-1, spec.head_dim) for ask in asks]).mean(axis=0)
    common /= np.linalg.norm(common)
    planted = np.concatenate([ask.planted for ask in asks])
    natural = np.delete(np.arange(len(keys)), planted)
    others = keys[natural]
    for ask in asks:
        seen = others[: np.searchsorted(natural, ask.position)]
        best = (ask.queries @ seen.T).max(axis=-1) + spec.margin * root
        for q, target, goal in zip(ask.queries, ask.planted, best, strict=True):
            own = q - (q @ common)[:, None] * common
            keys[target] += np.linalg.pinv(own) @ (goal - q @ keys[target])


def variants(base: Spec) -> dict[str, Spec]:
    """A workload for each ingredient, switched off or made harder, beside the whole."""

    def but(**changes: object) -> Spec:
        return dataclasses.replace(base, **changes)  # type: ignore[arg-type]

    return {
        "all of it": base,
        "white spectrum": but(spectrum=0.0),
        "steep spectrum": but(spectrum=0.75),
        "no topics": but(topics=False),
        "no outlier channels": but(outliers=0),
        "8 outlier channels": but(outliers=8),
        "16 outlier channels": but(outliers=16),
        "no RoPE": but(rope=False),
        "no sinks": but(sinks=()),
        "a sink half way, too": but(sinks=(0.0, 0.5)),
        "nothing planted": but(planted=False),
        "heads agree at .9": but(agreement=(0.9, 0.9)),
        "heads agree at .3": but(agreement=(0.3, 0.3)),
        "queries off the keys": but(query_shift=0.5),
        "mixed norms": but(norms="mixed"),
        "unit norms": but(norms="unit"),
    }
