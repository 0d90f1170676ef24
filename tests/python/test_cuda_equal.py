"""Two backends, one truth: what is whole numbers is equal bit for bit, the rest within rounding."""

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    DTYPES,
    GROUP_RULES,
    HEAD_DIMS,
    ROUNDING,
    SCORERS,
    assert_same_bits,
    assert_same_summaries,
    explained,
    f64,
    make_config,
    randn_kv,
    randn_step,
    regions_of,
    tensor,
)

pytestmark = pytest.mark.cuda

GROUPS = [(1, 2), (4, 2), (5, 2), (8, 2), (16, 2), (32, 1)]  # query heads of a kv head, kv heads
# Of the largest logit in the row: fp32 sums in another order.
ESTIMATE = 2.0**-12
# Rows whose worth is nearer than this, relative to the threshold, may be taken for one another.
NEAR_TIE = 1e-4


class Both:
    """The same sequences in a cache of each backend."""

    def __init__(self, **changes):
        self.caches = [pk.Cache(make_config(device=name, **changes)) for name in ("cpu", "cuda")]
        self.config = self.caches[0].config
        self.rng = np.random.default_rng(17)
        self.sequences: list[int] = []

    def each(self, call) -> tuple:
        return tuple(call(cache) for cache in self.caches)

    def prefill(self, keys: np.ndarray, values: np.ndarray | None = None) -> int:
        """A new sequence with these keys (tokens, kv_heads, head_dim), and values."""
        if values is None:
            values = self.rng.standard_normal((*keys.shape[:2], self.config.value_dim))

        def prefill(cache: pk.Cache) -> int:
            s = cache.add()
            cache.prefill(0, [s], tensor(keys, cache.config), tensor(values, cache.config))
            return s

        mine, theirs = self.each(prefill)
        assert mine == theirs
        self.sequences.append(mine)
        return mine

    def random(self, tokens: int, size: float = 1.0) -> int:
        shape = (tokens, self.config.kv_heads, self.config.head_dim)
        return self.prefill(size * self.rng.standard_normal(shape))

    def query(self, batch: int | None = None) -> np.ndarray:
        shape = (self.config.query_heads, self.config.head_dim)
        return self.rng.standard_normal(shape if batch is None else (batch, *shape))

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = len(self.sequences)
        q = self.query(batch)
        k, v = (
            self.rng.standard_normal((batch, self.config.kv_heads, dim))
            for dim in (self.config.head_dim, self.config.value_dim)
        )
        return self.each(
            lambda cache: cache.decode(
                0, self.sequences, *(tensor(x, cache.config) for x in (q, k, v))
            )
        )

    def check(self, s: int, q: np.ndarray | None = None, floats: bool = True) -> bool:
        """Compares all that can be seen; true when the same rows were selected."""
        mine, theirs = self.each(lambda cache: regions_of(cache, s))
        assert mine == theirs
        assert_same_summaries(*self.each(lambda cache: cache.summaries(0, s)))
        q = self.query() if q is None else q
        a, b = self.each(lambda cache: cache.explain(0, s, tensor(q, cache.config)))
        assert (a.searched, a.zone_begin, a.zone_tokens) == (
            b.searched,
            b.zone_begin,
            b.zone_tokens,
        )
        if not a.searched:
            return True
        assert_same_bits(a.details.coarse, b.details.coarse, "coarse")
        assert_same_bits(a.details.candidate_positions, b.details.candidate_positions, "candidates")
        if not floats:
            return True
        alike = [assert_near(a, b, head, self.config) for head in range(self.config.kv_heads)]
        return all(alike)


def by_position(values: np.ndarray, positions: np.ndarray) -> dict[int, float]:
    return {int(p): float(x) for p, x in zip(positions, values, strict=True) if p >= 0}


def assert_near(a, b, head: int, config: pk.Config) -> bool:
    group = config.query_heads // config.kv_heads
    worth = [by_position(e.worth[head], e.positions[head]) for e in (a, b)]
    assert len(worth[0]) == len(worth[1])
    for e in (a, b):
        assert (np.diff(e.worth[head][: len(worth[0])]) <= 0).all()
    # Who is in one of the two alone stands at the threshold.
    size = max(abs(x) for x in worth[0].values())
    for mine, theirs in (worth, worth[::-1]):
        threshold = min(theirs.values())
        slack = NEAR_TIE * (
            abs(threshold) if config.policy.group_rule == "attention_mass" else size
        )
        for position in mine.keys() - theirs.keys():
            assert abs(mine[position] - threshold) <= slack, position
    both = worth[0].keys() & worth[1].keys()
    for position in both:
        assert abs(worth[0][position] - worth[1][position]) <= NEAR_TIE * size
    for h in range(head * group, (head + 1) * group):
        for name in ("estimated", "exact"):
            x, y = (by_position(explained(e)[name][h], e.positions[head]) for e in (a, b))
            largest = max(abs(value) for value in x.values())
            for position in both:
                assert abs(x[position] - y[position]) <= ESTIMATE * largest, (name, h, position)
    return worth[0].keys() == worth[1].keys()


def assert_same_outputs(a: torch.Tensor, b: torch.Tensor, dtype: str) -> None:
    """Each within its own rounding of the same number."""
    x, y = f64(a), f64(b)
    allowed = 2 * ROUNDING[dtype] * np.maximum(np.abs(x), np.abs(y)) + 2e-5
    assert (np.abs(x - y) <= allowed).all(), float((np.abs(x - y) - allowed).max())


# Odd lengths everywhere: a zone that ends inside a segment, at its border, just behind it.
LENGTHS = [(37, 101, 300), (64, 164, 555), (36, 228, 421), (99, 129, 678), (100, 356, 1061)]


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("group", "kv_heads"), GROUPS)
def test_everything_at_every_shape(group, kv_heads, head_dim, dtype, scorer, group_rule):
    if scorer == "votes" and head_dim > 256:
        pytest.skip("votes of 64 subspaces do not fit a byte: test_config.py sees them refused")
    both = Both(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        scorer=scorer,
        group_rule=group_rule,
    )
    for length in LENGTHS[(group + head_dim) % len(LENGTHS)]:
        both.random(length)
    alike = [both.check(s) for s in both.sequences]
    for _ in range(3):
        outputs = both.decode()
    alike += [both.check(s) for s in both.sequences]
    if all(alike):
        # The queries of the steps differ from those of the checks: leave rare swaps out.
        x, y = (f64(out) for out in outputs)
        size = np.sqrt((x**2).mean())
        assert np.sqrt(((x - y) ** 2).mean()) <= 2e-3 * size + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 512), (512, 64), (80, 96)])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_values_of_another_size_than_keys(group, head_dim, value_dim, dtype):
    both = Both(query_heads=2 * group, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    for length in (64, 164, 555):
        both.random(length)
    for _ in range(3):
        outputs = both.decode()
    x, y = (f64(out) for out in outputs)
    assert x.shape == (3, 2 * group, value_dim)
    alike = [both.check(s) for s in both.sequences]
    if all(alike):
        size = np.sqrt((x**2).mean())
        assert np.sqrt(((x - y) ** 2).mean()) <= 2e-3 * size + 1e-6


SINKS = [0, 1, 4, 7, 16, 17, 64, 70]
ZONES = [1, 2, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 777]
LONG_ZONES = [1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8193, 16_385]


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("sink", SINKS)
def test_zones_around_every_border(scorer, sink):
    both = Both(scorer=scorer, sink=sink, local=8, top_k=1, min_candidates_per_row=1)
    for zone in ZONES:
        both.check(both.random(sink + zone + 8))


@pytest.mark.parametrize("segment_tokens", [64, 192, 1024])
@pytest.mark.parametrize("scorer", SCORERS)
def test_zones_of_thousands(scorer, segment_tokens):
    schedule = [(0, 0.5, 0.5), (2048, 0.2, 0.25), (8192, 0.05, 0.2)]
    both = Both(
        scorer=scorer,
        segment_tokens=segment_tokens,
        head_dim=128,
        query_heads=8,
        top_k=100,
        dtype="bfloat16",
        schedule=schedule,
    )
    for zone in LONG_ZONES:
        s = both.random(36 + zone)
        both.check(s)
        both.each(lambda cache, s=s: cache.remove(s))


@pytest.mark.parametrize(
    ("head_dim", "segment_tokens", "zone"), [(128, 1024, 40_000), (256, 64, 70_001)]
)
def test_slices_of_thousands(head_dim, segment_tokens, zone):
    """More candidates than are brought, or listed, or known segments, at a time."""
    both = Both(
        head_dim=head_dim,
        segment_tokens=segment_tokens,
        kv_heads=1,
        query_heads=4,
        top_k=100,
        dtype="bfloat16",
        schedule=[(0, 1.0, 0.5)],
    )
    both.check(both.random(36 + zone))


@pytest.mark.parametrize("count", [16, 34, 70, 140])
def test_however_many_are_at_work_at_once(count):
    """The more heads there are, the fewer blocks work for each: the same bits."""
    config = make_config(device="cuda", kv_heads=2, query_heads=4, head_dim=128, dtype="bfloat16")
    rng = np.random.default_rng(3)
    together, alone = pk.Cache(config), pk.Cache(config)
    lengths = [100 + 7 * (i % 50) for i in range(count)]
    k, v = randn_kv(rng, sum(lengths), config)
    pairs = []
    for cache in (together, alone):
        pairs.append([cache.add() for _ in lengths])
        cache.prefill(0, pairs[-1], k, v, lengths)
    for _ in range(2):
        step = randn_step(rng, count, config)
        out, lse = together.decode(0, pairs[0], *step, return_lse=True)
        for i, s in enumerate(pairs[1]):
            mine = tuple(x[i : i + 1] for x in step)
            out_i, lse_i = alone.decode(0, [s], *mine, return_lse=True)
            assert_same_bits(out[i : i + 1], out_i, f"sequence {i}")
            assert_same_bits(lse[i : i + 1], lse_i, f"sequence {i}")


@pytest.mark.parametrize("top_k", [1, 31, 32, 33, 100, 1000, 2048, 4096])
def test_many_rows(top_k):
    both = Both(top_k=top_k, kv_heads=2, query_heads=8, head_dim=128, schedule=[(0, 0.5, 0.5)])
    s = both.random(36 + 9001)
    both.check(s)
    if both.check(s):
        outputs = both.decode()
        assert_same_outputs(*outputs, "float32")


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("scorer", SCORERS)
def test_any_share_of_candidates(scorer, ratio):
    both = Both(scorer=scorer, schedule=[(0, ratio, max(ratio, 0.01))], min_candidates_per_row=1)
    for tokens in (300, 2222):
        both.check(both.random(tokens))


# --- Hostile keys ------------------------------------------------------------------------------


def mixed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Ordinary keys with everything that may go wrong among them."""
    keys = rng.standard_normal(shape)
    kind = rng.integers(0, 40, shape[:2])
    for i, size in enumerate([0.0, 1e-30, 1e30, 1e4, 1e-6, 1e-42, 1e-39, 3e37, 1e-20, 1e19]):
        keys[kind == i] *= size
    keys[kind == 10] = keys[0, 0]
    keys[kind == 11, 3] = np.nan
    keys[kind == 12, 7] = np.inf
    keys[kind == 13, 0] = -np.inf
    keys[kind == 14] = -0.0
    one_hot = np.zeros(shape[2])
    one_hot[5] = 2.0
    keys[kind == 15] = one_hot
    keys[kind == 16, 9] = 1e38  # one element that drowns the others
    return keys


def rounding_borders(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Few values, so that sums and their halves fall on borders of the codes."""
    return rng.integers(-2, 3, shape) * 0.5


def one_size(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape)


def all_equal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(rng.standard_normal(shape[1:]), shape)


def few_distinct(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal((5, *shape[1:]))[rng.integers(0, 5, shape[0])]


def one_hot(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    keys = np.zeros(shape)
    keys[..., 0] = rng.choice([1.0, -1.0, 3.0], shape[:2])
    return keys


def dead_channels(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    keys = rng.standard_normal(shape)
    keys[..., [1, 6, 20]] = 0
    keys[::7, :, 2] = 1e-20  # of no weight, and yet no zero
    return keys


def norms_of_all_sizes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    sizes = np.geomspace(1e-38, 1e37, shape[0])[:, None, None]
    return rng.standard_normal(shape) * sizes


def all_subnormal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) * 1e-40


def nothing_usable(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, np.nan)


def one_usable(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    keys = np.zeros(shape)
    keys[shape[0] // 2] = 1.0
    return keys


HOSTILE = [
    mixed,
    rounding_borders,
    one_size,
    all_equal,
    few_distinct,
    one_hot,
    dead_channels,
    norms_of_all_sizes,
    all_subnormal,
    nothing_usable,
    one_usable,
]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_keys(make, dtype, head_dim):
    for scorer in SCORERS:
        both = Both(scorer=scorer, dtype=dtype, head_dim=head_dim, local=40)
        keys = make(both.rng, (777, 2, head_dim))
        with np.errstate(over="ignore"):
            s = both.prefill(keys)
            for group_query in (both.query(), np.ones((4, head_dim)), 1e-3 * both.query()):
                both.check(s, group_query, floats=False)
        assert both.each(lambda cache: cache.stats().unusable_keys)[0] == (
            both.caches[1].stats().unusable_keys
        )


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e18, 1e30, 3e38])
@pytest.mark.parametrize("scorer", SCORERS)
def test_queries_at_the_ends_of_the_float_range(scorer, size):
    both = Both(scorer=scorer)
    s = both.random(500)
    q = both.query()
    both.check(s, np.sign(q) * size, floats=False)
    q[0, 3] = np.nan
    both.check(s, q, floats=False)
    q[1] = 0
    both.check(s, q, floats=False)
    both.check(s, np.zeros_like(q), floats=False)


# --- As sequences live -------------------------------------------------------------------------


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("scorer", SCORERS)
def test_flushes_truncation_and_forks(scorer, group_rule):
    both = Both(scorer=scorer, group_rule=group_rule, head_dim=128, dtype="bfloat16")
    for tokens in (60, 333, 700):
        both.random(tokens)
    for step in range(110):  # past two flushes
        both.decode()
        if step % 25 == 0:
            for s in both.sequences:
                both.check(s)
    assert len(set(both.each(lambda cache: cache.stats().flushes))) == 1
    fork, same = both.each(lambda cache: cache.fork(both.sequences[1]))
    assert fork == same
    both.each(lambda cache: cache.truncate([fork], drop=211))
    both.check(fork)
    both.sequences.append(fork)
    for _ in range(60):
        both.decode()
    for s in both.sequences:
        both.check(s)
    assert_same_bits(*(np.array(both.each(counters)[i]) for i in (0, 1)), "counters")


def counters(cache: pk.Cache) -> list[int]:
    stats = cache.stats()
    names = "tokens flushes encoded_keys unusable_keys decode_tokens searched_tokens candidates"
    return [getattr(stats, name) for name in [*names.split(), "fetched_rows"]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_of_the_same_rows(dtype):
    # With every row taken no tie can part them: outputs are the same numbers, rounded.
    both = Both(dtype=dtype, head_dim=128, query_heads=8, top_k=4000)
    for tokens in (5, 64, 500):
        both.random(tokens)
    for _ in range(60):
        assert_same_outputs(*both.decode(), dtype)
    q = both.query(30)
    attended = both.each(
        lambda cache: cache.attend(0, both.sequences, tensor(q, cache.config), [4, 6, 20])
    )
    assert_same_outputs(*attended, dtype)
