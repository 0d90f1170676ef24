"""What the test files share: small configs, tensors in the config's dtype, and comparisons.

The engine is used through its public door alone. Tensors are torch's, since NumPy has no
bfloat16; test_interop.py is about everybody else's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import oracle
import oracle_blocks
import oracle_search
import oracle_tail
import pariskv_core as pk
import torch
from oracle_copies import copied

HERE = Path(__file__).parent
DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = pk.HEAD_DIMS
SCORERS = ("sign_norm", "votes")
GROUP_RULES = ("attention_mass", "mean_query")
# What is scored, and how: settings of a policy, by name.
SEARCHES = {
    "sign_norm": {},
    "votes": {"scorer": "votes"},
    "blocks of 64": {"block": 64},
    "blocks of 256": {"block": 256},
}
LEVELS = ("plain", "avx2", "avx512")

# Half a unit in the last place of the output's dtype, relative; float32 has its own bound.
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# What the fp32 arithmetic before that rounding may be off, for values of size one.
ARITHMETIC = 1e-5


_device = "cpu"


def devices() -> list[str]:
    return [name for name in ("cpu", "cuda") if pk.is_built(name) and pk.is_available(name)]


def current_device() -> str:
    """What configs and torch's new tensors are for unless they say; the test's `device`."""
    return _device


def use_device(name: str) -> None:
    global _device
    _device = name
    torch.set_default_device(None if name == "cpu" else name)


POLICY_FIELDS = tuple(pk.ParisKV().__getstate__())


def config_of(**fields) -> pk.Config:
    """A Config whose policy has the settings among `fields` that are ParisKV's."""
    own = {name: fields.pop(name) for name in POLICY_FIELDS if name in fields}
    return pk.Config(**fields, policy=pk.ParisKV(**own))


def make_config(**changes) -> pk.Config:
    """A config small enough that every region fills within a few hundred tokens."""
    fields = {
        "layers": 1,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "dtype": "float32",
        "sink": 4,
        "local": 32,
        "update": 48,
        "top_k": 8,
        "dense_below": 0,
        "placement": "host",
        "schedule": [(0, 0.25, 0.3)],
        "block": 0,  # zones of blocks open with 1,024 tokens; tests of these say so
        "tail": "none",
        "segment_tokens": max(64, changes.get("block", 0)),
        "threads": 2,
        "device": current_device(),
    }
    return config_of(**{**fields, **changes})


def with_changes(config: pk.Config, **changes) -> pk.Config:
    own = {name: changes.pop(name) for name in POLICY_FIELDS if name in changes}
    return config.replace(**changes, policy=config.policy.replace(**own))


def tensor(array, config: pk.Config) -> torch.Tensor:
    # Rounded on the CPU whatever the device, so that every backend is given the same bits.
    dtype = getattr(torch, config.dtype)
    return torch.tensor(np.asarray(array), dtype=dtype, device="cpu").to(config.device)


def float32(array, config: pk.Config) -> torch.Tensor:
    return torch.tensor(np.asarray(array), dtype=torch.float32, device=config.device)


def f64(array) -> np.ndarray:
    """The values that the engine was given, or gave, exactly."""
    if isinstance(array, torch.Tensor):
        return array.detach().cpu().double().numpy()
    return np.asarray(array).astype(np.float64)


def randn_kv(
    rng: np.random.Generator, tokens: int, config: pk.Config
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (
        tensor(rng.standard_normal((tokens, config.kv_heads, dim)), config)
        for dim in (config.head_dim, config.value_dim)
    )
    return k, v


def randn_q(rng: np.random.Generator, batch: int, config: pk.Config) -> torch.Tensor:
    return tensor(rng.standard_normal((batch, config.query_heads, config.head_dim)), config)


def randn_step(rng: np.random.Generator, batch: int, config: pk.Config) -> tuple[torch.Tensor, ...]:
    """q, k, v of one decode step."""
    return (randn_q(rng, batch, config), *randn_kv(rng, batch, config))


def bits(array) -> np.ndarray:
    """The bytes of every element, so that equality means equality, NaN and all."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous()
        array = array.view(torch.int16 if array.element_size() == 2 else torch.int32).numpy()
    array = np.ascontiguousarray(array)
    return array.view(np.dtype(f"u{array.itemsize}"))


def assert_same_bits(a, b, what: str = "") -> None:
    a, b = bits(a), bits(b)
    assert a.shape == b.shape, what
    differ = np.argwhere(a != b)
    assert len(differ) == 0, f"{what}: {len(differ)} of {a.size} differ, first at {differ[0]}"


SUMMARISED = ("signs", "magnitudes", "weights", "norms")


def explained(explanation) -> dict[str, np.ndarray]:
    """All arrays of an explanation, in the order of the search; none where nothing was searched."""
    if not explanation.searched:
        assert explanation.details is None
        return {}
    own, rows = explanation.details, explanation
    return {
        "coarse": own.coarse,
        "candidate_positions": own.candidate_positions,
        "positions": rows.positions,
        "worth": rows.worth,
        "estimated": own.estimated,
        "exact": rows.exact,
        "error": own.error,
        "mass": own.mass,
    }


def assert_same_explanation(a, b) -> None:
    for name in ("searched", "zone_begin", "zone_tokens"):
        assert getattr(a, name) == getattr(b, name), name
    mine, theirs = explained(a), explained(b)
    for name in mine:
        assert_same_bits(mine[name], theirs[name], name)


def assert_same_summaries(a, b) -> None:
    assert (a.zone_begin, a.block) == (b.zone_begin, b.block)
    for name in (*SUMMARISED, "means", "balance"):
        assert_same_bits(getattr(a, name), getattr(b, name), name)


def assert_same_sequence(a: pk.Cache, s: int, b: pk.Cache, t: int, q: torch.Tensor) -> None:
    """Two sequences that no call can tell apart; q (query_heads, head_dim) probes them."""
    for layer in range(a.config.layers):
        assert regions_of(a, s, layer) == regions_of(b, t, layer)
        assert_same_summaries(a.summaries(layer, s), b.summaries(layer, t))
        assert_same_explanation(a.explain(layer, s, q), b.explain(layer, t, q))
        total = a.length(s, layer)
        for mine, theirs in zip(rows_of(a, s, layer), rows_of(b, t, layer), strict=True):
            assert_same_bits(mine, theirs, "rows")
        if total:
            assert_same_bits(a.attend(layer, [s], q[None]), b.attend(layer, [t], q[None]))


def rows_of(cache: pk.Cache, s: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All K and V that a sequence holds."""
    config, total = cache.config, cache.length(s, layer)
    pair = tuple(
        torch.empty(
            (total, config.kv_heads, dim),
            dtype=getattr(torch, config.dtype),
            device=config.device,
        )
        for dim in (config.head_dim, config.value_dim)
    )
    cache.read(layer, s, 0, total, out=pair)
    return pair


def regions_of(cache: pk.Cache, s: int, layer: int = 0) -> tuple[int, int, int, int]:
    r = cache.regions(s, layer)
    return r.sink, r.retrieval, r.local, r.buffer


COUNTERS = (
    "sequences tokens row_bytes summary_bytes flushes encoded_keys unusable_keys decode_tokens "
    "searched_tokens candidates fetched_rows"
).split()


def state_of(cache: pk.Cache) -> dict:
    """Everything that can be asked of a cache, less its memory, of which scratch is a part."""
    stats = cache.stats()
    state = {name: getattr(stats, name) for name in COUNTERS}
    for s in cache.sequences():
        for layer in range(cache.config.layers):
            state[s, layer] = (cache.length(s, layer), *regions_of(cache, s, layer))
    return state


def summary_of(summaries, head: int) -> oracle.Summary:
    """The engine's own summaries of one kv head, for the oracle to go on from."""
    return oracle.Summary(*(getattr(summaries, name)[head] for name in SUMMARISED))


def logits_of(options: dict) -> oracle.Logits:
    """The oracle's view of the keyword arguments of decode, attend and explain."""
    bias = options.get("sink_bias")
    return oracle.Logits(
        options.get("scale"), options.get("softcap", 0.0), None if bias is None else f64(bias)
    )


def _known_of(cache: pk.Cache, s: int, k: np.ndarray) -> tuple[list, list | None]:
    """For each kv head, the engine's own summaries; means as the oracle makes them of the keys."""
    summaries = cache.summaries(0, s)
    heads = [summary_of(summaries, head) for head in range(cache.config.kv_heads)]
    size = cache.config.policy.block
    if not size or not summaries.signs.shape[1]:
        return heads, None
    zone = summaries.zone_begin, summaries.zone_begin + summaries.signs.shape[1]
    return heads, [
        oracle_blocks.blocks_of(k[:, head], zone, size, summaries.balance[head])
        for head in range(cache.config.kv_heads)
    ]


def _keys_of_copies(config: pk.Config, k: np.ndarray, regions: tuple[int, ...]) -> np.ndarray:
    """Keys, those of the tail as its copies have them."""
    rows = config.policy.tail_rows
    tail = oracle_tail.sampled(regions[0], regions[0] + regions[1], rows, config.policy.seed)
    keys = k.copy()
    for head in range(config.kv_heads if len(tail) > 0 else 0):
        keys[tail, head] = copied(k[tail, head], rows)
    return keys


def decode_oracle(
    cache: pk.Cache, s: int, q: torch.Tensor, encoded: torch.Tensor | None = None, **options
) -> oracle_search.Decoded:
    """What the paper's mathematics makes of the rows and summaries that a cache holds. `encoded`:
    the keys that were encoded, where they were rounded later."""
    k, v = (f64(x) for x in rows_of(cache, s))
    keys = k if encoded is None else f64(encoded)
    regions, (heads, blocks) = regions_of(cache, s), _known_of(cache, s, keys)
    return oracle_search.decode(
        cache.config,
        f64(q),
        k,
        v,
        regions,
        heads,
        logits_of(options),
        blocks,
        _keys_of_copies(cache.config, k, regions),
    )


def coarse_oracle(cache: pk.Cache, s: int, q: torch.Tensor, **options) -> np.ndarray:
    """The coarse scores alone: of rows and queries, too, that are no numbers."""
    k = f64(rows_of(cache, s)[0])
    regions, (heads, blocks) = regions_of(cache, s), _known_of(cache, s, k)
    return np.stack(
        oracle_search.coarse_scores(
            cache.config, f64(q), k, regions, heads, logits_of(options), blocks
        )
    )


def assert_output_close(out, expected: np.ndarray, dtype: str, what: str = "") -> None:
    """Rounded to the dtype from something that fp32 got right; whole rows to the promise."""
    assert tuple(out.shape) == expected.shape, what
    if expected.size == 0:
        return
    error = np.abs(f64(out) - expected)
    allowed = ROUNDING[dtype] * np.abs(expected) + ARITHMETIC
    assert (error <= allowed).all(), f"{what}: {(error - allowed).max():.2e} more than may be"
    promised = 1e-5 if dtype == "float32" else 2e-3
    size = max(float(np.sqrt((expected**2).mean())), 1e-3)
    assert np.sqrt((error**2).mean()) <= promised * size + 1e-7, what


@contextlib.contextmanager
def unchanged(cache: pk.Cache):
    """Nothing that can be asked of the cache may differ afterwards."""
    before, live = state_of(cache), cache.stats().memory.live
    yield
    assert state_of(cache) == before
    now = cache.stats().memory.live
    # Rows that have arrived in host memory meanwhile leave the device.
    assert now == live if cache.config.device == "cpu" else now <= live


def child_environment(**changes: str) -> dict[str, str]:
    """For subprocesses that import the same engine and these files."""
    environment = {**os.environ, **changes}
    paths = [str(HERE), *(p for p in sys.path if p)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def settled(cache: pk.Cache) -> pk.Stats:
    """Of a cache on a GPU: once all that it was given is done and its rows have arrived."""
    for _ in range(2):  # a flush sends all rows on their way; any call takes note of arrivals
        torch.cuda.synchronize()
        cache.flush([])
    torch.cuda.synchronize()
    return cache.stats()


@dataclasses.dataclass
class Filled:
    """A cache with one sequence and what went into it."""

    cache: pk.Cache
    s: int
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor | None  # the prompt's queries, where the prefill brought them
    rng: np.random.Generator


def filled(config: pk.Config, tokens: int, seed: int = 0, queries: bool = False) -> Filled:
    rng = np.random.default_rng(seed)
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(rng, tokens, config)
    q = randn_q(rng, tokens, config) if queries else None
    for layer in range(config.layers):
        cache.prefill(layer, [s], k, v, q=q)
    return Filled(cache, s, k, v, q, rng)
